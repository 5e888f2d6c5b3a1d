"""`rmmc` takes the norms that the momentum kernel leaves, through the kernels themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titanforge.kernels._triton import HAS_TRITON, INTERPRETER_FAULT

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(bool(INTERPRETER_FAULT), reason=INTERPRETER_FAULT)
def test_the_decision_makes_no_second_pass_over_momenta() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sync.interpreted"],
        capture_output=True, text=True, timeout=280, cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 2
