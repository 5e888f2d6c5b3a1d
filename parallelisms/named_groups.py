"""Process groups by name, for operators that compiled code calls: these take tensors and plain values."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from titanforge.parallelisms.traffic import Traffic, silent

_told: dict[str, Callable[[], Traffic | None]] = {}


def name_group(group: dist.ProcessGroup, traffic: Traffic = silent) -> str:
    """The name under which ``group_named`` finds the group, and whom to tell of what is sent over it.

    Of several models that are split over one group, the last one's record is told. A method's object is not
    kept alive by that: where it is gone, nobody is told.
    """
    _told[group.group_name] = weakref.WeakMethod(traffic) if inspect.ismethod(traffic) else lambda: traffic
    return group.group_name


def group_named(name: str) -> tuple[dist.ProcessGroup, Traffic]:
    """Raises RuntimeError if there is no such group (any more)."""
    group = _resolve_process_group(name)  # pyright: ignore[reportArgumentType]
    traffic = _told[name]() if name in _told else None
    return group, silent if traffic is None else traffic
