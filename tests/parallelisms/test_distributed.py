"""Joining, agreeing, failing together, and the two timeouts."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.distributed_harness import REPOSITORY, RankFailure, run_distributed
from titanforge.parallelisms import init_distributed


def _comm(init: int = 60, train: int = 60) -> SimpleNamespace:
    return SimpleNamespace(
        init_timeout_seconds=init,
        train_timeout_seconds=train,
        trace_buf_size=0,
        save_traces_folder="comm_traces",
        save_traces_file_prefix="rank_",
    )


def _agree(rank: int, world_size: int) -> None:
    runtime = init_distributed(_comm(), "cpu")
    assert (runtime.rank, runtime.world_size, runtime.is_main) == (rank, world_size, rank == 0)
    big = 2**53 + 1  # not representable in float64
    sums, maxima = runtime.agree(sums=[rank, big], maxima=[rank * 10])
    assert sums == (1, 2 * big) and maxima == (10,)
    assert runtime.agree(maxima=[7 - rank]) == ((), (7,))
    assert runtime.all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    failure = OSError("shard 7 is unreadable") if rank == 1 else None
    expected = OSError if rank == 1 else RuntimeError
    with pytest.raises(expected, match="shard 7 is unreadable"):
        runtime.raise_together(failure, 1, "loading data")


def test_ranks_agree_and_fail_together():
    run_distributed(_agree, 2, backend=None)  # init_distributed makes the group itself


def _peer_gone(rank: int, world_size: int) -> str:
    runtime = init_distributed(_comm(), "cpu")
    runtime.agree(sums=[rank])
    if rank == 1:
        return ""
    try:
        runtime.agree(sums=[rank])
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_rank_that_is_gone_is_told_with_what_to_do():
    message, _ = run_distributed(_peer_gone, 2, backend=None)
    assert message.startswith("the ranks could not agree over world (")
    assert "one is gone or slower than comm.train_timeout_seconds. Resume" in message


def _short_timeout(rank: int, world_size: int) -> float:
    runtime = init_distributed(_comm(init=100, train=2), "cpu")
    group = dist.new_group([0, 1], backend="gloo")
    runtime.shorten_timeout()
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=group)
        waited = time.monotonic() - start
        assert 1 < waited < 30, waited
        return waited
    time.sleep(6)
    return 0.0


def test_after_the_first_step_a_missing_rank_is_noticed_within_the_training_timeout():
    run_distributed(_short_timeout, 2, timeout=120)


def test_a_single_process_needs_no_torchrun():
    code = (
        "from tests.parallelisms.test_distributed import _comm\n"
        "from titanforge.parallelisms import init_distributed, ParallelDims\n"
        "r = init_distributed(_comm(), 'cpu'); d = ParallelDims(world_size=r.world_size)\n"
        "d.build_mesh('cpu'); r.shorten_timeout()\n"
        "assert r.agree([3], [4]) == ((3,), (4,)); print(d.data_rank_and_size()); r.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(0, 1)"


def test_a_rank_that_never_arrives_does_not_hang_the_harness():
    with pytest.raises(RankFailure, match="ran past"):
        run_distributed(_sleep_forever, 1, timeout=8)


def _sleep_forever(rank: int, world_size: int) -> None:
    time.sleep(1000)
