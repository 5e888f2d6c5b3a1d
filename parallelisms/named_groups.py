"""Process groups by name, for operators that compiled code calls: these take tensors and plain values."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from titanforge.parallelisms.traffic import Traffic, silent

_told: dict[str, Traffic] = {}


def name_group(group: dist.ProcessGroup, traffic: Traffic = silent) -> str:
    """The name under which ``group_named`` finds the group, and whom to tell of what is sent over it.

    Of several models that are split over one group, the last one's record is told.
    """
    _told[group.group_name] = traffic
    return group.group_name


def group_named(name: str) -> tuple[dist.ProcessGroup, Traffic]:
    """Raises RuntimeError if there is no such group (any more)."""
    return _resolve_process_group(name), _told.get(name, silent)  # pyright: ignore[reportArgumentType]
