"""How an optimizer reaches other ranks: by plain functions, so that it knows no mesh and all is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Waitable(Protocol):
    """A collective that was launched."""

    def wait(self) -> Any: ...


class ReduceScatter(Protocol):
    def __call__(self, output: Tensor, rows: Tensor, /, *, async_op: bool) -> Waitable | None: ...


class AllReduce(Protocol):
    def __call__(self, tensor: Tensor, /, *, async_op: bool) -> Waitable | None: ...


@dataclass(frozen=True)
class DataLinks:
    """The ranks that see other data: `shards` hold a part of each weight each, replicas hold the same parts.

    shards, shard: how many parts there are, and which one this rank has.
    reduce_scatter: `rows` [shards L] summed over the shards; part `shard` of the sum goes to `output` [L].
    all_reduce: sums in place over the `replicas` of this shard. None: there is one.
    experts: of experts that ranks share: who else has the same ones. None: they are dealt like other weights.
    record: told of each exchange that a step issues between shards by itself: what for, payload bytes.
    """

    shards: int = 1
    shard: int = 0
    replicas: int = 1
    reduce_scatter: ReduceScatter | None = None
    all_reduce: AllReduce | None = None
    record: Callable[[str, int], None] | None = None
    experts: DataLinks | None = None


class RowSum:
    """`rows` [shards, L], summed over shards and replicas, of which this rank gets row `shard`: launched at
    once, complete for whoever has called `wait`.

    On CUDA both collectives run on a side stream, behind whatever the current one still computes; the host
    never waits. On CPU the first is asynchronous and the second follows in `wait`.
    """

    def __init__(self, rows: Tensor, links: DataLinks) -> None:
        self._rows, self._links = rows, links
        self._work: Waitable | None = None
        self._event: Any = None  # of CUDA
        self._waited = False
        self.sum = rows[0] if links.reduce_scatter is None else torch.empty_like(rows[0])
        if rows.is_cuda and (links.reduce_scatter is not None or links.all_reduce is not None):
            stream = _side_stream(rows.device)
            stream.wait_stream(torch.cuda.current_stream(rows.device))
            with torch.cuda.stream(stream):
                self._scatter(async_op=False)
                self._reduce(async_op=False)
            for tensor in (rows, self.sum):  # made on another stream: their memory must outlive this one
                tensor.record_stream(stream)
            self._event = stream.record_event()
        elif links.reduce_scatter is not None:
            self._work = self._scatter(async_op=True)
        else:
            self._work = self._reduce(async_op=True)

    def _scatter(self, async_op: bool) -> Waitable | None:
        if self._links.reduce_scatter is None:
            return None
        return self._links.reduce_scatter(self.sum, self._rows.view(-1), async_op=async_op)

    def _reduce(self, async_op: bool) -> Waitable | None:
        return None if self._links.all_reduce is None else self._links.all_reduce(self.sum, async_op=async_op)

    def wait(self) -> Tensor:
        """[L]; the current stream (on CPU: the caller) waits for it. Calling it again is free on CPU."""
        if self._event is not None:
            torch.cuda.current_stream(self.sum.device).wait_event(self._event)
        elif not self._waited:
            if self._work is not None:
                self._work.wait()
            if self._links.reduce_scatter is not None:
                self._reduce(async_op=False)
        self._waited = True
        if self.sum.is_cuda:
            # Whoever reads it may drop it before its stream has: the memory is the first stream's.
            self.sum.record_stream(torch.cuda.current_stream(self.sum.device))
        return self.sum


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]
