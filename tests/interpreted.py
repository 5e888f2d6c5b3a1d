"""Kernels in processes of their own: Triton decides at import whether its CPU interpreter runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from titanforge.kernels._triton import HAS_TRITON, INTERPRETER_FAULT

REPOSITORY = Path(__file__).resolve().parents[1]

needs_interpreter = pytest.mark.skipif(
    not HAS_TRITON or bool(INTERPRETER_FAULT), reason=INTERPRETER_FAULT or "Triton is not installed"
)


def run_interpreted(what: Callable[[], None] | str, interpret: bool = True) -> str:
    """Call a function of a test's module, or run a module by name: kernels interpreted or, without
    `interpret`, their references. Returns what it printed.
    """
    command = ["-m", what]
    if not isinstance(what, str):
        command = ["-c", f"from {what.__module__} import {what.__name__}; {what.__name__}()"]
    environment = {
        "TRITON_INTERPRET": str(int(interpret)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
