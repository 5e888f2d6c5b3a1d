"""Runs tests/kernels/device under Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titanforge.kernels._triton import INTERPRETER_FAULT

pytest.importorskip("triton")

DEVICE_TESTS = Path(__file__).parent / "device"
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(bool(INTERPRETER_FAULT), reason=INTERPRETER_FAULT)
def test_kernels_under_the_interpreter() -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(DEVICE_TESTS), "-q", "-x", "-p", "no:cacheprovider"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
