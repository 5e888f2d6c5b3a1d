"""The custom ops through which backward hands a gradient's operands to a weight's sink.

An op gets the weight that it changes, which is what tells torch.compile to read it (for the input gradient,
for a recomputed forward) before and not after. That tensor may be a copy, which the graph then copies back,
so sinks write to what they are given. And it gets a handle, a CPU scalar that names the sink: a tensor and
not a number, because the compiler would build a graph for each number, and blocks of one shape shall share
theirs. The handle requires grad in the weight's place (see `linear`); fp64 is exact for any number of sinks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from titanforge.forge.joint import JointSink
    from titanforge.forge.sinks import Sink

_sinks: weakref.WeakValueDictionary[int, Sink | JointSink] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_sink(sink: Sink | JointSink) -> Tensor:
    """A handle for the sink, which the caller keeps alive."""
    number = next(_numbers)
    _sinks[number] = sink
    return torch.tensor(float(number), dtype=torch.float64, requires_grad=True)


def sink_of(handle: Tensor) -> Any:
    """The sink that a handle names."""
    sink = _sinks.get(int(handle.detach()))
    if sink is None:
        raise RuntimeError("this model was attached by an optimizer that is gone: attach it again")
    return sink


# Through the dispatcher itself: `torch.library.custom_op` would cost the host 0.1 ms more at each of some
# hundreds of calls in a step. Nothing here requires grad, so no autograd formula is wanted.
_library = torch.library.Library("titanforge", "FRAGMENT")


def _define(schema: str, implementation: Callable[..., None]) -> Any:
    """An op that changes its first argument, takes any strides and returns nothing.

    The compiler is told so: inductor of PyTorch 2.11, where it must lay out a matrix without padding for an
    op, has been seen to multiply it as if its rows were padded.
    """
    name = _library.define(schema, tags=(torch.Tag.flexible_layout,)).split("(")[0]

    def run(weight: Tensor, *operands: Tensor) -> None:
        implementation(weight, *operands)
        # What reads the weight again in this backward, and must not, then finds out.
        torch.autograd.graph.increment_version(weight)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"titanforge::{name}", lambda *_: None, lib=_library)
    return getattr(torch.ops.titanforge, name)


def _consume_product(weight: Tensor, dy: Tensor, x: Tensor, handle: Tensor) -> None:
    """dy: [..., N], x: [..., K]: the gradient of a linear's weight is dyᵀ x."""
    sink: Sink | JointSink = sink_of(handle)
    with sink.writing_to(weight):
        sink.product(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))


def _consume_rows(weight: Tensor, dy: Tensor, ids: Tensor, handle: Tensor) -> None:
    """dy: [..., D], ids: [...]: the gradient of an embedding."""
    sink = sink_of(handle)
    with sink.writing_to(weight):
        sink.rows(dy.reshape(-1, dy.shape[-1]), ids.reshape(-1))


def _consume_gradient(weight: Tensor, gradient: Tensor, handle: Tensor) -> None:
    """gradient: complete, of the weight's shape."""
    sink = sink_of(handle)
    with sink.writing_to(weight):
        sink.whole(gradient)


def _consume_experts(weight: Tensor, dy: Tensor, x: Tensor, ends: Tensor, handle: Tensor) -> None:
    """dy: [S, N], x: [S, K], rows sorted by expert; ends: int32 [E], the row after each expert's last."""
    sink = sink_of(handle)
    with sink.writing_to(weight):
        sink.experts(dy, x, ends)


consume_product = _define(
    "forge_product(Tensor(a!) weight, Tensor dy, Tensor x, Tensor handle) -> ()", _consume_product
)
consume_rows = _define(
    "forge_rows(Tensor(a!) weight, Tensor dy, Tensor ids, Tensor handle) -> ()", _consume_rows
)
consume_gradient = _define(
    "forge_gradient(Tensor(a!) weight, Tensor gradient, Tensor handle) -> ()", _consume_gradient
)
consume_experts = _define(
    "forge_experts(Tensor(a!) weight, Tensor dy, Tensor x, Tensor ends, Tensor handle) -> ()",
    _consume_experts,
)
