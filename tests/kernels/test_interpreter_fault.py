"""Where Triton's CPU interpreter cannot run, kernels say so at import, and tests that need it are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titanforge.kernels._triton import HAS_TRITON, INTERPRET, INTERPRETER_FAULT, interpreter_fault


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "runs"),
    [
        ("3.6.0", "2.3.5", True),
        ("3.6.0", "2.4.0", False),
        ("3.6.0+git1a2b3c", "2.10.0rc1", False),
        ("3.7.0", "2.5.5", True),
        ("3.10.0", "2.4.1", True),
        ("4.0.0", "3.0.0", True),
    ],
)
def test_which_releases_go_together(triton_version: str, numpy_version: str, runs: bool) -> None:
    told = interpreter_fault(triton_version, numpy_version)
    assert (told == "") == runs
    assert runs or (triton_version in told and numpy_version in told and "pip install 'numpy<2.4'" in told)


def test_a_process_that_interprets_knows_that_it_can() -> None:
    assert not (INTERPRET and INTERPRETER_FAULT)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_import_says_what_is_wrong() -> None:
    code = (
        "import importlib.metadata, triton; triton.__version__ = '3.6.0'; "
        "importlib.metadata.version = lambda name: '2.4.0'; import titanforge.kernels.flat"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "RuntimeError: TRITON_INTERPRET=1: the CPU interpreter of Triton 3.6.0 does not run with NumPy 2.4.0"
    )
