"""What replicas send in few bits: the same bits on all of them, bounded errors, bytes, NaN, resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.bench.replicas import ThreadGroup, ThreadLedger, run_replicas
from tests.distributed_harness import run_distributed
from tests.sync.replicas import Run, differences, unequal
from titanforge.config.sections import DionOptions
from titanforge.kernels.exchange_codes import BLOCK, EXCHANGE_CODES, padded
from titanforge.sync import CommLedger, EveryStep, Replication, Scheduled, StatesEveryStep
from titanforge.sync.averaging import average
from titanforge.sync.encoded import SentBefore

LOW_RANK: dict[str, Any] = {"rule": "dion", "dion": DionOptions(rank_fraction=0.34)}  # r = 2 of 6 x 6
INT4, INT8 = EXCHANGE_CODES["int4"], EXCHANGE_CODES["int8"]


def _tensors(rank: int) -> list[torch.Tensor]:
    """Of shapes that fill no block, and columns of very different sizes."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(shape, generator=generator) for shape in ((3, 100), (7,), (0, 4), (2, 64, 5))]
    tensors[3] *= torch.tensor([1.0, 1e-3, 1e3, 1e-8, 0.0])
    return [*tensors[:3], tensors[3].mT]


def mean_in_codes(rank: int, world_size: int) -> None:
    """Unequal shares, against float64; the last tensor is a view that is not contiguous."""
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1][:world_size], dtype=torch.float64)
    shares /= shares.sum()
    everyones = [_tensors(r) for r in range(world_size)]
    for name, code in EXCHANGE_CODES.items():
        ledger, mine = CommLedger(), _tensors(rank)
        average(
            mine, float(shares[rank]), dist.group.WORLD, ledger,
            purpose="factors", bucket_elements=10**6, code=code,
        )  # fmt: skip
        assert differences(dist.group.WORLD, {str(i): t for i, t in enumerate(mine)}) == []
        for index, tensor in enumerate(mine):
            parts = [share * each[index].double() for share, each in zip(shares, everyones)]
            if tensor.numel() == 0:
                continue
            mean = torch.stack(parts).sum(0)
            # Columns of the last are 64 long, a block each.
            sizes = [p.abs().amax(-1, keepdim=True) if p.dim() == 3 else p.abs().amax() for p in parts]
            size = torch.stack(sizes).sum(0)
            steps = 2 * size / (2 * code.levels) if code.levels else size * 2**-7
            assert bool(((tensor - mean).abs() <= 1.02 * steps).all()), (name, index)
        assert bool((mine[3][:, 4] == 0).all())
        values = padded(320 + 64 + 640, world_size)
        sent = ledger.total("dp_replicate", "factors")
        assert (sent.bytes, sent.count) == (values * code.bits // 8 + 2 * values // 64 * bool(code.levels), 2)


def differences_from_before(rank: int, world_size: int) -> None:
    """Two exchanges a step, of values that change little: what is rounded away is sent in a later step."""
    sent, generator, errors = SentBefore(), torch.Generator().manual_seed(rank), []
    own = [torch.randn(4, 100, generator=generator), torch.randn(30, generator=generator)]
    for _ in range(5):
        sent.begin_step()
        for tensor in own:
            tensor += 1e-3 * torch.randn(tensor.shape, generator=generator)
            exact, told = tensor / world_size, tensor.clone()
            dist.all_reduce(exact)
            average(
                [told], 1 / world_size, dist.group.WORLD, CommLedger(),
                purpose="factors", bucket_elements=10**6, code=INT4, sent=sent,
            )  # fmt: skip
            assert differences(dist.group.WORLD, {"told": told}) == []
            errors.append(float((told - exact).abs().amax()))
    assert max(errors[-2:]) < 0.1 * min(errors[:2])


def not_a_number(rank: int, world_size: int) -> None:
    for code in EXCHANGE_CODES.values():
        tensor = torch.ones(4 * BLOCK)
        if rank == 1:
            tensor[70] = torch.nan
        average(
            [tensor], 1 / world_size, dist.group.WORLD, CommLedger(),
            purpose="factors", bucket_elements=10**6, code=code,
        )  # fmt: skip
        assert bool(tensor[70].isnan())
        assert differences(dist.group.WORLD, {"others": tensor[2 * BLOCK :]}) == []
        torch.testing.assert_close(tensor[2 * BLOCK :], torch.ones(2 * BLOCK), rtol=2**-6, atol=0)


def states_every_step(rank: int, world_size: int) -> None:
    """Bytes of a sync are those of the codes, and the update is near that of fp32."""
    for code, far in ((EXCHANGE_CODES["bfloat16"], 0.02), (INT8, 0.05), (INT4, 0.5)):
        exact, run = (Run(StatesEveryStep(code=each), uneven=True, **LOW_RANK) for each in (None, code))
        before = exact.weights()
        exact.step()
        run.step()
        assert differences(run.mesh["dp_replicate"].get_group(), run.weights()) == []
        for name in ("layers.0.weight", "layers.1.weight"):
            moved = exact.weights()[name] - before[name]
            error = torch.linalg.vector_norm(run.weights()[name] - exact.weights()[name])
            assert 0 < float(error) < far * float(torch.linalg.vector_norm(moved)), (code.name, name)
        # Both matrices in one tensor [2, 6, r]; B Q and B^T P are an exchange each.
        factors = 2 * code.piece_bytes(padded(2 * 6 * 2, world_size))
        sent = run.ledger.total("dp_replicate", "factors")
        assert (sent.bytes, sent.count) == (factors, 4)
        others = [item.tensor.numel() for item in run.optimizer.replicated_tensors() if item.slot == "weight"]
        blocks = sum(-(-size // BLOCK) for size in others if size != 36)
        gradients = code.piece_bytes(padded(blocks * BLOCK, world_size))
        assert run.ledger.total("dp_replicate", "gradients").bytes == gradients
        assert run.ledger.total("dp_replicate", "states").bytes == 0


def states_and_weights_stay(rank: int, world_size: int) -> None:
    """What an average overwrites goes as fp32: the same bytes, and the same bits, with codes and without."""
    runs = [Run(Scheduled(3, code=code), "sgd") for code in (None, INT4)]
    for run in runs:
        for _ in range(3):
            run.step()
    exact, run = runs
    assert unequal(run.everything(), exact.everything()) == []
    assert run.ledger.metrics() == exact.ledger.metrics()


def buckets(rank: int, world_size: int) -> None:
    """Gradients of every_step, over several buckets."""
    exact, run = Run(EveryStep(), "sgd"), Run(EveryStep(0.0002, INT8), "sgd")
    exact.backward()
    run.backward()
    ours = {name: param.grad for name, param in run.model.named_parameters()}
    for name, param in exact.model.named_parameters():
        assert param.grad is not None
        limit = world_size * 2 * float(param.grad.abs().amax()) / 127
        torch.testing.assert_close(ours[name], param.grad, rtol=0, atol=limit)
        assert not torch.equal(ours[name], param.grad)
    assert differences(run.mesh["dp_replicate"].get_group(), ours) == []
    slots = [[param.numel() for param in bucket.params] for bucket in run.policy._buckets]
    assert len(slots) > 2
    wanted = [padded(sum(-(-size // BLOCK) * BLOCK for size in bucket), world_size) for bucket in slots]
    sent = run.ledger.total("dp_replicate", "gradients")
    assert (sent.bytes, sent.count) == (sum(map(INT8.piece_bytes, wanted)), 2 * len(slots))
    run.policy.step(run.optimizer, torch.tensor(1.0), torch.tensor(1.0))
    run.step()
    assert differences(run.mesh["dp_replicate"].get_group(), run.everything()) == []


def over_shards(rank: int, world_size: int) -> None:
    """Shards of uneven sizes, each with its replica."""
    if world_size != 4:
        return
    for policy in (EveryStep(0.0002, INT4), StatesEveryStep(code=INT4)):
        run = Run(policy, "muon", shards=2)
        for _ in range(2):
            run.step()
        assert differences(run.mesh["dp_replicate"].get_group(), run.everything()) == []


def resumed(rank: int, world_size: int) -> None:
    def new() -> Run:
        return Run(StatesEveryStep(code=INT4), **LOW_RANK)

    whole = new()
    for _ in range(3):
        whole.step()
    whole.policy.synchronize("checkpoint")
    weights = {name: value.clone() for name, value in whole.model.state_dict().items()}
    states = _copied(whole.optimizer.state_dict())
    for _ in range(3):
        whole.step()
    other = new()
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(states)
    other.count = 3
    for _ in range(3):
        other.step()
    assert unequal(other.everything(), whole.everything()) == []


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def as_threads(rank: int, world_size: int) -> None:
    """Replicas as threads send and compute what processes do."""
    _as_threads(rank, world_size, StatesEveryStep, LOW_RANK)
    _as_threads(rank, world_size, EveryStep, {"rule": "sgd"})


def _as_threads(rank: int, world_size: int, policy: Any, options: dict[str, Any]) -> None:
    run = Run(policy(code=INT4), **options)
    for _ in range(2):
        run.step()

    def train(group: ThreadGroup) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        own: Any = policy(code=INT4)
        replica = Run(own, attach=False, **options)
        replica.replica, replica.ledger = group.rank(), ThreadLedger()
        own.attach(replica.model, Replication(group), replica.ledger, replica.optimizer)  # type: ignore[arg-type]
        for _ in range(2):
            replica.step()
        return replica.everything(), replica.ledger.metrics()

    found, sent = run_replicas(world_size, train)[rank]
    assert unequal(found, run.everything()) == []
    assert sent == run.ledger.metrics()


CHECKS = (
    mean_in_codes, differences_from_before, not_a_number, states_every_step, states_and_weights_stay, buckets,
    over_shards, resumed, as_threads,
)  # fmt: skip


def check_all(rank: int, world_size: int) -> None:
    for check in CHECKS:
        check(rank, world_size)


@pytest.mark.parametrize("processes", [2, 4])
def test_replicas(processes: int) -> None:
    run_distributed(check_all, processes, timeout=200)
