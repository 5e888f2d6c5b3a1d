"""These tests run Triton kernels: on a GPU where there is one, under the interpreter with TRITON_INTERPRET=1.

Elsewhere the folder is not collected; tests/kernels/test_device_kernels.py runs it in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from titanforge.kernels._triton import HAS_TRITON, INTERPRET

if not INTERPRET and not (HAS_TRITON and torch.cuda.is_available()):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRET else "cuda")
