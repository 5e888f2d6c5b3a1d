"""Captured second moments on their way from all ranks to the rank that refreshes their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titanforge.optim.dobb.hooks import Reader
from titanforge.optim.links import DataLinks, RowSum

_BUCKET_BYTES = 64 * 2**20
"""Second moments of one exchange; a weight larger than this is one by itself."""


@dataclass
class Captured:
    """One weight under Dobb.

    reader: who reads it. statistic, basis: its states as they lie on this rank, [b, w, w], b of its `blocks`
    blocks: those from `shard * chunk` on. groups: statistics with positions of their own (experts), else 1.
    experts: whether it has experts, whose partners may be others.
    cold: blocks of this rank, by number, that were never captured as far as the host knows. sums: outer
    products and positions while they are captured and not yet on their way.
    """

    name: str
    reader: Reader
    statistic: Tensor
    basis: Tensor
    blocks: int
    chunk: int
    groups: int = 1
    cold: list[int] = field(default_factory=list)
    sums: tuple[Tensor, Tensor] | None = None
    experts: bool = False

    @property
    def width(self) -> int:
        return self.basis.shape[-1]

    def new_sums(self) -> tuple[Tensor, Tensor]:
        """fp32 zeros: outer products of all blocks [B, w, w], or [E, B, w, w] of experts, and positions [] or
        [E].
        """
        leading = (self.groups,) if self.experts else ()
        shape = (*leading, self.blocks // self.groups, self.width, self.width)
        device = self.basis.device
        return torch.zeros(shape, device=device), torch.zeros(leading, device=device)


class Reduction:
    """The sums of some weights, launched when it is made and complete after `wait`.

    One exchange carries the outer products of each rank's blocks, and to every rank all positions and the
    sum of `beside`, a scalar of each shard.
    """

    def __init__(self, weights: Sequence[Captured], links: DataLinks, beside: Tensor) -> None:
        self.weights = list(weights)
        self._shard, self._replicas = links.shard, links.replicas
        rows = links.shards
        parts, counts = [], []
        for weight in self.weights:
            assert weight.sums is not None
            total, count = weight.sums
            weight.sums = None
            flat = total.reshape(weight.blocks, -1)
            if missing := rows * weight.chunk - weight.blocks:  # the last ranks have fewer blocks, or none
                flat = torch.cat([flat, flat.new_zeros(missing, flat.shape[1])])
            parts.append(flat.view(rows, -1))
            counts.append(count.reshape(1, -1).expand(rows, -1))
        counts.append(beside.to(torch.float32).view(1, 1).expand(rows, 1))
        self._sizes = [part.shape[1] for part in (*parts, *counts)]
        self._sum = RowSum(torch.cat([*parts, *counts], dim=1), links)

    def beside(self) -> Tensor:
        """The sum over shards, of which all replicas have the same; waits as `wait` does."""
        return self._sum.wait()[-1] / self._replicas

    def wait(self) -> Iterator[tuple[Captured, Tensor, Tensor, Tensor]]:
        """Each weight with the sums [b, w, w] and positions [b] of this rank's blocks, and all positions [].

        The current stream waits for the exchange, on CPU the caller.
        """
        parts = self._sum.wait().split(self._sizes)
        for weight, sums, counts in zip(self.weights, parts, parts[len(self.weights) :]):
            local = len(weight.basis)
            sums = sums.view(-1, weight.width, weight.width)[:local]
            if weight.groups == 1:
                yield weight, sums, counts.expand(local), counts[0]
                continue
            first = self._shard * weight.chunk
            of_group = weight.blocks // weight.groups
            group = torch.arange(first, first + local, device=counts.device) // of_group
            yield weight, sums, counts[group], counts.sum()


def buckets(weights: Sequence[Captured]) -> list[list[Captured]]:
    """The weights in order, in runs that are exchanged together."""
    found: list[list[Captured]] = []
    held = 0
    for weight in weights:
        size = 4 * weight.blocks * weight.width**2
        if not found or held + size > _BUCKET_BYTES:
            found.append([])
            held = 0
        found[-1].append(weight)
        held += size
    return found
