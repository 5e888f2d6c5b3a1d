"""Where Triton is not installed, everything imports and the references run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
sys.modules["triton"] = None  # import triton now fails as if it were not installed
import torch
from titanforge.kernels import autotune, embedding, flat, wgrad
from titanforge.kernels._triton import HAS_TRITON
assert not HAS_TRITON
weight, momentum = torch.ones(3, 4), torch.zeros(3, 4)
hyper = torch.tensor([1.0, 0.5, 0.0, 1.0, 0.9])
wgrad.fused_wgrad_update(torch.ones(2, 3), torch.ones(2, 4), weight, [momentum], "sgd_momentum", hyper)
flat.flat_update("sgd_momentum", [weight], [torch.ones(3, 4)], [[momentum]], hyper)
embedding.embedding_update(torch.ones(1, 4), torch.tensor([2]), weight, [momentum], "sgd_momentum", hyper)
assert momentum[2, 0] == 0.9 * (0.9 * 2 + 1) + 1 and momentum[0, 0] == 0.9 * (0.9 * 2 + 1), momentum
print("done")
"""


def test_references_run_without_triton() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"
