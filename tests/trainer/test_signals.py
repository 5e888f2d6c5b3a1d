"""SIGTERM and SIGINT: finish the step, save, leave with code 75; the resumed run goes on exactly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.distributed_harness import run_distributed
from tests.trainer.live import LiveRun, last_step, saved_steps
from tests.trainer.runs import argv, assert_same_checkpoint, assert_same_steps, lines, train_all, write_corpus
from titanforge.config import load_config
from titanforge.interruption import Interrupted
from titanforge.trainer import Trainer

ENDLESS = 100_000


def _run(folder: Path, corpus: Path, steps: int = ENDLESS, **more: Any) -> list[str]:
    return argv(
        folder,
        corpus,
        training__steps=steps,
        lr_scheduler__total_steps=ENDLESS,
        checkpoint__enable=True,
        checkpoint__keep_latest_k=0,
        **{"checkpoint__interval": ENDLESS, **more},
    )


def _interrupt_in_a_step(run: LiveRun, rank: int | None, number: signal.Signals) -> None:
    start = run.steps_logged()
    run.wait_for(lambda: run.steps_logged() >= start + 2)
    run.kill(number, rank)


def _interrupt_in_validation(run: LiveRun, rank: int | None, freq: int) -> None:
    """The line of a step that is evaluated is written before the evaluation, which takes seconds."""
    start = run.steps_logged()
    run.wait_for(lambda: run.steps_logged() > start and run.steps_logged() % freq == 0)
    step = run.steps_logged()
    run.kill(signal.SIGTERM, rank)
    run.end()
    assert last_step(run.folder) == step, "it went on training"
    assert not [line for line in lines(run.folder) if "validation_loss" in line], "it was not in validation"


def _interrupt_in_a_save(folder: Path, arguments: list[str], ranks: int, code: int) -> None:
    """A signal to the process or to torchrun; again with the resumed run if the save was over by then."""
    for _ in range(4):
        with LiveRun(folder, arguments, ranks) as run:
            run.wait_for(run.saving)
            run.kill(signal.SIGTERM)
            hit = run.saving()
            assert run.end() == code, run.errors
            _assert_saved_at_the_boundary(run, "SIGTERM")
        if hit:
            return
    raise AssertionError("no save was hit")


def _assert_saved_at_the_boundary(run: LiveRun, name: str) -> None:
    step = last_step(run.folder)
    assert saved_steps(run.folder)[-1] == step
    assert f"stopped: {name} after step {step}; run the same command again to resume." in run.errors
    assert run.errors.count("stopped:") == 1, "one rank speaks"
    assert 'train.py", line' not in run.errors, "no traceback of ours"
    assert not run.saving()


def test_a_process_interrupted_three_times_is_the_process_left_alone(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=400)
    folder = tmp_path / "run"
    big = {"model__dim": 128, "model__n_layers": 6}  # so that a save takes a while

    for number in (signal.SIGTERM, signal.SIGINT):
        with LiveRun(folder, _run(folder, corpus, **big), ranks=0) as run:
            _interrupt_in_a_step(run, 0, number)
            assert run.end() == 75, run.errors
            _assert_saved_at_the_boundary(run, number.name)

    _interrupt_in_a_save(folder, _run(folder, corpus, checkpoint__interval=5, **big), ranks=0, code=75)

    _assert_like_a_run_left_alone(tmp_path, folder, corpus, processes=1, **big)


def test_signals_to_one_rank_and_to_torchrun_stop_all_ranks_at_one_step(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=400)
    folder = tmp_path / "run"
    big = {"model__dim": 128, "model__n_layers": 4, "training__local_batch_size": 1}

    with LiveRun(folder, _run(folder, corpus, **big), ranks=2) as run:
        _interrupt_in_a_step(run, 1, signal.SIGTERM)
        # torchrun reports any failing rank as 1, and names its code.
        assert run.end() == 1, run.errors
        assert "exitcode  : 75" in run.errors
        _assert_saved_at_the_boundary(run, "SIGTERM")

    evaluated = {
        "validation__enable": True,
        "validation__freq": 5,
        "validation__steps": -1,
        "validation__local_batch_size": 1,
        "validation__dataset": "jsonl",
        "validation__dataset_path": write_corpus(tmp_path / "long.jsonl", documents=8000),
    }
    with LiveRun(folder, _run(folder, corpus, **big, **evaluated), ranks=2) as run:
        _interrupt_in_validation(run, 1, freq=5)
        assert run.end() == 1, run.errors
        _assert_saved_at_the_boundary(run, "SIGTERM")

    _interrupt_in_a_save(folder, _run(folder, corpus, checkpoint__interval=5, **big), ranks=2, code=1)

    _assert_like_a_run_left_alone(tmp_path, folder, corpus, processes=2, **big)


def _interrupt_itself(rank: int, world_size: int, arguments: list[str], after_step: int) -> str:
    """Rank 1 sends itself SIGTERM between two steps; returns what the first rank would print."""
    trainer = Trainer(load_config(arguments), "cpu")
    train_step = trainer.train_step

    def signalled() -> None:
        if rank == 1 and trainer.step == after_step:
            os.kill(os.getpid(), signal.SIGTERM)
        train_step()

    trainer.train_step = signalled
    try:
        trainer.train()
    except Interrupted as stop:
        return str(stop)
    finally:
        trainer.close()
    return "not interrupted"


def _interrupt_each(rank: int, world_size: int, runs: list[tuple[list[str], int]]) -> list[str]:
    return [_interrupt_itself(rank, world_size, *run) for run in runs]


def test_before_the_first_step_and_beside_a_save_in_the_background(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    first, background = tmp_path / "first", tmp_path / "background"
    more = {"checkpoint__async_mode": "async", "checkpoint__interval": 1}
    runs = [(_run(first, corpus), 0), (_run(background, corpus, **more), 2)]
    told = run_distributed(_interrupt_each, 2, runs)
    assert told[0] == told[1]
    assert [text.split(";")[0] for text in told[0]] == ["SIGTERM after step 0", "SIGTERM after step 2"]
    assert saved_steps(first) == [0] and saved_steps(background) == [1, 2]
    alone = tmp_path / "alone"
    train_all(2, [_run(folder, corpus, 4) for folder in (first, background, alone)])
    for folder in (first, background):
        assert_same_steps(folder, alone)
        assert_same_checkpoint(folder / "checkpoint/step-4", alone / "checkpoint/step-4")


def _assert_like_a_run_left_alone(tmp: Path, folder: Path, corpus: Path, processes: int, **more: Any) -> None:
    steps = last_step(folder) + 2
    alone = tmp / "alone"
    train_all(processes, [_run(folder, corpus, steps, **more), _run(alone, corpus, steps, **more)])
    assert_same_steps(folder, alone)
    assert_same_checkpoint(folder / f"checkpoint/step-{steps}", alone / f"checkpoint/step-{steps}")
