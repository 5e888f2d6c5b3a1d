"""Updates that read whole layers, as torch.compile fuses them: a few passes over memory, no fp32 copies.

In plain torch each operation of such a rule goes to memory and back in fp32, which at the size of an
embedding holds gigabytes and costs several times the reading of gradient, weight and state. The arithmetic is
that of the rule's own functions; compiled and plain differ by the order of sums.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels.codecs import decode
from titanforge.optim.local_update import LocalWeight
from titanforge.optim.rule import UpdateRule


def update_layer_in_place(rule: UpdateRule, item: LocalWeight, h: Tensor, backend: str = "inductor") -> None:
    """A and U of a regime-3 rule on one weight (a stack of experts is one); its copy is left to the caller.

    The gradient may be of any float dtype; weight (or master) and states are written as they are stored.
    """
    states = [state.values for state in item.states]
    step = _compiled(rule, "layer", backend)
    with torch.no_grad():
        step(item.gradient_or_zeros(), item.weight, states, h)


def update_weight_in_place(rule: Any, item: LocalWeight, h: Tensor, backend: str = "inductor") -> None:
    """U of a regime-2 rule that has a `weight_update` and writes the weight alone, after A has run."""
    states = [state.values if state.codec.kind == "plain" else decode(state) for state in item.states]
    step = _compiled(rule, "weight", backend)
    with torch.no_grad():
        step(item.weight, states, h)


@cache
def _compiled(rule: Any, part: str, backend: str) -> Callable[..., None]:
    """One compiled function for each rule; it serves any shape.

    Each has a code object of its own: the compiler counts, and limits, what it has made of one.
    """

    def layer_step(g: Tensor, w: Tensor, states: list[Tensor], h: Tensor) -> None:
        new_weight, new_states = rule.update(g.float(), w.float(), tuple(s.float() for s in states), h)
        for stored, new in zip((w, *states), (new_weight, *new_states)):
            stored.copy_(new)

    def weight_step(w: Tensor, states: list[Tensor], h: Tensor) -> None:
        w.copy_(rule.weight_update(w.float(), tuple(s.float() for s in states), h))

    step: Callable[..., None] = layer_step if part == "layer" else weight_step
    name = f"{rule.name}_{part}"
    own = types.FunctionType(
        step.__code__.replace(co_name=name),
        step.__globals__,
        name,
        step.__defaults__,
        step.__closure__,
    )
    return torch.compile(own, dynamic=True, fullgraph=True, backend=backend)
