"""Update rules as plain torch: what every Triton epilogue must compute, operation by operation.

Each function takes one fp32 gradient tile `g`, the fp32 weight tile `w`, the fp32 state tiles in the order of
`STATE_SLOTS[name]`, and the fp32 hyperparameter vector `h` in the order of `HYPER_NAMES[name]`; it returns
`(w, *states)` as new tensors of the same shapes. All of them are elementwise, so they may run on any tile,
chunk or view. There is no branch on a value: the functions can be compiled, captured, and written again in
Triton with the same order of operations.

The first four hyperparameters are common to all rules:

    h[0] apply         1: take the step; 0: return weight and states bit for bit (a non-finite step).
                       A launcher may test it once and skip the whole pass, which is the same.
    h[1] lr            learning rate of this step
    h[2] weight_decay
    h[3] grad_scale    factor on the gradient (global-norm clipping), never on the decay

The others are computed on the host in float64 and rounded once: `1 - beta` and the reciprocals of bias
corrections are slots of their own because fp32 subtraction would lose their digits.

Rules named `*_state` are the state update A of rules whose weight update reads a whole matrix (LAMB, Muon,
Scion): they return `w` unchanged, and the caller computes U from the states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

COMMON_HYPER_NAMES = ("apply", "lr", "weight_decay", "grad_scale")


def _select(h: Tensor, new: Tensor, old: Tensor) -> Tensor:
    # A select and not a product: 0 * NaN would still poison the state on a non-finite step.
    return torch.where(h[0] != 0, new, old)


def fused(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a b + c of fp32 tensors, b of the result's shape, rounded once, as a GPU's fused multiply-add does: the
    product is exact in float64. (The sum is not always, but that its two roundings differ from one is as rare
    as one in 2^28.)
    """
    # In place: on a CPU, where training runs these, half the time and memory of three temporaries.
    exact = b.to(torch.float64, copy=True)
    exact *= a
    exact += c
    return exact.to(c.dtype)


