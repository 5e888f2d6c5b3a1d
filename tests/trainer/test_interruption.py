"""What counts as pressing Ctrl-C twice."""

from __future__ import annotations

import os
import signal
import time

import pytest

from titanforge import interruption
from titanforge.interruption import StopSignal


def test_one_press_that_comes_twice_is_one(monkeypatch):
    """Under torchrun: from the terminal, and passed on by torchrun."""
    monkeypatch.setattr(interruption, "_SECONDS_OF_ONE_PRESS", 0.2)
    stop = StopSignal()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        time.sleep(0.3)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        stop.close()
