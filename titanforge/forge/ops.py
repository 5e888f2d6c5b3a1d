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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from titanforge.forge.sinks import Sink

_sinks: weakref.WeakValueDictionary[int, Sink] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_sink(sink: Sink) -> Tensor:
    """A handle for the sink, which the caller keeps alive."""
    number = next(_numbers)
    _sinks[number] = sink
    return torch.tensor(float(number), dtype=torch.float64, requires_grad=True)


def sink_of(handle: Tensor) -> Sink:
    """The sink that a handle names."""
    sink = _sinks.get(int(handle.detach()))
    if sink is None:
        raise RuntimeError("this model was attached by an optimizer that is gone: attach it again")
    return sink


@torch.library.custom_op("titanforge::forge_product", mutates_args=("weight",))
def consume_product(weight: Tensor, dy: Tensor, x: Tensor, handle: Tensor) -> None:
    """dy: [..., N], x: [..., K]: the gradient of a linear's weight is dyᵀ x."""
    sink = sink_of(handle)
    with sink.writing_to(weight):
        sink.product(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))


@torch.library.custom_op("titanforge::forge_rows", mutates_args=("weight",))
def consume_rows(weight: Tensor, dy: Tensor, ids: Tensor, handle: Tensor) -> None:
    """dy: [..., D], ids: [...]: the gradient of an embedding."""
    sink = sink_of(handle)
    with sink.writing_to(weight):
        sink.rows(dy.reshape(-1, dy.shape[-1]), ids.reshape(-1))


@torch.library.custom_op("titanforge::forge_gradient", mutates_args=("weight",))
def consume_gradient(weight: Tensor, gradient: Tensor, handle: Tensor) -> None:
    """gradient: complete, of the weight's shape."""
    sink = sink_of(handle)
    with sink.writing_to(weight):
        sink.whole(gradient)


@torch.library.custom_op("titanforge::forge_experts", mutates_args=("weight",))
def consume_experts(weight: Tensor, dy: Tensor, x: Tensor, ends: Tensor, handle: Tensor) -> None:
    """dy: [S, N], x: [S, K], rows sorted by expert; ends: int32 [E], the row after each expert's last."""
    sink = sink_of(handle)
    with sink.writing_to(weight):
        sink.experts(dy, x, ends)


for _op in (consume_product, consume_rows):
    _op.register_fake(lambda weight, dy, source, handle: None)
consume_experts.register_fake(lambda weight, dy, x, ends, handle: None)
consume_gradient.register_fake(lambda weight, gradient, handle: None)
