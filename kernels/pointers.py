"""Tables of addresses on the device: one launch then works on tensors that lie anywhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import HAS_TRITON, tl

_CACHED = 512
_tables: OrderedDict[Any, tuple[Tensor, Tensor]] = OrderedDict()
_captured: list[tuple[Tensor, Tensor]] = []
"""What CUDA graphs were captured with: a replay reads the pinned copies again, so they are never dropped."""


def address_table(rows: Sequence[Sequence[Tensor | None]], device: torch.device) -> Tensor:
    """int64 [len(rows), columns] of the tensors' addresses, 0 for None; kept while they stay the same."""
    addresses = tuple(tuple(0 if tensor is None else tensor.data_ptr() for tensor in row) for row in rows)
    key = (addresses, device)
    found = _tables.get(key)
    if found is None:
        host = torch.tensor(addresses, dtype=torch.int64)
        if device.type != "cpu":
            host = host.pin_memory()
        found = _tables[key] = (host.to(device, non_blocking=True), host)
        while len(_tables) > _CACHED:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.append(found)
    return found[0]


def element_type(dtype: torch.dtype) -> Any:
    """Triton's type of what an address points to."""
    if not HAS_TRITON:
        return None
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
