"""Regime 3: A reads a statistic of one layer's gradient (Adam-mini, Adafactor, AdaLomo, SM3, LARS).

The whole gradient of a layer is at hand when such a rule runs, so `update` does A and U in one go. Dims -2
and -1 are the matrix [out, in]; leading dims are a batch (experts, or same-shape matrices stacked); a vector
has factored states replaced by one of its own shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from titanforge.kernels.references import COMMON_HYPER_NAMES
from titanforge.optim.elementwise import bias_corrections, moment_hyperparameters
from titanforge.optim.matrix import layer_norm_of
from titanforge.optim.rule import Reach, State, StateSlot, UpdateRule, select

_ROWS_AND_COLUMNS = (
    StateSlot("rows", "rows", nonnegative=True),
    StateSlot("columns", "columns", nonnegative=True),
)
_FULL = (StateSlot("v", nonnegative=True),)


def _select_all(h: Tensor, new: State, old: State) -> State:
    return tuple(select(h, n, o) for n, o in zip(new, old))


def _layer_rms(x: Tensor) -> Tensor:
    elements = math.prod(x.shape[-2:]) if x.dim() >= 2 else x.shape[-1]
    return layer_norm_of(x) / math.sqrt(elements)


class AdamMini(UpdateRule):
    """Adam with one second moment per block (Zhang et al. 2024), decoupled decay.

    A block is an output row of a matrix (one neuron, one token of an embedding), or a whole vector. The paper
    joins the rows of one head for queries and keys; rows are finer, and need no knowledge of heads.
    """

    name = "adam_mini"
    slots = (StateSlot("m"), StateSlot("v", "rows", nonnegative=True))
    a_reads = Reach.LAYER
    u_reads = Reach.LAYER
    option_names = ("beta1", "beta2", "eps")
    hyper_names = (
        *COMMON_HYPER_NAMES,
        "beta1",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "eps",
        "inverse_correction1",
        "inverse_sqrt_correction2",
    )

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (*moment_hyperparameters(options), *bias_corrections(options, step))

    def update(self, g: Tensor, w: Tensor, state: State, h: Tensor) -> tuple[Tensor, State]:
        m, v = state
        g = g * h[3]
        m_new = h[4] * m + h[5] * g
        v_new = h[6] * v + h[7] * g.square().mean(dim=-1)
        denominator = (torch.sqrt(v_new) * h[10] + h[8]).unsqueeze(-1)
        w_new = (w - (h[1] * h[2]) * w) - (h[1] * h[9]) * (m_new / denominator)
        return select(h, w_new, w), _select_all(h, (m_new, v_new), state)


class _Factored(UpdateRule):
    """Second moments as row and column means of G^2; for a vector, in full."""

    slots = _ROWS_AND_COLUMNS
    a_reads = Reach.LAYER
    u_reads = Reach.LAYER
    u_reads_gradient = True

    def slots_for(self, shape: torch.Size) -> tuple[StateSlot, ...]:
        return self.slots if len(shape) >= 2 else _FULL


class Adafactor(_Factored):
    """Factored Adam (Shazeer and Stern 2018) as torch.optim.Adafactor, decoupled decay.

    The step is relative: lr is a cap, min(lr, 1/sqrt(t)) times max(1e-3, rms(w)); beta2_t = 1 - t^-0.8; the
    update's root mean square is clipped to 1. The paper's own constants, not options.
    """

    name = "adafactor"
    hyper_names = (*COMMON_HYPER_NAMES, "one_minus_beta2", "step_cap")
    gradient_eps = torch.finfo(torch.float32).eps
    weight_eps = 1e-3
    clip = 1.0
    decay_rate = -0.8

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (float(step) ** self.decay_rate, 1.0 / math.sqrt(step))

    def update(self, g: Tensor, w: Tensor, state: State, h: Tensor) -> tuple[Tensor, State]:
        g = g * h[3]
        squares = g * g
        rate = torch.minimum(h[1], h[5]) * _layer_rms(w).clamp_min(self.weight_eps)
        if w.dim() >= 2:
            rows, columns = state
            rows_new = rows + h[4] * (squares.mean(dim=-1) - rows)
            columns_new = columns + h[4] * (squares.mean(dim=-2) - columns)
            mean = rows_new.mean(dim=-1, keepdim=True).clamp_min(self.gradient_eps)
            variance = (rows_new / mean).unsqueeze(-1) * columns_new.unsqueeze(-2)
            new_state = (rows_new, columns_new)
        else:
            variance = state[0] + h[4] * (squares - state[0])
            new_state = (variance,)
        direction = g * variance.clamp_min(self.gradient_eps**2).rsqrt()
        rate = rate / (_layer_rms(direction) / self.clip).clamp_min(1.0)
        w_new = (w - (h[1] * h[2]) * w) - rate * direction
        return select(h, w_new, w), _select_all(h, new_state, state)


class AdaLomo(_Factored):
    """Adaptive low-memory optimization (Lv et al. 2023): factored second moments, no first moment, the update
    normalised per layer and scaled by the layer's root mean square; decoupled decay.
    """

    name = "adalomo"
    hyper_names = (*COMMON_HYPER_NAMES, "one_minus_beta2", "eps")
    option_names = ("eps",)
    weight_eps = 1e-3
    clip = 1.0
    decay_rate = -0.8

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (float(step) ** self.decay_rate, options["eps"])

    def update(self, g: Tensor, w: Tensor, state: State, h: Tensor) -> tuple[Tensor, State]:
        g = g * h[3]
        # The square of eps inside, as eps is stated beside a root elsewhere: 1e-8 here guards like Adam's.
        squares = g * g + h[5] * h[5]
        if w.dim() >= 2:
            rows, columns = state
            rows_new = rows + h[4] * (squares.mean(dim=-1) - rows)
            columns_new = columns + h[4] * (squares.mean(dim=-2) - columns)
            row_factor = (rows_new / rows_new.mean(dim=-1, keepdim=True)).rsqrt()
            direction = g * row_factor.unsqueeze(-1) * columns_new.rsqrt().unsqueeze(-2)
            new_state = (rows_new, columns_new)
        else:
            variance = state[0] + h[4] * (squares - state[0])
            direction = g * variance.rsqrt()
            new_state = (variance,)
        direction = direction / (_layer_rms(direction) / self.clip).clamp_min(1.0)
        rate = h[1] * _layer_rms(w).clamp_min(self.weight_eps)
        w_new = (w - (h[1] * h[2]) * w) - rate * direction
        return select(h, w_new, w), _select_all(h, new_state, state)


class SM3(UpdateRule):
    """Square-root of minima of sums of maxima (Anil et al. 2019), the second form (SM3-II), decoupled decay.

    nu_ij = min(row_i, column_j) + g_ij^2; row_i <- max_j nu_ij; column_j <- max_i nu_ij;
    w <- w - lr wd w - lr g / (sqrt(nu) + eps). A vector is covered by its coordinates: Adagrad.
    """

    name = "sm3"
    slots = _ROWS_AND_COLUMNS
    a_reads = Reach.LAYER
    u_reads = Reach.LAYER
    u_reads_gradient = True
    hyper_names = (*COMMON_HYPER_NAMES, "eps")
    option_names = ("eps",)

    def slots_for(self, shape: torch.Size) -> tuple[StateSlot, ...]:
        return self.slots if len(shape) >= 2 else _FULL

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (options["eps"],)

    def update(self, g: Tensor, w: Tensor, state: State, h: Tensor) -> tuple[Tensor, State]:
        g = g * h[3]
        if w.dim() >= 2:
            cover = torch.minimum(state[0].unsqueeze(-1), state[1].unsqueeze(-2))
            nu = cover + g * g
            new_state = (nu.amax(dim=-1), nu.amax(dim=-2))
        else:
            nu = state[0] + g * g
            new_state = (nu,)
        w_new = (w - (h[1] * h[2]) * w) - h[1] * (g / (torch.sqrt(nu) + h[4]))
        return select(h, w_new, w), _select_all(h, new_state, state)


class LARS(UpdateRule):
    """Layer-wise adaptive rate (You et al. 2017, algorithm 1): a ratio of norms scales the decayed gradient.

    ratio = eta |w| / (|g| + wd |w|); m <- mu m + lr ratio (g + wd w); w <- w - m. The ratio is 1 where a norm
    is 0. The rate is inside the momentum, as in the paper.
    """

    name = "lars"
    slots = (StateSlot("m"),)
    a_reads = Reach.LAYER
    hyper_names = (*COMMON_HYPER_NAMES, "momentum")
    option_names = ("momentum",)
    eta = 0.001

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        return (options["momentum"],)

    def update(self, g: Tensor, w: Tensor, state: State, h: Tensor) -> tuple[Tensor, State]:
        g = g * h[3]
        weight_norm, gradient_norm = layer_norm_of(w), layer_norm_of(g)
        both = (weight_norm > 0) & (gradient_norm > 0)
        ratio = torch.where(both, self.eta * weight_norm / (gradient_norm + h[2] * weight_norm), 1.0)
        m_new = h[4] * state[0] + (h[1] * ratio) * (g + h[2] * w)
        return select(h, w - m_new, w), _select_all(h, (m_new,), state)
