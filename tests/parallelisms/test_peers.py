"""A rank that fails, hangs or dies: all ranks end, and say which one it was."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed_harness import process_context
from titanforge.parallelisms import ParallelDims, init_distributed, peers
from titanforge.parallelisms.peers import Progress, blame, is_lost_connection
from titanforge.sync import CollectiveFailed, CommLedger

RANKS = 4


def rank_main(rank: int, folder: str, scenario: str) -> None:
    """Steps of one reduction each; something happens at the third. What the rank says goes to a file."""
    log = os.open(f"{folder}/log_{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    peers._LEAVE_SECONDS = 1.0
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=90),
    )
    comm = SimpleNamespace(
        init_timeout_seconds=90,
        train_timeout_seconds=3,
        trace_buf_size=100,
        save_traces_folder="traces",
        save_traces_file_prefix="rank_",
    )
    runtime = init_distributed(comm, "cpu", folder)
    ledger, step = CommLedger(ParallelDims(dp_shard=2, cp=2, world_size=RANKS).degrees_of), 0
    runtime.record = ledger.record
    runtime.where = lambda: (
        Progress(step, ledger.issued),
        f"in step {step}, latest collective: {ledger.latest}",
    )
    group = dist.new_group(backend="gloo")
    try:
        for step in range(1, 100):
            runtime.agree(sums=[rank])
            if step == 3:
                misbehave(rank, scenario)
            ledger.all_reduce(torch.ones(8), group, axis="dp_shard", purpose="second moments")
            if step == 1:
                runtime.shorten_timeout()
    except Exception as error:
        told = runtime.failed(error)
        print(f"{type(error).__name__}: {error} {told}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def misbehave(rank: int, scenario: str) -> None:
    if rank == 1 and scenario == "raises":
        raise ValueError("the shard is unreadable")
    if rank == 1 and scenario == "hangs":
        time.sleep(1000)
    if rank == 2 and scenario == "hangs":
        os.kill(os.getpid(), signal.SIGKILL)


def outcome(folder: Path, scenario: str) -> list[tuple[int | None, str]]:
    """Exit code and stderr of each rank."""
    context = process_context()
    processes: list[Any] = [
        context.Process(target=rank_main, args=(rank, str(folder), scenario)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 120
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
    return [(code, (folder / f"log_{rank}").read_text()) for rank, code in enumerate(codes)]


def test_a_rank_that_raises_is_named_by_all(tmp_path: Path) -> None:
    results = outcome(tmp_path, "raises")
    assert [code for code, _ in results] == [1] * RANKS
    for rank, (_, log) in enumerate(results):
        assert "ValueError: the shard is unreadable" in log
        if rank != 1:
            # Whether it was told by the failed collective, or stopped while it still waited in it.
            assert "the all-reduce of second moments over dp_shard" in log
            assert "rank 1 failed: ValueError: the shard is unreadable" in log


def test_ranks_that_hang_and_that_are_gone_are_named_and_nobody_stays(tmp_path: Path) -> None:
    results = outcome(tmp_path, "hangs")
    assert [code for code, _ in results] == [1, 1, -signal.SIGKILL, 1]
    verdicts = set()
    for rank in (0, 3):
        log = results[rank][1]
        assert "the all-reduce of second moments over dp_shard failed" in log
        degrees = "parallelism.data_parallel_shard_degree = 2 x parallelism.context_parallel_degree = 2"
        assert f"a rank along dp_shard ({degrees}) is gone or slower" in log and "replicate" not in log
        verdicts |= set(re.findall(r"rank 2 gave no sign of life.*test_peers\.py:[0-9]+", log))
    assert len(verdicts) == 1, "the first verdict is everybody's"
    (verdict,) = verdicts
    here = "in step 3, latest collective: the agreement over world"
    assert f"rank 1 is behind: {here}, in test_peers.py" in verdict
    # The one that hangs in its own code is ended from outside of it, and shows where it hung.
    assert f"error: rank 1 is stopped ({here}): {verdict}" in results[1][1]
    assert "in misbehave" in results[1][1]
    for rank in (0, 1, 3):
        entries = pickle.loads((tmp_path / f"traces/rank_{rank}").read_bytes())["entries"]
        assert "gloo:all_reduce" in {entry["profiling_name"] for entry in entries}


def test_blame() -> None:
    at = [Progress(2, 7), "in step 2", "a.py:1"]
    gone = "rank 1 gave no sign of life: gone, or stopped"
    assert blame({0: at, 2: at}, range(3)) == gone
    behind = [Progress(1, 6), "in step 1", "b.py:5"]
    assert blame({0: at, 1: behind}, range(2)) == "rank 1 is behind: in step 1, in b.py:5"
    # Who waits for one that is gone is late as well, and not to blame.
    told = blame({0: behind, 2: at}, range(3))
    assert told == f"{gone} (and rank 0 is behind: in step 1, in b.py:5: perhaps waiting for that)"
    assert "network between them failed" in blame({0: at, 1: at}, range(2))


def test_stages_of_a_pipeline_issue_different_numbers_of_collectives() -> None:
    first, last = (
        [Progress(5, 40, 0), "in step 5", "a.py:1"],
        [Progress(5, 90, 1), "in step 5, latest", "b.py:2"],
    )
    told = blame({0: first, 1: last}, range(2))
    assert told.startswith("each waits for another") and "behind" not in told
    assert told.endswith("rank 0 in step 5, in a.py:1; rank 1 in step 5, latest, in b.py:2")
    slow = [Progress(4, 95, 1), "in step 4", "c.py:3"]
    assert blame({0: first, 1: slow}, range(2)) == "rank 1 is behind: in step 4, in c.py:3"
    replica = [Progress(5, 39, 0), "in step 5", "d.py:4"]
    assert blame({0: first, 1: last, 2: replica}, range(3)) == "rank 2 is behind: in step 5, in d.py:4"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (CollectiveFailed("the broadcast", "tp", RuntimeError("Timed out waiting 3000ms for recv")), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (torch.OutOfMemoryError("CUDA out of memory; NCCL"), False),
        (dist.DistBackendError("NCCL error"), True),
    ],
)
def test_errors_of_a_rank_are_told_from_echoes(error: Exception, lost: bool) -> None:
    assert is_lost_connection(error) is lost
    try:
        raise ValueError("a step failed") from error
    except ValueError as outer:
        assert is_lost_connection(outer) is lost
