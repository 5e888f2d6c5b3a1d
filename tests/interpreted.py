"""Checks of kernels in processes of their own: Triton decides at import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from titanforge.kernels._triton import HAS_TRITON, INTERPRETER_FAULT

REPOSITORY = Path(__file__).resolve().parents[2]

needs_interpreter = pytest.mark.skipif(
    not HAS_TRITON or bool(INTERPRETER_FAULT), reason=INTERPRETER_FAULT or "Triton is not installed"
)


def run_interpreted(check: Callable[[], None], interpret: bool = True) -> None:
    """Call a function of a test's module, with kernels interpreted or, on a CPU, their references."""
    name = check.__name__
    done = subprocess.run(
        [sys.executable, "-c", f"from {check.__module__} import {name}; {name}()"],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
