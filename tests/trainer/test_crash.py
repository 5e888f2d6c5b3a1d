"""kill -9 in the middle of a save, and a damaged newest checkpoint: training goes on from the good one; in
the middle of a step: the others end and say who it was. The same where a replica hangs."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.distributed_harness import process_context
from tests.trainer.live import LiveRun, saved_steps
from tests.trainer.runs import argv, column, train_all, training_lines, write_corpus
from titanforge.device_step import DeviceStep
from titanforge.parallelisms import peers


def test_kill_9_in_a_save_and_a_truncated_checkpoint_cost_only_the_steps_since(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=200)
    folder = tmp_path / "run"

    def arguments(steps: int) -> list[str]:
        return argv(
            folder,
            corpus,
            training__steps=steps,
            training__local_batch_size=1,
            lr_scheduler__total_steps=1000,
            checkpoint__enable=True,
            checkpoint__interval=2,
            model__dim=192,  # a save long enough to be hit
            model__n_layers=6,
        )

    left = None
    while left is None:  # as long as the save is over before the signal; the test's time limit ends that
        with LiveRun(folder, arguments(1000), ranks=2) as run:
            run.wait_for(lambda run=run: run.steps_logged() > 0)
            pid = run.pid(0)  # looked up early, as that takes a while
            begun = run.steps_logged()
            run.wait_for(lambda run=run, begun=begun: run.steps_logged() >= begun + 6 and run.saving())
            os.kill(pid, signal.SIGKILL)
            assert run.end() == 1, "torchrun ends the other rank, too"
            assert "Signal 9 (SIGKILL)" in run.errors
            left = run.saving()
    good = saved_steps(folder)
    assert left.name == f"step-{good[-1] + 2}.tmp"
    killed = {line["step"]: line["loss"] for line in training_lines(folder)}
    assert max(killed) == good[-1] + 2

    newest = folder / "checkpoint" / f"step-{good[-1]}"
    weights = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with open(weights, "r+b") as file:
        file.truncate(weights.stat().st_size // 2)

    steps = good[-1] + 2
    # A second group, on the same two ranks, so that the losses must be the same bits.
    (errors,) = train_all(2, [arguments(steps)])
    assert f"step-{good[-1]} skipped: {weights.name} has " in errors and "truncated" in errors
    (resumed,) = [line for line in training_lines(folder) if "resumed_from" in line]
    assert resumed["resumed_from"] == good[-2]
    assert resumed["step"] == good[-2] + 1
    assert column(folder, "loss") == [killed[step] for step in range(1, steps + 1)]
    assert saved_steps(folder)[-1] == steps
    assert not list((folder / "checkpoint").glob("*.tmp"))


def _rank(
    rank: int, port: int, arguments: list[str], errors: str, misbehave: Callable[[int, int], None]
) -> None:
    from train import main

    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w")
    torch.set_num_threads(1)
    peers._ANSWER_SECONDS, peers._LEAVE_SECONDS = 2.0, 1.0
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    accumulate = DeviceStep._accumulate

    def with_misbehaviour(self: DeviceStep, batches: list) -> torch.Tensor:
        misbehave(rank, self.trainer.step + 1)
        return accumulate(self, batches)

    DeviceStep._accumulate = with_misbehaviour
    sys.exit(main(arguments))


HANGS_IN = 5
TIMEOUT = 4


def _die(rank: int, step: int) -> None:
    if rank == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang(rank: int, step: int) -> None:
    if rank == 1 and step == HANGS_IN:
        print(f"hangs at {time.monotonic()}", file=sys.stderr, flush=True)
        time.sleep(1000)


def _ends(
    folder: Path, runs: dict[str, list[str]], misbehave: Callable[[int, int], None]
) -> dict[str, list[tuple[int | None, str]]]:
    """Exit code and stderr of both ranks of each run, all at the same time. Without torchrun, which would end
    the other rank."""
    context, started = process_context(), {}
    for name, arguments in runs.items():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            logs = [folder / f"{name}_{rank}.log" for rank in range(2)]
            started[name] = (
                logs,
                [
                    context.Process(target=_rank, args=(rank, port, arguments, str(logs[rank]), misbehave))
                    for rank in range(2)
                ],
            )
    for _, processes in started.values():
        for process in processes:
            process.start()
    end = time.monotonic() + 120
    found = {}
    for name, (logs, processes) in started.items():
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        found[name] = [(code, log.read_text()) for code, log in zip(codes, logs)]
    return found


def test_a_rank_killed_in_a_step_is_named_where_pytorch_issued_the_collective(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    split = {
        "parallelism__tensor_parallel_degree": 2,
        "model__n_kv_heads": 2,
        "comm__train_timeout_seconds": 30,
    }
    arguments = argv(tmp_path / "run", corpus, training__steps=50, **split)
    (code, told), (other, _) = _ends(tmp_path, {"run": arguments}, _die)["run"]
    assert [code, other] == [1, -signal.SIGKILL]
    (line,) = [line for line in told.splitlines() if "rank 0 ends" in line]
    assert "in step 3, latest collective: the agreement over world; a rank is gone" in line, line
    assert line.endswith("rank 1 gave no sign of life: gone, or stopped")
    assert "GLHF" not in line


def test_a_replica_that_hangs_between_syncs_ends_both_and_is_named(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    common = {
        "training__steps": 50,
        "parallelism__data_parallel_replicate_degree": 2,
        "optimizer__name": "muon",
        "sync__warmup_steps": 1,
        "metrics__log_freq": 1000,
        "comm__train_timeout_seconds": TIMEOUT,
    }
    policies = {
        "scheduled": {"sync__policy": "scheduled", "sync__interval": 7},
        "rmmc": {"sync__policy": "rmmc", "sync__threshold": 1e9},
    }
    runs = {name: argv(tmp_path / name, corpus, **common, **keys) for name, keys in policies.items()}
    # `scheduled` goes on by itself up to its next sync, in step 8, and waits there; `rmmc` for the decision.
    waits_for = {
        "scheduled": "the ranks could not agree over world",
        "rmmc": "the all-reduce of decision over world failed",
    }
    ends = _ends(tmp_path, runs, _hang)
    ended = time.monotonic()
    for name, ((code, told), (other, stopped)) in ends.items():
        assert [code, other] == [1, 1], f"{name}: {told}{stopped}"
        hung = float(re.findall("hangs at (.*)", stopped)[0])
        assert TIMEOUT < ended - hung < TIMEOUT + 15, f"{name}: neither early nor long after the timeout"
        (line,) = [line for line in told.splitlines() if line.startswith("error: ")]
        assert line.startswith(f"error: rank 0 ends: {waits_for[name]} ("), line
        assert "slower than comm.train_timeout_seconds. Resume from the last checkpoint" in line
        (verdict,) = re.findall(r"rank 1 is behind: in step 5, .* in test_crash\.py:\d+$", line)
        # The other is ended from outside of its own code, though it is rank 0 that keeps the store.
        (line,) = [line for line in stopped.splitlines() if line.startswith("error: ")]
        assert (
            line.startswith("error: rank 1 is stopped (in step 5, ") and f"{verdict}. It stood here" in line
        )
        assert "in _hang" in stopped
