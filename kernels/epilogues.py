"""Update rules as Triton functions on one fp32 tile, each the twin of a function in `references`.

An epilogue has the signature `(g, w, s0, s1, h_ptr) -> (w, s0, s1)`: the fp32 gradient, weight and state
tiles of one shape and the hyperparameter vector, to new tiles. Unused tiles are passed through. The order of
operations is that of the reference, so that interpreted kernels agree with it bit for bit. Compiled ones have
its states bit for bit (but for codes of a root, see `codec_arithmetic.root`); their weights may differ by a
few units in the last place, for they use the GPU's approximate square root and reciprocal and fused
multiply-adds. They do not differ from one another: the fused, the flat and the embedding kernels all call the
very same function. Instructions matter: there are 8e9 weights, and a persistent kernel's unrolled update
outgrows the instruction cache.

`h[0]`, the apply flag, is not looked at here: kernels leave a tile that is not to be applied unwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from titanforge.kernels import references
from titanforge.kernels._triton import INTERPRET, constant, jit, tl

SlotKind = Literal["signed", "square", "magnitude"]
"""What a state holds: `signed` values, a `square` (a second moment, read as its root), or a `magnitude`
(nonnegative, read as it is)."""


INTERPRETED = constant(INTERPRET)


@jit
def hyper(h, INDEX: tl.constexpr):
    """A hyperparameter, of the vector's address or of a tuple of what was loaded from it."""
    if isinstance(h, tl.tensor):
        return tl.load(h + INDEX)
    else:
        return h[INDEX]


@jit
def divide(a, b):
    """a / b for b that is positive and normal. `/` spends ten instructions on ranges that no b here has."""
    if INTERPRETED:
        return a / b
    else:
        return a * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
        )


@jit
def plus_product(c, a, b):
    """c + a b, rounded once where it is compiled."""
    if INTERPRETED:
        return a * b + c
    else:
        return tl.fma(a, b, c)


@jit
def minus_product(c, a, b):
    """c - a b, likewise."""
    if INTERPRETED:
        return c - a * b
    else:
        return tl.fma(-a, b, c)


@jit
def fused(c, a, b):
    """c + a b, rounded once wherever it runs, see `references.fused`."""
    if INTERPRETED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@jit
def _decayed(w, lr, weight_decay):
    """w - lr wd w: decoupled decay."""
    return minus_product(w, lr * weight_decay, w)


@jit
def sgd(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    d = g * scale + weight_decay * w
    return minus_product(w, lr, d), s0, s1


@jit
def sgd_momentum(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    d = g * scale + weight_decay * w
    m = hyper(h_ptr, 4) * s0 + d
    return minus_product(w, lr, m), m, s1


@jit
def sgd_nesterov(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    momentum = hyper(h_ptr, 4)
    d = g * scale + weight_decay * w
    m = momentum * s0 + d
    return minus_product(w, lr, plus_product(d, momentum, m)), m, s1


@jit
def adagrad(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    d = g * scale + weight_decay * w
    v = s0 + d * d
    return minus_product(w, lr, divide(d, tl.sqrt(v) + hyper(h_ptr, 4))), v, s1


@jit
def rmsprop(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    d = g * scale + weight_decay * w
    v = hyper(h_ptr, 4) * s0 + hyper(h_ptr, 5) * (d * d)
    return minus_product(w, lr, divide(d, tl.sqrt(v) + hyper(h_ptr, 6))), v, s1


@jit
def _moments(d, m, v, h_ptr):
    m = fused(hyper(h_ptr, 5) * d, hyper(h_ptr, 4), m)
    v = fused(hyper(h_ptr, 7) * (d * d), hyper(h_ptr, 6), v)
    return m, v


@jit
def adam(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    d = g * scale + weight_decay * w
    m, v = _moments(d, s0, s1, h_ptr)
    denominator = plus_product(hyper(h_ptr, 8), tl.sqrt(v), hyper(h_ptr, 10))
    return minus_product(w, lr * hyper(h_ptr, 9), divide(m, denominator)), m, v


@jit
def adamw(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    d = g * scale
    m, v = _moments(d, s0, s1, h_ptr)
    denominator = plus_product(hyper(h_ptr, 8), tl.sqrt(v), hyper(h_ptr, 10))
    w = minus_product(_decayed(w, lr, weight_decay), lr * hyper(h_ptr, 9), divide(m, denominator))
    return w, m, v


@jit
def adamax(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    d = g * scale + weight_decay * w
    m = hyper(h_ptr, 4) * s0 + hyper(h_ptr, 5) * d
    u = tl.maximum(hyper(h_ptr, 6) * s1, tl.abs(d) + hyper(h_ptr, 7))
    return minus_product(w, lr * hyper(h_ptr, 8), divide(m, u)), m, u


@jit
def nadam(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    d = g * scale
    m, v = _moments(d, s0, s1, h_ptr)
    denominator = plus_product(hyper(h_ptr, 8), tl.sqrt(v), hyper(h_ptr, 9))
    direction = divide(plus_product(hyper(h_ptr, 11) * m, hyper(h_ptr, 10), d), denominator)
    return minus_product(_decayed(w, lr, weight_decay), lr, direction), m, v


@jit
def radam(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    d = g * scale
    m, v = _moments(d, s0, s1, h_ptr)
    factor = divide(hyper(h_ptr, 10), tl.sqrt(v) + hyper(h_ptr, 8)) + hyper(h_ptr, 11)
    return minus_product(_decayed(w, lr, weight_decay), lr * hyper(h_ptr, 9), m * factor), m, v


@jit
def lion(g, w, s0, s1, h_ptr):
    lr, weight_decay, scale = hyper(h_ptr, 1), hyper(h_ptr, 2), hyper(h_ptr, 3)
    d = g * scale
    direction = _sign(hyper(h_ptr, 4) * s0 + hyper(h_ptr, 5) * d)
    m = hyper(h_ptr, 6) * s0 + hyper(h_ptr, 7) * d
    return minus_product(_decayed(w, lr, weight_decay), lr, direction), m, s1


@jit
def lamb_state(g, w, s0, s1, h_ptr):
    m, v = _moments(g * hyper(h_ptr, 3), s0, s1, h_ptr)
    return w, m, v


@jit
def momentum_state(g, w, s0, s1, h_ptr):
    m = hyper(h_ptr, 4) * s0 + hyper(h_ptr, 5) * (g * hyper(h_ptr, 3))
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
