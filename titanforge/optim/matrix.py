"""Regime 2: A reads one coordinate, U reads the layer's state (LAMB, Muon, Scion).

Dims -2 and -1 are the matrix [out, in]; leading dims are a batch (experts, or same-shape matrices stacked).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from titanforge.optim.elementwise import bias_corrections, moment_hyperparameters, slots_of
from titanforge.optim.newton_schulz import newton_schulz
from titanforge.optim.rule import State, StateGlobalRule, select


def layer_norm_of(x: Tensor) -> Tensor:
    """Frobenius norm of each layer, kept as dims of size 1: over the last two dims, or over a vector."""
    dims = (-2, -1) if x.dim() >= 2 else (-1,)
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True)


class LAMB(StateGlobalRule):
    """Layer-wise scaled Adam (You et al. 2020, algorithm 2, phi the identity), the decay inside the ratio.

    r = m_hat / (sqrt(v_hat) + eps) + wd w; w <- w - lr |w| / |r| r, the ratio 1 where a norm is 0.
    """

    name = "lamb"
    option_names = ("beta1", "beta2", "eps")

    def __init__(self) -> None:
        self._use_kernel("lamb_state")
        self.slots = slots_of("lamb_state")

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (*moment_hyperparameters(options), *bias_corrections(options, step))

    def weight_update(self, w: Tensor, state: State, h: Tensor, g: Tensor | None = None) -> Tensor:
        m, v = state
        direction = (m * h[9]) / (torch.sqrt(v) * h[10] + h[8]) + h[2] * w
        weight_norm, direction_norm = layer_norm_of(w), layer_norm_of(direction)
        both = (weight_norm > 0) & (direction_norm > 0)
        ratio = torch.where(both, weight_norm / direction_norm, 1.0)
        return select(h, w - (h[1] * ratio) * direction, w)


class Muon(StateGlobalRule):
    """Orthogonalised momentum (Jordan et al. 2024): M <- mu M + G; W <- W - lr wd W - lr s O(M).

    s = tau sqrt(max(m, n)), tau = 0.2: the update's root mean square then matches AdamW's (Liu et al. 2025),
    so that one learning rate serves both rules of a run.
    """

    name = "muon"
    a_affine = True
    matrix_only = True
    option_names = ("momentum",)
    tau = 0.2

    def __init__(self, nesterov: bool = False, steps: int = 5) -> None:
        self._use_kernel("momentum_state")
        self.slots = slots_of("momentum_state")
        self.u_reads_gradient = nesterov
        self.steps = steps

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (options["momentum"], 1.0)

    def weight_update(self, w: Tensor, state: State, h: Tensor, g: Tensor | None = None) -> Tensor:
        (m,) = state
        if self.u_reads_gradient:
            if g is None:
                raise ValueError("optimizer.nesterov = true: the weight update of Muon needs the gradient")
            m = g * h[3] + h[4] * m
        scale = self.tau * math.sqrt(max(w.shape[-2:]))
        direction = newton_schulz(m, self.steps)
        return select(h, (w - (h[1] * h[2]) * w) - (h[1] * scale) * direction, w)


class Scion(StateGlobalRule):
    """Steps on the spectral-norm ball (Pethick et al. 2025): M <- mu M + (1 - mu) G;
    W <- W - lr wd W - lr sqrt(out / in) O(M).

    The paper's constrained form W <- (1 - gamma) W - gamma rho ... is lr = gamma rho, weight_decay = 1 / rho;
    its unconstrained form is weight_decay = 0.
    """

    name = "scion"
    a_affine = True
    matrix_only = True
    option_names = ("momentum",)

    def __init__(self, steps: int = 5) -> None:
        self._use_kernel("momentum_state")
        self.slots = slots_of("momentum_state")
        self.steps = steps

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (options["momentum"], 1.0 - options["momentum"])

    def weight_update(self, w: Tensor, state: State, h: Tensor, g: Tensor | None = None) -> Tensor:
        scale = math.sqrt(w.shape[-2] / max(w.shape[-1], 1))
        direction = newton_schulz(state[0], self.steps)
        return select(h, (w - (h[1] * h[2]) * w) - (h[1] * scale) * direction, w)
