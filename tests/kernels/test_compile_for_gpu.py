"""The kernels compile for Hopper on a machine without a GPU, into tensor-core code that keeps to its
registers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia.compiler")

ROOT = Path(__file__).parents[2]


KERNELS = {"wgrad/few_tokens/adamw/bf16": 4, "flat/adamw/int8": 0, "pp2/adamw/bf16": 16}
"""Names, and how many tensor-core instructions each must have."""


def test_kernels_compile(tmp_path: Path) -> None:
    only = "|".join(f"^{name}$" for name in KERNELS)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "scripts/bench/compile_kernels.py", "--quick", "--only", only, "--out",
        str(tmp_path)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "compile.json").read_text())
    assert report["failures"] == 0
    assert {kernel["kernel"] for kernel in report["kernels"]} == set(KERNELS)
    for kernel in report["kernels"]:
        assert kernel["wgmma"] == KERNELS[kernel["kernel"]]
        assert kernel["shared_bytes"] <= 227 * 1024
        assert kernel["spill_store_bytes"] <= 128, kernel
