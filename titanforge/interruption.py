"""Stopping at a step boundary when the process is told to, and the exit codes that say how a run ended."""

from __future__ import annotations

import signal
import time
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
    cannot wait.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: int = 0
        self._first_time = 0.0
        self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            if time.monotonic() - self._first_time > _SECONDS_OF_ONE_PRESS:
                raise KeyboardInterrupt
            return
        self.received, self._first_time = number, time.monotonic()

    @staticmethod
    def name(number: int) -> str:
        return signal.Signals(number).name

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
