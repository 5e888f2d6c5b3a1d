"""What the ledger says of collectives on GPUs: their time on the stream, read without waiting for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed_harness import run_distributed
from tests.sync.replicas import differences, optimizer_of, unequal
from titanforge.config.sections import DionOptions
from titanforge.kernels.exchange_codes import EXCHANGE_CODES
from titanforge.sync import CommLedger, Replication, Rmmc
from titanforge.sync.averaging import average
from titanforge.sync.encoded import SentBefore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

CYCLES = 200_000_000  # about 0.1 s of an H200


def timed(rank: int, world_size: int) -> tuple[float, bool, bool]:
    torch.cuda.set_device(rank)
    ledger, group = CommLedger(), dist.group.WORLD
    tensor = torch.ones(1 << 20, device="cuda")
    ledger.all_reduce(tensor, group, axis="dp_replicate", purpose="first")  # makes the communicator
    torch.cuda.synchronize()
    if rank == 1:
        torch.cuda._sleep(CYCLES)
    ledger.all_reduce(tensor, group, axis="dp_replicate", purpose="states")
    early = "comm/dp_replicate/states_seconds" in ledger.timings()
    work = ledger.all_reduce(tensor, group, axis="dp_replicate", purpose="gradients", async_op=True)
    assert work is not None
    work.wait()
    torch.cuda.synchronize()
    told = ledger.timings()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), ledger.waited("all-reduce", "captured", "dp_replicate", tensor.device):
        tensor.add_(1)
    captured = "comm/dp_replicate/captured_seconds" in ledger.timings()
    assert told["comm/dp_replicate/gradients_seconds"] > 0
    return told["comm/dp_replicate/states_seconds"], early, captured


def test_the_one_that_waits_for_a_slower_rank_says_so() -> None:
    (waiting, early, captured), (slow, *_) = run_distributed(timed, 2, backend="nccl")
    assert not early and not captured
    assert waiting > 0.02 and slow < waiting / 2


def averaged_in_codes(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank)
    for code in EXCHANGE_CODES.values():
        sent, generator = SentBefore(), torch.Generator().manual_seed(rank)
        own = torch.randn(300, 100, generator=generator)
        for step in range(4):
            exact = own / world_size
            told = own.cuda()
            work = exact.cuda()
            dist.all_reduce(work)
            sent.begin_step()
            average(
                [told.mT], 1 / world_size, dist.group.WORLD, CommLedger(),
                purpose="factors", bucket_elements=10**6, code=code, sent=sent,
            )  # fmt: skip
            assert differences(dist.group.WORLD, {"told": told}) == []
            error = float((told - work).abs().amax() / work.abs().amax())
            assert error < (2e-2 if step or code.bits > 4 else 0.3), (code.name, step, error)


def test_codes_over_nccl() -> None:
    run_distributed(averaged_in_codes, 2, backend="nccl")


def trained(device: str, rule: str, ahead: bool) -> tuple[dict[str, Tensor], list[str | None]]:
    """Weights and states of this replica, and what each step was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 192), nn.Linear(192, 64)).to(device)
    named = nn.ModuleDict({"layers": model})
    optimizer = optimizer_of(named, rule, dion=DionOptions(rank_fraction=0.25))
    policy = Rmmc(0.3, warmup_steps=1, max_interval=3)
    policy.attach(named, Replication(dist.group.WORLD), CommLedger(), optimizer)
    policy._ahead = ahead
    reasons = []
    for step in range(12):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        for param in named.parameters():
            param.grad = (torch.randn(param.shape, generator=generator) * (1 + step % 3)).to(device)
        out = step == 5 and dist.get_rank() == 1 and not policy.syncs_next
        policy.begin_step(1, [10, 10])
        policy.step(optimizer, torch.tensor(float(not out), device=device), torch.tensor(1.0, device=device))
        events = policy.take_events()
        reasons.append(events[-1]["sync"] if events else None)
    found = {f"{item.name}/{item.slot}": item.tensor.clone() for item in optimizer.replicated_tensors()}
    return found, reasons


def launched_ahead(rank: int, world_size: int, device: str = "cuda") -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    for rule in ("sgd", "muon", "rmnp", "dion"):
        ours, reasons = trained(device, rule, ahead=True)
        theirs, told = trained(device, rule, ahead=False)
        assert reasons == told and {None, "rmmc"} <= set(reasons), (rule, reasons, told)
        assert unequal(ours, theirs) == [], rule


def test_a_local_step_launched_before_the_decision_over_nccl() -> None:
    run_distributed(launched_ahead, 2, backend="nccl")
