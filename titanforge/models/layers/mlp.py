"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from titanforge.models.layers.init_spec import Constant, InitSpec, Normal
from titanforge.models.layers.projections import Projecting


class SwiGLU(Projecting):
    """``w2(silu(w1 x) ⊙ w3 x)`` (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6).

    Three separate matrices, not a packed one: each is one matrix to an optimizer that works on matrices.
    """

    projections = (("w1", "w3"),)

    def __init__(self, dim: int, hidden_dim: int, depth_std: float) -> None:
        """``depth_std``: initial standard deviation of the matrices that are scaled by depth."""
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.depth_std = depth_std

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate, up = self.project(x_BTD, ("w1", "w3"))
        return self.w2(F.silu(gate) * up)

    def init_spec(self) -> dict[str, InitSpec]:
        return {
            "w1.weight": Normal(0.02),
            "w2.weight": Normal(self.depth_std),
            "w3.weight": Normal(self.depth_std),
        }


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation (Hendrycks & Gimpel 2016), as GPT-2 computes it."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """``max(x, 0)²`` (So et al. 2021, "Primer")."""
    return F.relu(x).square()


class MLP(nn.Module):
    """``w2 f(w1 x)``."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        depth_std: float,
        activation: Callable[[torch.Tensor], torch.Tensor],
        bias: bool,
    ) -> None:
        """``depth_std``: initial standard deviation of the second matrix."""
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.activation = activation
        self.depth_std = depth_std

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.w2(self.activation(self.w1(x_BTD)))

    def init_spec(self) -> dict[str, InitSpec]:
        weights: dict[str, InitSpec] = {"w1.weight": Normal(0.02), "w2.weight": Normal(self.depth_std)}
        biases: dict[str, InitSpec] = {"w1.bias": Constant(0.0), "w2.bias": Constant(0.0)}
        return weights | biases if self.w1.bias is not None else weights
