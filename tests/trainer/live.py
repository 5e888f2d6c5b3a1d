"""Runs of train.py watched from outside: waiting for what they write, finding ranks, sending real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed_harness import start_torchrun, stop_process
from tests.trainer.runs import training_lines


class LiveRun:
    """``train.py`` as its own process (``ranks=0``) or under torchrun; stderr goes to a file.

    Use it as a context manager, which ends whatever is still running.
    """

    def __init__(self, folder: Path, arguments: list[str], ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self._log = folder.with_name(f"{folder.name}_{time.monotonic_ns()}.log")
        with open(self._log, "w") as log:
            self.process = start_torchrun(
                ["train.py", *arguments], ranks, stdout=subprocess.DEVNULL, stderr=log
            )

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        stop_process(self.process)

    @property
    def errors(self) -> str:
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], Any], seconds: float = 120) -> Any:
        """Poll, quickly, until the condition holds."""
        end = time.monotonic() + seconds
        while not (result := condition()):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.errors}"
            assert time.monotonic() < end, f"not within {seconds} s:\n{self.errors}"
            time.sleep(0.001)
        return result

    def steps_logged(self) -> int:
        if not (self.folder / "metrics.jsonl").exists():
            return 0
        text = (self.folder / "metrics.jsonl").read_text()
        return text[: text.rfind("\n") + 1].count('"loss"')

    def saving(self) -> Path | None:
        """The checkpoint that is being written."""
        return next(iter((self.folder / "checkpoint").glob("step-*.tmp")), None)

    def pid(self, rank: int) -> int:
        """Process of a rank of this run."""
        if not self.ranks:
            return self.process.pid
        for entry in Path("/proc").iterdir():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) != self.process.pid:
                    continue
                if f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    return int(entry.name)
            except (OSError, ValueError):
                continue
        raise AssertionError(f"no process of rank {rank}")

    def kill(self, number: signal.Signals, rank: int | None = None) -> None:
        """Signal one rank, or the launcher."""
        os.kill(self.process.pid if rank is None else self.pid(rank), number)

    def end(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)


def last_step(folder: Path) -> int:
    return training_lines(folder)[-1]["step"]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoint").glob("step-*[0-9]"))
