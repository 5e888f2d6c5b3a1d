"""kill -9 at any point of a save leaves a checkpoint to resume from; ranks fail together."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.runs import TinyRun, assert_same, expected
from tests.distributed_harness import RankFailure, run_distributed
from titanforge.checkpoint import CheckpointError, dcp_format, layout


def _die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_in_save(rank, world_size, folder, point):
    run = TinyRun(True, seed=1)
    run.manager(folder).save(1, run.state)
    run = TinyRun(True, seed=2)
    if rank == 0:
        if point == "after a shard":
            write = dcp_format.write_synced

            def write_then_die(path, text):
                write(path, text)
                _die()

            dcp_format.write_synced = write_then_die
        elif point == "before the marker":
            dcp_format.write_marker = _die
        elif point == "before the rename":
            dcp_format.publish = _die
    run.manager(folder, async_mode="async" if point == "after a shard" else "disabled").save(2, run.state)
    time.sleep(60)


@pytest.mark.parametrize(
    ("point", "resumed"), [("after a shard", 1), ("before the marker", 1), ("before the rename", 2)]
)
def test_kill_9_in_the_middle_of_a_save(tmp_path, one_process, point, resumed):
    with pytest.raises(RankFailure) as caught:
        run_distributed(_killed_in_save, 2, tmp_path, point)
    assert (caught.value.rank, caught.value.exitcode) == (0, -signal.SIGKILL), caught.value
    folder = tmp_path / "checkpoint"
    assert sorted(p.name for p in folder.iterdir()) == ["step-1", "step-2.tmp"]
    assert list((folder / "step-2.tmp").glob("*.distcp")), "it was in the middle"
    run = TinyRun(False, seed=9)
    manager = run.manager(tmp_path)
    # A save that had only its rename left to do is finished; any other is cleared away.
    assert manager.load(run.state)["train_state"]["step"] == resumed
    assert_same(run.full(), expected(resumed))
    assert not list(folder.glob("*.tmp"))
    assert layout.list_steps(folder) == list(range(1, resumed + 1))


def _one_rank_cannot_write(rank, world_size, folder):
    run = TinyRun(True, seed=1)
    manager = run.manager(folder, async_mode="async")
    manager.save(1, run.state)
    manager.maybe_wait()
    write = dcp_format.MarkedWriter.write_data

    def slow_or_full(self, plan, planner):
        time.sleep(1.5)
        if rank == 1:
            raise OSError("No space left on rank 1's disk")
        return write(self, plan, planner)

    dcp_format.MarkedWriter.write_data = slow_or_full
    manager.save(2, run.state)
    # Training's collectives run on beside the save's: their groups are separate.
    start, go_on = time.monotonic(), torch.tensor(True)
    while go_on:  # rank 0's clock decides for both
        total = torch.ones(())
        dist.all_reduce(total)
        go_on.fill_(time.monotonic() - start < 1)
        dist.broadcast(go_on, 0)
    assert total == 2
    with pytest.raises(CheckpointError, match=r"saving step 2 .*No space left on rank 1's disk"):
        manager.save(3, run.state)
    assert layout.list_steps(folder / "checkpoint") == [1]
    dcp_format.MarkedWriter.write_data = write
    manager.save(4, run.state)
    manager.close()
    assert layout.list_steps(folder / "checkpoint") == [1, 4]


def test_every_rank_learns_of_one_rank_that_cannot_write(tmp_path):
    run_distributed(_one_rank_cannot_write, 2, tmp_path)
