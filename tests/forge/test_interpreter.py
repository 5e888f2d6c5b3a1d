"""A fused step through the Triton kernels themselves, interpreted on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titanforge.kernels._triton import HAS_TRITON, INTERPRETER_FAULT

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(bool(INTERPRETER_FAULT), reason=INTERPRETER_FAULT)
def test_kernels_of_a_whole_step() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.forge.interpreted"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found.pop("interpreted") is True
    assert len(found) == 3
    for name, one in found.items():
        assert one["bit exact"], name
        assert one["moved"] > 5e-4, name
        assert one["losses differ by"] < 0.02, (name, one)
    assert found["adamw float32"]["weights differ by"] < 1e-4, found
