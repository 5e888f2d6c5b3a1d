"""Statistics and bases of many weights as one tensor each: a refresh neither gathers nor scatters them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titanforge.optim.dobb.reduction import Captured

STACK_BYTES = 512 * 2**20
"""Largest stack of blocks that are refreshed at once, as one tensor. Few blocks would leave a GPU idle: the
steps of a factorisation follow one another."""
_ALIGNED = 4
"""Positions of a weight begin at 16 bytes, as compiled code that counts them expects of its inputs."""


@dataclass
class Stack:
    """Weights whose blocks have one width, refreshed together.

    statistic, basis: [N, w, w], the blocks of one weight after those of another; the weights' states are
    views of them. position_of: int64 [N], each block's place among the positions of `new_sums`. positions:
    their number.
    """

    weights: list[Captured]
    statistic: Tensor
    basis: Tensor
    position_of: Tensor
    positions: int

    @property
    def sizes(self) -> list[int]:
        return [len(weight.basis) for weight in self.weights]

    def new_sums(self) -> tuple[Tensor, Tensor]:
        """fp32 zeros: outer products [N, w, w] and positions, of which each weight's `sums` become views.

        For ranks that hold all blocks of what they capture (`blocks` of `Captured`).
        """
        device = self.basis.device
        totals = torch.zeros(self.basis.shape, device=device)
        counts = torch.zeros(self.positions, device=device)
        at = 0
        for weight, total in zip(self.weights, totals.split(self.sizes)):
            count = counts[at]
            if weight.experts:
                total = total.view(weight.groups, -1, *total.shape[1:])
                count = counts[at : at + weight.groups]
            # As `.data`, each with a version of its own: compiled code saves what it adds to, and autograd
            # would take what another weight adds for a change of it.
            weight.sums = total.data, count.data
            at += _room(weight)
        return totals, counts

    def cold(self) -> list[int]:
        """Blocks, by their number here, that were never captured as far as the host knows."""
        found, start = [], 0
        for weight in self.weights:
            found += [start + block for block in weight.cold]
            start += len(weight.basis)
        return found


def stacked(weights: Sequence[Captured], moved: Callable[[Captured], None]) -> list[Stack]:
    """The weights in stacks of one width, up to a size; their states move there, and `moved` is told of each.

    Blocks of one width go together whatever weights they belong to: a model has hundreds of weights, and
    launches for each would keep the host longer than the device. Weights without blocks are left out.
    """
    by_width: dict[int, list[Captured]] = defaultdict(list)
    for weight in weights:
        if len(weight.basis):
            by_width[weight.width].append(weight)
    stacks = []
    for group in by_width.values():
        size = max(1, STACK_BYTES // (4 * max(weight.basis.numel() for weight in group)))
        stacks += [_stack(group[at : at + size], moved) for at in range(0, len(group), size)]
    return stacks


def _room(weight: Captured) -> int:
    return -(-weight.groups // _ALIGNED) * _ALIGNED


def _stack(weights: list[Captured], moved: Callable[[Captured], None]) -> Stack:
    sizes = [len(weight.basis) for weight in weights]
    statistic = torch.cat([weight.statistic for weight in weights])
    basis = torch.cat([weight.basis for weight in weights])
    position_of, at = [], 0
    for weight, *own in zip(weights, statistic.split(sizes), basis.split(sizes)):
        weight.statistic, weight.basis = own
        moved(weight)
        of_group = max(1, weight.blocks // weight.groups)
        position_of.append(at + torch.arange(len(weight.basis)) // of_group)
        at += _room(weight)
    return Stack(
        weights,
        statistic,
        basis,
        torch.cat(position_of).to(basis.device),
        at,
    )
