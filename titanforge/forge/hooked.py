"""Weights whose gradient is complete only after ranks have summed it: consumed as it arrives, and then freed.

With FSDP2 a gradient arrives as this rank's shard, reduced by then; between replicas as a piece of an
all-reduced bucket. No module is changed for it: whatever reads a weight, and however often, autograd and the
reduction have added it all up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from titanforge.forge.sinks import Sink
from titanforge.optim.states import local_tensor


def _sum_over(tensor: Tensor, group: ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a model.

    mesh: sizes of the mesh axes, as `plan` takes them. sum_over_data: sums a tensor in place over all ranks
    that see other data. sum_over: sums one over a group. reduce: what replicas sum, `sync.reduce`.
    """

    mesh: Mapping[str, int] = field(default_factory=dict)
    sum_over_data: Callable[[Tensor], object] | None = None
    sum_over: Callable[[Tensor, ProcessGroup], object] = _sum_over
    reduce: str = "gradients"

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


@dataclass(eq=False)
class HookedSink(Sink):
    """The sink of a weight that is handed its whole gradient, or its shard of it. Set `param` after it is
    made.
    """

    param: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.empty(0)))

    def arrived(self, param: Tensor) -> None:
        """As a hook after accumulation: of the last micro-batch, consume `.grad` and drop it."""
        self.begin()
        if self.clock.last:
            self._take_gradient()

    def reduced(self, gradient: Tensor) -> None:
        """A summed gradient of the weight's local shape."""
        if not self.clock.running:
            self.begin()  # raises
        self.touched += 1
        self._consume_local(gradient)

    def finish(self) -> None:
        """A weight that the last micro-batch passed by has what the others left, or no gradient at all."""
        if not self.done:
            self._take_gradient()
        self.touched, self.done = 0, False

    def forget(self) -> None:
        super().forget()
        self._norms.clear()

    def _take_gradient(self) -> None:
        gradient = self.param.grad
        self.param.grad = None
        self._consume_local(None if gradient is None else local_tensor(gradient))

    @torch.no_grad()
    def _consume_local(self, gradient: Tensor | None) -> None:
        shape = local_tensor(self.param).shape
        if gradient is None:
            gradient = torch.zeros(shape, device=self.clock.rng.device)
        if shape.numel() == 0:  # a shard of nothing
            self._norms, self.done = {}, True
            return
        self.update_whole(gradient)


def total_square(parts: Iterable[tuple[Tensor, list[Tensor]]], ranks: Ranks, device: torch.device) -> Tensor:
    """Sum of squares of all gradients, each weight counted once however it is shared out: fp32 scalar.

    parts: every weight, with the sums of squares of what is here of its gradient. All ranks issue the same
    reductions, also where one holds nothing of a weight.
    """
    shares: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for param, squares in parts:
        shares.setdefault(_sharing(param), []).extend(squares)
    total = torch.zeros((), device=device)
    for groups, squares in shares.items():
        square = torch.zeros((), device=device)
        if squares:
            square += torch.stack(torch._foreach_norm(squares, 1)).sum()  # pyright: ignore[reportPrivateImportUsage]
        for group in groups:
            ranks.sum_over(square, group)
        total += square
    return total


def _sharing(param: Tensor) -> tuple[ProcessGroup, ...]:
    """Groups whose ranks hold other parts of a weight."""
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    return tuple(
        mesh.get_group(axis) for axis, place in enumerate(param.placements) if not place.is_replicate()
    )
