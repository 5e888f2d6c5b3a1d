"""Stopping at a step boundary when the process is told to, and the exit codes that say how a run ended."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: run again to go on
EXIT_NONFINITE = 76

# One Ctrl-C under torchrun comes twice: from the terminal, and passed on by torchrun soon after.
_SECONDS_OF_ONE_PRESS = 3.0


class Interrupted(Exception):
    """Every rank agreed to stop; carries the signal's name."""


class NonFiniteLoss(Exception):
    """The loss or the gradient of a step was not finite and `training.nonfinite_loss` is "stop"."""


class StopSignal:
    """Remembers SIGTERM and SIGINT instead of dying of them; ranks agree on it at step boundaries.

    A second SIGINT (Ctrl-C pressed again, some seconds later) raises KeyboardInterrupt at once, for whoever
    cannot wait. A boundary may never come: the signal goes to the whole process group and, say, compile
    workers die of it that a step waits for. So the process ends itself, with `EXIT_INTERRUPTED` and its
    stacks shown, `seconds` after a signal that nothing was made of; time in `unhurried` or while `busy` does
    not count.

    seconds: until then; None for no limit.
    where: what the process is at, in words; asked from another thread.
    busy: whether something is under way that must not be cut off; asked from another thread.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(
        self,
        seconds: float | None = None,
        where: Callable[[], str] = lambda: "",
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.received: int = 0
        self._first_time = 0.0
        self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        self._seconds, self._where, self._busy = seconds, where, busy
        self._heeded = threading.Event()
        self._unhurried = 0
        if seconds is None:
            return
        # A handler waits for the main thread to be in Python code, which a hanging one may never be again.
        # Bytes in this pipe do not.
        self._pipe, write = os.pipe()
        os.set_blocking(write, False)
        self._write = write
        self._previous_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        _watched.add(self)
        self._thread = threading.Thread(target=self._watch, name="stop signal", daemon=True)
        self._thread.start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            if time.monotonic() - self._first_time > _SECONDS_OF_ONE_PRESS:
                raise KeyboardInterrupt
            return
        self.received, self._first_time = number, time.monotonic()

    @staticmethod
    def name(number: int) -> str:
        return signal.Signals(number).name

    def heeded(self) -> None:
        """The boundary is reached: what follows, a save above all, may take its time."""
        self._heeded.set()

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """For what is bounded by itself and must not be cut off: a save."""
        self._unhurried += 1
        try:
            yield
        finally:
            self._unhurried -= 1

    def close(self) -> None:
        self._heeded.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._seconds is not None and self in _watched:
            _watched.discard(self)
            signal.set_wakeup_fd(self._previous_fd)
            os.write(self._write, b"\0")
            self._thread.join()
            os.close(self._write)
            os.close(self._pipe)

    def _watch(self) -> None:
        assert self._seconds is not None
        number = 0
        while number not in self.SIGNALS:
            number = os.read(self._pipe, 1)[0]
            if self._heeded.is_set():
                return
        left = self._seconds
        while left > 0:
            before = time.monotonic()
            if self._heeded.wait(min(left, 1.0)):
                return
            if not (self._unhurried or self._busy()):
                left -= time.monotonic() - before
        self._end(number)

    def _end(self, number: int) -> None:
        try:
            rank = os.environ.get("RANK", "0")
            print(
                f"stopped: rank {rank}: {self.name(number)} {self._where()}, and no step boundary for "
                f"{self._seconds:g} s since (job.stop_timeout_seconds): ended without a save; the same "
                "command goes on from the latest checkpoint, if there is one. It stood here:",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(sys.stderr)
        finally:
            os._exit(EXIT_INTERRUPTED)


_watched: weakref.WeakSet[StopSignal] = weakref.WeakSet()


def _forked() -> None:
    """A forked child has the pipe, too: a signal to the child must not end its parent."""
    if _watched:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forked)
