"""RMSNorm and LayerNorm."""

from __future__ import annotations

import torch
from torch import nn

from titanforge.models.layers.init_spec import Constant, InitSpec


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis (Zhang & Sennrich 2019, eq. 4).

    torch's own kernel: statistics in fp32 for bf16 inputs, output in the input's dtype.
    """

    def __init__(self, dim: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__(dim, eps=eps, dtype=dtype)

    def init_spec(self) -> dict[str, InitSpec]:
        return {"weight": Constant(1.0)}


class LayerNorm(nn.LayerNorm):
    """``(x - mean) / sqrt(var + eps) · weight + bias`` over the last axis (Ba et al. 2016)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps=eps)

    def init_spec(self) -> dict[str, InitSpec]:
        return {"weight": Constant(1.0), "bias": Constant(0.0)}
