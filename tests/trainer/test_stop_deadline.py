"""A run that is told to stop ends in bounded time, also where the step under way never does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import torch

from tests.distributed_harness import process_context
from tests.trainer.live import saved_steps
from tests.trainer.runs import argv, write_corpus
from titanforge.evaluation import Validator
from titanforge.trainer import Trainer


def _signal_to_all() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _python_waits(trainer: Trainer) -> None:
    """As for compile workers that died of the same signal."""
    _signal_to_all()
    Future().result()


def _c_waits(trainer: Trainer) -> None:
    """Where no Python handler ever runs, as in a collective; the signal comes while it does."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    if not os.fork():
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    libc.pthread_mutex_lock(mutex)


def _child_is_killed(trainer: Trainer) -> None:
    _signal_to_all()
    raise RuntimeError("the compiler was killed")


def _save_is_slow(trainer: Trainer) -> None:
    """Signalled in a save, which takes longer than a step may; so does the one at the boundary."""
    save = trainer.checkpointer.save

    def slow(*args: object, **more: object) -> None:
        _signal_to_all()
        time.sleep(1.5)
        save(*args, **more)  # pyright: ignore[reportArgumentType]

    trainer.checkpointer.save = slow


def _last_save_is_slow(trainer: Trainer) -> None:
    """Signalled where the run waits for a save in the background, after its last step."""
    save = trainer.checkpointer.save

    def begun(*args: object, **more: object) -> None:
        save(*args, **more)  # pyright: ignore[reportArgumentType]
        future: Future[None] = Future()
        threading.Timer(1.5, future.set_result, (None,)).start()
        trainer.checkpointer._pending, trainer.checkpointer._background = (2, future), future
        _signal_to_all()

    trainer.checkpointer.save = begun
    trainer.config.training.steps = 2


def _save_in_background_is_slow(trainer: Trainer) -> None:
    _signal_to_all()
    trainer.checkpointer._background = writing = Future()
    time.sleep(1.5)
    writing.set_result(None)


def _forked_child_is_signalled(trainer: Trainer) -> None:
    """Which is no business of its parent."""
    if not (child := os.fork()):
        _signal_to_all()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(1.5)
    trainer.config.training.steps = 2


def _evaluation_is_long(trainer: Trainer, sample: bool = False) -> None:
    """Signalled in the evaluation after step 2: it ends after the batch, a sample after the token."""
    validation, forward = trainer.config.validation, trainer.model.forward
    validation.freq, validation.local_batch_size = 1, 1
    if sample:
        validation.sample_prompts, validation.sample_tokens = ["alpha"], 1000
    trainer.validator = Validator(trainer)

    def slow(*args: object, **more: object) -> torch.Tensor:
        if not trainer.model.training and sample == ("logits_at" in more):
            _signal_to_all()
            time.sleep(0.2)
        return forward(*args, **more)  # pyright: ignore[reportArgumentType]

    trainer.model.forward = slow


def _sample_is_long(trainer: Trainer) -> None:
    _evaluation_is_long(trainer, sample=True)


CASES = {
    # what happens in step 2: (exit code, what is told, latest step saved)
    _python_waits: (
        75,
        "SIGTERM in step 2, and no step boundary for 1 s since (job.stop_timeout_seconds)",
        1,
    ),
    _c_waits: (75, "SIGTERM in step 2, and no step boundary for 1 s since (job.stop_timeout_seconds)", 1),
    _child_is_killed: (75, "SIGTERM in step 2, which then failed (above)", 1),
    _save_is_slow: (75, "stopped: SIGTERM after step 2; run the same command again to resume.", 2),
    _last_save_is_slow: (0, "", 2),
    _save_in_background_is_slow: (75, "stopped: SIGTERM after step 1; run the same", 1),
    _forked_child_is_signalled: (0, "", 2),
    _evaluation_is_long: (75, "stopped: SIGTERM after step 2; run the same", 2),
    _sample_is_long: (75, "stopped: SIGTERM after step 2; run the same", 2),
}


def _run(arguments: list[str], errors: str, case: int) -> None:
    from train import main

    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w")
    train_step = Trainer.train_step

    def with_trouble(self: Trainer) -> None:
        if self.step == 1:
            list(CASES)[case](self)
        train_step(self)

    Trainer.train_step = with_trouble
    sys.exit(main(arguments))


def test_what_a_run_makes_of_a_signal_in_a_step_that_does_not_end(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    context = process_context()
    more = {"checkpoint__enable": True, "checkpoint__interval": 1, "training__steps": 50}
    more |= {"data__validation_fraction": 0.3}
    runs: list[tuple[Path, Path]] = []
    processes = []
    for index, case in enumerate(CASES):
        folder, errors = tmp_path / case.__name__, tmp_path / f"{case.__name__}.log"
        arguments = argv(folder, corpus, job__stop_timeout_seconds=1, **more)
        processes.append(context.Process(target=_run, args=(arguments, str(errors), index)))
        processes[-1].start()
        runs.append((folder, errors))
    for process in processes:
        process.join(60)
        if process.exitcode is None:
            process.kill()
    for process, (folder, errors), (code, told, saved) in zip(processes, runs, CASES.values()):
        text = errors.read_text()
        assert process.exitcode == code, f"{folder.name}: {process.exitcode}\n{text}"
        assert told in text, text
        assert saved_steps(folder)[-1] == saved
        if "no step boundary" in told:
            assert "most recent call first" in text, "the stacks"
