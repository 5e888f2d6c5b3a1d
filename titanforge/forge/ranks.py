"""The ranks that share a fused model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titanforge.forge.values import check_choice, check_integer, shown

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
DATA_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes along which ranks see other data."""


def _sum_over(tensor: Tensor, group: ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a model.

    mesh: sizes of the mesh axes, as `plan` takes them. sum_over_data: sums a tensor in place over all ranks
    that see other data. sum_over: sums one over a group. reduce: what replicas sum, `sync.reduce`.
    Raises TypeError and ValueError, naming the field: an axis by another name would count as none.
    """

    mesh: Mapping[str, int] = field(default_factory=dict)
    sum_over_data: Callable[[Tensor], object] | None = None
    sum_over: Callable[[Tensor, ProcessGroup], object] = _sum_over
    reduce: str = "gradients"

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mapping):
            raise TypeError(
                f"Ranks.mesh must be a mapping from axes to sizes, such as {{'dp_replicate': 2}}, not "
                f"{shown(self.mesh)}"
            )
        for axis, size in self.mesh.items():
            check_choice("an axis of Ranks.mesh", axis, AXES)
            check_integer(f"Ranks.mesh[{axis!r}]", size, 1)
        for name, function in (("sum_over_data", self.sum_over_data), ("sum_over", self.sum_over)):
            if not callable(function) and not (name == "sum_over_data" and function is None):
                raise TypeError(f"Ranks.{name} must be a function, not {shown(function)}")
        check_choice("Ranks.reduce (sync.reduce)", self.reduce, ("gradients", "states"))

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return any(size > 1 for size in self.mesh.values())

    def agree(self, flag: Tensor) -> Tensor:
        """1 where the flag is 1 on every rank that sees other data; fp32 scalar."""
        if self.sum_over_data is None or not self.several:
            return flag
        against = (flag == 0).to(torch.float32)
        self.sum_over_data(against)
        return (against == 0).to(flag.dtype)
