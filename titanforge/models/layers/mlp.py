"""Feed-forward layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from titanforge.models.layers.init_spec import InitSpec, Normal


class SwiGLU(nn.Module):
    """``w2(silu(w1 x) ⊙ w3 x)`` (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6).

    Three separate matrices, not a packed one: each is one matrix to an optimizer that works on matrices.
    """

    def __init__(self, dim: int, hidden_dim: int, depth_std: float) -> None:
        """``depth_std``: initial standard deviation of the matrices that are scaled by depth."""
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.depth_std = depth_std

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))

    def init_spec(self) -> dict[str, InitSpec]:
        return {
            "w1.weight": Normal(0.02),
            "w2.weight": Normal(self.depth_std),
            "w3.weight": Normal(self.depth_std),
        }