def _moments(d: Tensor, m: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return fused(h[5] * d, h[4], m), fused(h[7] * (d * d), h[6], v)


def sgd(g: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor]:
    """w <- w - lr (g + wd w). Decay in the gradient, as torch.optim.SGD."""
    d = g * h[3] + h[2] * w
    return (_select(h, w - h[1] * d, w),)


def sgd_momentum(g: Tensor, w: Tensor, m: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """m <- mu m + (g + wd w); w <- w - lr m. As torch.optim.SGD (no dampening)."""
    d = g * h[3] + h[2] * w
    m_new = h[4] * m + d
    return _select(h, w - h[1] * m_new, w), _select(h, m_new, m)


def sgd_nesterov(g: Tensor, w: Tensor, m: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """m <- mu m + d, d = g + wd w; w <- w - lr (d + mu m)."""
    d = g * h[3] + h[2] * w
    m_new = h[4] * m + d
    return _select(h, w - h[1] * (d + h[4] * m_new), w), _select(h, m_new, m)


def adagrad(g: Tensor, w: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """v <- v + d^2, d = g + wd w; w <- w - lr d / (sqrt(v) + eps)."""
    d = g * h[3] + h[2] * w
    v_new = v + d * d
    return _select(h, w - h[1] * (d / (torch.sqrt(v_new) + h[4])), w), _select(h, v_new, v)


def rmsprop(g: Tensor, w: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """v <- alpha v + (1 - alpha) d^2, d = g + wd w; w <- w - lr d / (sqrt(v) + eps)."""
    d = g * h[3] + h[2] * w
    v_new = h[4] * v + h[5] * (d * d)
    return _select(h, w - h[1] * (d / (torch.sqrt(v_new) + h[6])), w), _select(h, v_new, v)


def adam(g: Tensor, w: Tensor, m: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adam with the decay in the gradient: d = g + wd w, then as AdamW without decay."""
    d = g * h[3] + h[2] * w
    m_new, v_new = _moments(d, m, v, h)
    denominator = torch.sqrt(v_new) * h[10] + h[8]
    w_new = w - (h[1] * h[9]) * (m_new / denominator)
    return _select(h, w_new, w), _select(h, m_new, m), _select(h, v_new, v)


def adamw(g: Tensor, w: Tensor, m: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m <- b1 m + (1-b1) g; v <- b2 v + (1-b2) g^2; w <- w - lr wd w - lr/c1 m / (sqrt(v)/sqrt(c2) + eps)."""
    d = g * h[3]
    m_new, v_new = _moments(d, m, v, h)
    denominator = torch.sqrt(v_new) * h[10] + h[8]
    # w - (lr wd) w and not (1 - lr wd) w: with lr wd near 1e-6 the fp32 factor would keep one digit of it.
    w_new = (w - (h[1] * h[2]) * w) - (h[1] * h[9]) * (m_new / denominator)
    return _select(h, w_new, w), _select(h, m_new, m), _select(h, v_new, v)


def adamax(g: Tensor, w: Tensor, m: Tensor, u: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m <- b1 m + (1-b1) d; u <- max(b2 u, |d| + eps), d = g + wd w; w <- w - lr/c1 * m / u."""
    d = g * h[3] + h[2] * w
    m_new = h[4] * m + h[5] * d
    u_new = torch.maximum(h[6] * u, torch.abs(d) + h[7])
    w_new = w - (h[1] * h[8]) * (m_new / u_new)
    return _select(h, w_new, w), _select(h, m_new, m), _select(h, u_new, u)


def nadam(g: Tensor, w: Tensor, m: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's moments; w <- w - lr wd w - lr (c_g g + c_m m) / (sqrt(v)/sqrt(c2) + eps)."""
    d = g * h[3]
    m_new, v_new = _moments(d, m, v, h)
    denominator = torch.sqrt(v_new) * h[9] + h[8]
    w_new = (w - (h[1] * h[2]) * w) - h[1] * ((h[10] * d + h[11] * m_new) / denominator)
    return _select(h, w_new, w), _select(h, m_new, m), _select(h, v_new, v)


def radam(g: Tensor, w: Tensor, m: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's moments; w <- w - lr wd w - lr/c1 m (adaptive / (sqrt(v) + eps) + plain); one of them is 0."""
    d = g * h[3]
    m_new, v_new = _moments(d, m, v, h)
    factor = h[10] / (torch.sqrt(v_new) + h[8]) + h[11]
    w_new = (w - (h[1] * h[2]) * w) - (h[1] * h[9]) * (m_new * factor)
    return _select(h, w_new, w), _select(h, m_new, m), _select(h, v_new, v)


def lion(g: Tensor, w: Tensor, m: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """w <- w - lr wd w - lr sign(b1 m + (1-b1) g); m <- b2 m + (1-b2) g."""
    d = g * h[3]
    direction = torch.sign(h[4] * m + h[5] * d)
    m_new = h[6] * m + h[7] * d
    w_new = (w - (h[1] * h[2]) * w) - h[1] * direction
    return _select(h, w_new, w), _select(h, m_new, m)


def lamb_state(g: Tensor, w: Tensor, m: Tensor, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m <- b1 m + (1-b1) g; v <- b2 v + (1-b2) g^2; w unchanged."""
    d = g * h[3]
    m_new, v_new = _moments(d, m, v, h)
    return w, _select(h, m_new, m), _select(h, v_new, v)


def momentum_state(g: Tensor, w: Tensor, m: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """m <- decay m + gain g; w unchanged (Muon: gain 1; Scion: gain 1 - decay)."""
    m_new = h[4] * m + h[5] * (g * h[3])
    return w, _select(h, m_new, m)


_MOMENTS = ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps")

HYPER_NAMES: dict[str, tuple[str, ...]] = {
    name: COMMON_HYPER_NAMES + own
    for name, own in {
        "sgd": (),
        "sgd_momentum": ("momentum",),
        "sgd_nesterov": ("momentum",),
        "adagrad": ("eps",),
        "rmsprop": ("alpha", "one_minus_alpha", "eps"),
        "adam": (*_MOMENTS, "inverse_correction1", "inverse_sqrt_correction2"),
        "adamw": (*_MOMENTS, "inverse_correction1", "inverse_sqrt_correction2"),
        "adamax": ("beta1", "one_minus_beta1", "beta2", "eps", "inverse_correction1"),
        "nadam": (*_MOMENTS, "inverse_sqrt_correction2", "gradient_factor", "momentum_factor"),
        "radam": (*_MOMENTS, "inverse_correction1", "adaptive_factor", "plain_factor"),
        "lion": ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2"),
        "lamb_state": (*_MOMENTS, "inverse_correction1", "inverse_sqrt_correction2"),
        "momentum_state": ("decay", "gain"),
    }.items()
}
"""Meaning of each slot of `h`, per rule."""

STATE_SLOTS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "sgd_momentum": ("m",),
    "sgd_nesterov": ("m",),
    "adagrad": ("v",),
    "rmsprop": ("v",),
    "adam": ("m", "v"),
    "adamw": ("m", "v"),
    "adamax": ("m", "u"),
    "nadam": ("m", "v"),
    "radam": ("m", "v"),
    "lion": ("m",),
    "lamb_state": ("m", "v"),
    "momentum_state": ("m",),
}
"""State tiles of each rule, in argument order; `v` and `u` are never negative."""

REFERENCES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "sgd": sgd,
    "sgd_momentum": sgd_momentum,
    "sgd_nesterov": sgd_nesterov,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "adam": adam,
    "adamw": adamw,
    "adamax": adamax,
    "nadam": nadam,
    "radam": radam,
    "lion": lion,
    "lamb_state": lamb_state,
    "momentum_state": momentum_state,
}
"""The functions of this module by rule name."""
