"""Tables of addresses on the device: one launch then works on tensors that lie anywhere."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import HAS_TRITON, tl

_CACHED = 512
_tables: OrderedDict[Any, Tensor] = OrderedDict()
_captured: dict[int, Tensor] = {}
"""What CUDA graphs were captured with, by identity: replays read these tables, which are never dropped."""


def address_table(rows: Sequence[Sequence[Tensor | None]], device: torch.device) -> Tensor:
    """int64 [len(rows), columns] of the tensors' addresses, 0 for None; kept while they stay the same."""
    addresses = tuple(tuple(0 if tensor is None else tensor.data_ptr() for tensor in row) for row in rows)
    key = (addresses, device)
    found = _tables.get(key)
    if found is None:
        found = _tables[key] = upload(torch.tensor(addresses, dtype=torch.int64), device)
        while len(_tables) > _CACHED:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    if is_capturing(device):
        _captured[id(found)] = found
    return found


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, its contents there by the time that a launch after this one reads them.

    A copy on a stream that captures would become a node of the graph and read `host` at each replay, from an
    address that the allocator has long given to someone else. On another stream it happens now; memory asked
    for there does not come from the graph's pool either.
    """
    if device.type == "cpu":
        return host
    if not is_capturing(device):
        return host.pin_memory().to(device, non_blocking=True)
    with torch.cuda.stream(_upload_stream(device)):
        return host.to(device)  # from pageable memory: returns when the bytes have arrived


@functools.cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def element_type(dtype: torch.dtype) -> Any:
    """Triton's type of what an address points to."""
    if not HAS_TRITON:
        return None
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
