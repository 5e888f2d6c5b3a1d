"""kill -9 in the middle of a save, and a damaged newest checkpoint: training goes on from the good one."""

from __future__ import annotations

import os
import signal

from tests.trainer.live import LiveRun, saved_steps
from tests.trainer.runs import argv, column, train_all, training_lines, write_corpus


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
