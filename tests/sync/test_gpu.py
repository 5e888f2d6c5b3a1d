"""What the ledger says of collectives on GPUs: their time on the stream, read without waiting for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed_harness import run_distributed
from tests.sync.replicas import differences
from titanforge.kernels.exchange_codes import EXCHANGE_CODES
from titanforge.sync import CommLedger
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
