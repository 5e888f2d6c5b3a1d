"""A stand-in for a CUDA graph on CPU: the operations of a step recorded, and run again on the same tensors.

It has a graph's properties that can go wrong: numbers that Python computed stay what they were, memory stays
where it was, and nothing may look at a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanforge.forge import head, ops

# Operations that hand over to a sink: what they do is recorded in their place.
_HANDING_OVER: dict[str, Callable[..., Any]] = {
    "titanforge::forge_product": ops._consume_product,
    "titanforge::forge_rows": ops._consume_rows,
    "titanforge::forge_gradient": ops._consume_gradient,
    "titanforge::forge_head": head.consume_head._init_fn,
}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedGraph(TorchDispatchMode):
    """See the module's text. captures, replays: how often each happened."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.captures = self.replays = 0
        self._tape: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()
        self._in_kernel = 0

    def warm_up(self, launch: Callable[[], Any]) -> Any:
        return launch()

    def capture(self, launch: Callable[[], Any]) -> Any:
        self.captures += 1
        with self:
            result = launch()
        with torch.no_grad():  # a capture runs nothing: undo what this one did
            for tensor, before in self._before.values():
                tensor.copy_(before)
        return result

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, outputs in self._tape:
            inputs = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for old, new in zip(outputs, tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and _storage(old) not in inputs:
                    old.copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense" and not self._in_kernel:
            tensor = args[0]
            if tensor.dtype != torch.float64:  # a sink's handle is a number that happens to be a tensor
                raise RuntimeError("operation not permitted when stream is capturing")
        if name in _HANDING_OVER:
            self._in_kernel += 1
            try:
                with self:
                    return _HANDING_OVER[name](*args, **kwargs)
            finally:
                self._in_kernel -= 1
        self._keep(func, args, kwargs)
        result = func(*args, **kwargs)
        outputs = tree_leaves(result)
        self._made |= {_storage(t) for t in outputs if isinstance(t, Tensor)} - {
            _storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        self._tape.append((func, args, kwargs, outputs))
        return result

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The contents of what this operation writes and the recording did not make."""
        written = [
            value
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in [
                kwargs.get(argument.name) if argument.kwarg_only else (args[index : index + 1] or [None])[0]
            ]
        ]
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor) and _storage(tensor) not in self._made | self._before.keys():
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # pyright: ignore
                self._before[_storage(tensor)] = (whole, whole.clone())
