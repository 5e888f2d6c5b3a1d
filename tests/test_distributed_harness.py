"""The harness that all distributed tests stand on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed_harness import RankFailure, run_distributed, run_torchrun


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> int:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    print(f"rank {rank} says {value.item()}")
    return int(value)


def _one_rank_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the culprit")
    dist.barrier()  # waits for a rank that never comes


def _one_rank_is_killed(rank: int, world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_every_rank_returns_its_result():
    assert run_distributed(_sum_of_ranks, 2, 10) == [21, 21]


def test_the_failing_rank_is_named_and_the_others_do_not_cost_the_timeout():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="the culprit") as caught:
        run_distributed(_one_rank_raises, 2, timeout=100)
    assert (caught.value.rank, caught.value.exception_type) == (1, "KeyError")
    assert time.monotonic() - start < 60


def test_a_killed_rank_is_reported_with_its_signal():
    with pytest.raises(RankFailure) as caught:
        run_distributed(_one_rank_is_killed, 2, timeout=100)
    assert (caught.value.rank, caught.value.exitcode) == (0, -signal.SIGKILL)


def test_torchrun_runs_a_script_on_every_rank(tmp_path):
    script = tmp_path / "hello.py"
    # In one write: print makes several, which those of the other rank may come between.
    script.write_text(
        "import os; os.write(1, 'rank {RANK} of {WORLD_SIZE}\\n'.format(**os.environ).encode())"
    )
    done = run_torchrun([str(script)], nproc=2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def _loses_a_connection_at_first(rank: int, world_size: int, folder: str) -> int:
    if rank == 1 and not (Path(folder) / "seen").exists():
        (Path(folder) / "seen").touch()
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [::1]:1")
    return rank


def test_ranks_start_again_where_gloo_could_not_connect_them(tmp_path):
    with pytest.warns(UserWarning, match="the ranks start again"):
        assert run_distributed(_loses_a_connection_at_first, 2, str(tmp_path)) == [0, 1]
