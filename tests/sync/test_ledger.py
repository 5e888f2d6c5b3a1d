"""The ledger's arithmetic, and that every wrapped collective is counted once."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import torch.distributed as dist

from tests.distributed_harness import run_distributed
from titanforge.config.sections import Sync
from titanforge.optim.links import DataLinks, RowSum
from titanforge.sync import (
    CollectiveFailed,
    CommLedger,
    EveryStep,
    Rmmc,
    Scheduled,
    StatesEveryStep,
    build_sync_policy,
)


def test_totals() -> None:
    ledger = CommLedger()
    ledger.record("dp_replicate", "gradients", 100, 2)
    ledger.record("dp_replicate", "gradients", 50)
    ledger.record("dp_replicate", "decision", 4)
    ledger.record("loss", "loss", 8)
    assert (ledger.total().bytes, ledger.total().count) == (162, 5)
    assert ledger.total(axis="dp_replicate").bytes == 154
    assert ledger.total(purpose="gradients").count == 3
    assert ledger.metrics()["comm/dp_replicate/gradients_bytes"] == 150
    resumed = CommLedger()
    resumed.record("loss", "loss", 1)
    resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert resumed.metrics() == ledger.metrics()


def test_one_rank_says_nothing() -> None:
    ledger = CommLedger()
    tensor = torch.ones(3)
    assert ledger.all_reduce(tensor, None, axis="loss", purpose="loss") is None
    output = torch.zeros(3)
    assert ledger.reduce_scatter(output, tensor, None, axis="loss", purpose="loss") is None
    assert torch.equal(output, tensor)
    for collective in (ledger.all_to_all, ledger.all_gather):
        rows = torch.zeros(1, 3)
        assert collective(rows, tensor.view_as(rows), None, axis="loss", purpose="loss") is None
        assert torch.equal(rows[0], tensor)
    assert ledger.total().count == 0


def test_policies_by_name() -> None:
    assert isinstance(build_sync_policy(Sync()), EveryStep)
    assert isinstance(build_sync_policy(Sync(reduce="states")), StatesEveryStep)
    scheduled = build_sync_policy(Sync(policy="scheduled", interval=7))
    assert isinstance(scheduled, Scheduled) and scheduled.interval == 7
    rmmc = build_sync_policy(Sync(policy="rmmc", threshold=0.7))
    assert isinstance(rmmc, Rmmc) and rmmc.threshold == 0.7
    unknown = Sync()
    unknown.policy = "sometimes"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"sync\.policy = 'sometimes'.*valid: every_step"):
        build_sync_policy(unknown)
    unsent = Sync()
    unsent.exchange_dtype = "int3"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        ValueError, match=r"sync\.exchange_dtype = 'int3'.*valid: float32, bfloat16, int8, int4"
    ):
        build_sync_policy(unsent)
    with pytest.raises(ValueError, match=r"sync\.bucket_mib must be positive"):
        build_sync_policy(Sync(bucket_mib=0.0))


def collectives(rank: int, world_size: int) -> dict[str, int]:
    ledger, group = CommLedger(), dist.group.WORLD
    summed = torch.full((4,), float(rank + 1))
    ledger.all_reduce(summed, group, axis="loss", purpose="sum")
    assert torch.equal(summed, torch.full((4,), 3.0))
    largest = torch.tensor([float(rank)])
    work = ledger.all_reduce(largest, group, axis="loss", purpose="max", op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    assert float(largest) == 1.0
    value = torch.tensor([float(rank)])
    ledger.broadcast(value, group, group_src=1, axis="loss", purpose="broadcast")
    assert float(value) == 1.0
    piece = torch.zeros(2)
    ledger.reduce_scatter(piece, torch.arange(4.0), group, axis="loss", purpose="scatter")
    assert piece.tolist() == [0.0 + 4 * rank, 2.0 + 4 * rank]
    dealt, gathered = torch.zeros(2, 3), torch.zeros(2, 3)
    rows = torch.tensor([[0.0], [1.0]]).expand(2, 3) + 10 * rank
    ledger.all_to_all(dealt, rows.contiguous(), group, axis="loss", purpose="halves")
    assert dealt.tolist() == [[rank] * 3, [10.0 + rank] * 3]
    ledger.all_gather(gathered, dealt[0], group, axis="loss", purpose="halves")
    assert gathered.tolist() == [[0.0] * 3, [1.0] * 3]
    waited = ledger.timings()
    assert waited["comm/loss/max_seconds"] > 0, "whoever waits, it counts"
    assert waited["comm/loss/sum_seconds"] > 0 and ledger.total("loss").seconds < 60
    work = ledger.reduce_scatter(piece, torch.arange(4.0), group, axis="loss", purpose="later", async_op=True)
    assert work is not None
    assert "comm/loss/later_seconds" not in ledger.timings(), "launched is not waited for"
    work.wait()
    assert 0 < ledger.timings()["comm/loss/later_seconds"] < 60
    return ledger.metrics()


def test_collectives_are_counted() -> None:
    first, second = run_distributed(collectives, 2)
    assert first == second
    assert first["comm/loss/sum_bytes"] == 16 and first["comm/loss/sum_count"] == 1
    assert first["comm/loss/max_bytes"] == 4
    assert first["comm/loss/broadcast_bytes"] == 4
    assert first["comm/loss/scatter_bytes"] == 16
    assert first["comm/loss/halves_bytes"] == 24, "as of one all-reduce of the six values"


def moments_of_one_gone(rank: int, world_size: int) -> str:
    """Dobb's second moments, which are launched in one place and waited for in another."""
    ledger, group = CommLedger(), dist.group.WORLD
    mean = functools.partial(ledger.all_reduce, group=group, axis="dp_replicate", purpose="second moments")
    links = DataLinks(replicas=2, all_reduce=mean)
    RowSum(torch.ones(1, 4), links).wait()
    assert ledger.timings()["comm/dp_replicate/second moments_seconds"] > 0
    if rank == 1:
        return ""
    try:
        for _ in range(3):
            RowSum(torch.ones(1, 4), links).wait()
    except CollectiveFailed as error:
        return str(error)
    return "nothing was raised"


def test_whoever_waits_for_a_lost_rank_is_told_which_collective_it_was() -> None:
    message, _ = run_distributed(moments_of_one_gone, 2, timeout=60)
    assert "the all-reduce of second moments over dp_replicate failed" in message
