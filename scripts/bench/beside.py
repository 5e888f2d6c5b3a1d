"""Processes that stay, for runs beside each other on one device: each starts, imports and compiles once.

Time of a run beside others says nothing. Runs whose losses are to be compared lose nothing by it, and a GPU
that has several processes to choose from does not wait for the host of one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any


class Place:
    """A process that runs one call after the other, in its main thread, until it is closed.

    Functions and arguments are pickled: module-level functions, plain values. What a call returns or raises
    is its future's. `environment` is set before the first call, and so before CUDA is initialised.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _enter, (dict(environment or {}),)
        )
        self._pid = self._pool.submit(os.getpid)  # which starts it
        self._last: Future[Any] = self._pid

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self._last = self._pool.submit(function, *arguments)
        return self._last

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signal the process: a call that heeds SIGTERM ends; between calls nothing happens."""
        if self._pid.done() and not self._pid.exception():
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(self._pid.result(), number)

    def close(self, kill: bool = False) -> None:
        """Let the process end; `kill`: also one that is within a call, or whose last call failed and may have
        left threads that never end. One that is idle gives back its semaphores if it ends by itself."""
        if kill and (not self._last.done() or self._last.exception() is not None):
            wait([self._pid])  # one that is only starting cannot be told yet, and would then take its call
            self.stop(signal.SIGKILL)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _enter(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, _ignore)  # runs of train.py have a handler of their own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and closes


def _ignore(number: int, frame: object) -> None:
    pass
