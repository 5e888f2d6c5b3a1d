"""Update rules as Triton functions on one fp32 tile, each the twin of a function in `references`.

An epilogue has the signature `(g, w, s0, s1, h_ptr) -> (w, s0, s1)`: the fp32 gradient, weight and state
tiles of one shape and the hyperparameter vector, to new tiles. Unused tiles are passed through. The order of
operations is that of the reference, so that interpreted kernels agree with it bit for bit; compiled ones use
the GPU's approximate square root and division and may differ from it by a few units in the last place, but
not from one another: the fused, the flat and the embedding kernels all call the very same function.

`h[0]`, the apply flag, is not looked at here: kernels leave a tile that is not to be applied unwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from titanforge.kernels import references
from titanforge.kernels._triton import jit, tl

SlotKind = Literal["signed", "square", "magnitude"]
"""What a state holds: `signed` values, a `square` (a second moment, read as its root), or a `magnitude`
(nonnegative, read as it is)."""


@jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@jit
def sgd(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    d = g * scale + weight_decay * w
    return w - lr * d, s0, s1


@jit
def sgd_momentum(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    d = g * scale + weight_decay * w
    m = tl.load(h_ptr + 4) * s0 + d
    return w - lr * m, m, s1


@jit
def sgd_nesterov(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    momentum = tl.load(h_ptr + 4)
    d = g * scale + weight_decay * w
    m = momentum * s0 + d
    return w - lr * (d + momentum * m), m, s1


@jit
def adagrad(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    d = g * scale + weight_decay * w
    v = s0 + d * d
    return w - lr * (d / (tl.sqrt(v) + tl.load(h_ptr + 4))), v, s1


@jit
def rmsprop(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    d = g * scale + weight_decay * w
    v = tl.load(h_ptr + 4) * s0 + tl.load(h_ptr + 5) * (d * d)
    return w - lr * (d / (tl.sqrt(v) + tl.load(h_ptr + 6))), v, s1


@jit
def _moments(d, m, v, h_ptr):
    m = tl.load(h_ptr + 4) * m + tl.load(h_ptr + 5) * d
    v = tl.load(h_ptr + 6) * v + tl.load(h_ptr + 7) * (d * d)
    return m, v


@jit
def adam(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    d = g * scale + weight_decay * w
    m, v = _moments(d, s0, s1, h_ptr)
    denominator = tl.sqrt(v) * tl.load(h_ptr + 10) + tl.load(h_ptr + 8)
    return w - (lr * tl.load(h_ptr + 9)) * (m / denominator), m, v


@jit
def adamw(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    d = g * scale
    m, v = _moments(d, s0, s1, h_ptr)
    denominator = tl.sqrt(v) * tl.load(h_ptr + 10) + tl.load(h_ptr + 8)
    w = (w - (lr * weight_decay) * w) - (lr * tl.load(h_ptr + 9)) * (m / denominator)
    return w, m, v


@jit
def adamax(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    d = g * scale + weight_decay * w
    m = tl.load(h_ptr + 4) * s0 + tl.load(h_ptr + 5) * d
    u = tl.maximum(tl.load(h_ptr + 6) * s1, tl.abs(d) + tl.load(h_ptr + 7))
    return w - (lr * tl.load(h_ptr + 8)) * (m / u), m, u


@jit
def nadam(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    d = g * scale
    m, v = _moments(d, s0, s1, h_ptr)
    denominator = tl.sqrt(v) * tl.load(h_ptr + 9) + tl.load(h_ptr + 8)
    direction = (tl.load(h_ptr + 10) * d + tl.load(h_ptr + 11) * m) / denominator
    return (w - (lr * weight_decay) * w) - lr * direction, m, v


@jit
def radam(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    d = g * scale
    m, v = _moments(d, s0, s1, h_ptr)
    factor = tl.load(h_ptr + 10) / (tl.sqrt(v) + tl.load(h_ptr + 8)) + tl.load(h_ptr + 11)
    return (w - (lr * weight_decay) * w) - (lr * tl.load(h_ptr + 9)) * (m * factor), m, v


@jit
def lion(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3)
    d = g * scale
    direction = _sign(tl.load(h_ptr + 4) * s0 + tl.load(h_ptr + 5) * d)
    m = tl.load(h_ptr + 6) * s0 + tl.load(h_ptr + 7) * d
    return (w - (lr * weight_decay) * w) - lr * direction, m, s1


@jit
def lamb_state(g, w, s0, s1, h_ptr):
    m, v = _moments(g * tl.load(h_ptr + 3), s0, s1, h_ptr)
    return w, m, v


@jit
def momentum_state(g, w, s0, s1, h_ptr):
    m = tl.load(h_ptr + 4) * s0 + tl.load(h_ptr + 5) * (g * tl.load(h_ptr + 3))
    return w, m, s1


@dataclass(frozen=True)
class Epilogue:
    """One elementwise update rule in its two forms.

    `slots` names the state tiles in argument order and `slot_kinds` says what they hold; `hyper_names` names
    the fp32 hyperparameters. `updates_weight` is False for rules that only fold the gradient into their
    state: such a launch neither reads nor writes the weight. `affine` says that the state is an affine
    function of the gradient, so that partial gradients may be folded in one after the other.
    """

    name: str
    slots: tuple[str, ...]
    slot_kinds: tuple[SlotKind, ...]
    hyper_names: tuple[str, ...]
    jit: Any
    reference: Callable[..., tuple[Tensor, ...]]
    updates_weight: bool = True
    affine: bool = False

    @property
    def hyper_length(self) -> int:
        """Number of fp32 values in the hyperparameter vector."""
        return len(self.hyper_names)


_KIND_OF_SLOT: dict[str, SlotKind] = {"m": "signed", "v": "square", "u": "magnitude"}


def _epilogue(name: str, function: Any, **flags: bool) -> Epilogue:
    slots = references.STATE_SLOTS[name]
    kinds: tuple[SlotKind, ...] = tuple(_KIND_OF_SLOT[slot] for slot in slots)
    return Epilogue(
        name, slots, kinds, references.HYPER_NAMES[name], function, references.REFERENCES[name], **flags
    )


EPILOGUES: dict[str, Epilogue] = {
    epilogue.name: epilogue
    for epilogue in (
        _epilogue("sgd", sgd),
        _epilogue("sgd_momentum", sgd_momentum),
        _epilogue("sgd_nesterov", sgd_nesterov),
        _epilogue("adagrad", adagrad),
        _epilogue("rmsprop", rmsprop),
        _epilogue("adam", adam),
        _epilogue("adamw", adamw),
        _epilogue("adamax", adamax),
        _epilogue("nadam", nadam),
        _epilogue("radam", radam),
        _epilogue("lion", lion),
        _epilogue("lamb_state", lamb_state, updates_weight=False),
        _epilogue("momentum_state", momentum_state, updates_weight=False, affine=True),
    )
}
"""Every rule by name."""


def get_epilogue(name: str) -> Epilogue:
    """The rule of that name; ValueError with the known names otherwise."""
    if name not in EPILOGUES:
        raise ValueError(f"no update rule named {name!r}; known: {', '.join(EPILOGUES)}")
    return EPILOGUES[name]
