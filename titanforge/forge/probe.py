"""One forward pass that shows who reads which weight: how often each module runs, and how many readers
autograd saw.

A weight may be updated during backward only if nothing else reads it in the same step. Module calls alone do
not show that: a weight may be read past its module (`F.linear(x, module.weight)`), or once more beside it.
The graph of the probe's result does: every reader of a weight is an edge into the node that would accumulate
its gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


@dataclass
class Readers:
    """calls: forward calls by module id. edges: readers by parameter id."""

    calls: Counter[int] = field(default_factory=Counter)
    edges: Counter[int] = field(default_factory=Counter)


def probe_readers(model: nn.Module, run: Callable[[], Any]) -> Readers:
    """Run `run` (a forward pass of `model`, with its loss) once, eagerly, and see who reads what.

    run: returns a tensor, or a structure of tensors, that depends on everything a training step trains.
    Nothing it does is kept: buffers and random states are restored.
    """
    readers = Readers()
    members = {id(module) for module in model.modules()}

    def count(module: nn.Module, _inputs: object) -> None:
        if id(module) in members:
            readers.calls[id(module)] += 1

    handle = register_module_forward_pre_hook(count)
    try:
        with _leaving_no_trace(model), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            result = run()
    finally:
        handle.remove()
    _count_edges(result, readers.edges)
    return readers


@contextmanager
def _leaving_no_trace(model: nn.Module) -> Iterator[None]:
    buffers = [buffer for buffer in model.buffers() if not buffer.is_meta]
    before = [buffer.clone() for buffer in buffers]
    devices = {buffer.device for buffer in (*buffers, *model.parameters()) if buffer.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(device.index or 0 for device in devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, old in zip(buffers, before):
                    buffer.copy_(old)


def _count_edges(result: Any, edges: Counter[int]) -> None:
    todo = [tensor.grad_fn for tensor in _tensors_in(result) if tensor.grad_fn is not None]
    if not todo:
        raise ValueError("the probe's result does not depend on any trainable parameter")
    seen = set(todo)
    while todo:
        node = todo.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            variable = getattr(following, "variable", None)
            if variable is not None:
                edges[id(variable)] += 1
            elif following not in seen:
                seen.add(following)
                todo.append(following)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
