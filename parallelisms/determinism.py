"""Seeds, and deterministic algorithms on request."""

from __future__ import annotations

import os
import random

import torch
from torch.utils import deterministic as deterministic_settings


def set_determinism(
    seed: int, deterministic: bool, warn_only: bool, device: torch.device, rank_offset: int = 0
) -> None:
    """Seed every generator, and choose deterministic kernels if asked.

    Weights and data order do not use these generators (they are counter-based), so that they agree on
    all ranks whatever ``rank_offset`` is.

    Args:
        seed: the run's seed.
        deterministic: use deterministic algorithms only; slower.
        warn_only: with ``deterministic``: warn where an operation has none, instead of raising there.
        device: this process's device.
        rank_offset: added to the seed, for ranks whose random numbers (dropout) must differ.
    """
    seed = (seed + rank_offset) % 2**63
    random.seed(seed)
    torch.manual_seed(seed)  # seeds CUDA generators as well
    if not deterministic:
        return
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Filling every new tensor with NaN would only hide uninitialised reads; it costs a pass per tensor.
    deterministic_settings.fill_uninitialized_memory = False  # pyright: ignore
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        # cuBLAS is reproducible only with a fixed workspace; read when the first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
