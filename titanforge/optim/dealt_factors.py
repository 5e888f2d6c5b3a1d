"""Collectives of a batch of thin matrices that ranks have shares of: each matrix is made whole on one rank.

Every function is a generator: it launches one collective, yields, and returns the result when it is gone on
with. On a GPU the host never waits, and what is launched between the two runs beside the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# The older name warns where the newer one exists.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Sent = Generator[None, None, Tensor]


@dataclass(frozen=True)
class Deal:
    """`count` matrices [size, r] and what each rank of a group has: as owner, whole matrices; beside that,
    rows of all of them, dealt as DTensor does, in chunks of equal size of which the last may be short or
    empty. What fills up unequal shares is never read.

    rank, ranks: of the group.
    """

    group: ProcessGroup
    rank: int
    ranks: int
    count: int
    size: int

    @property
    def each(self) -> int:
        """Matrices of an owner, at most."""
        return -(-self.count // self.ranks)

    @property
    def owned(self) -> int:
        """Matrices of this rank."""
        return max(0, min(self.count - self.rank * self.each, self.each))

    @property
    def chunk(self) -> int:
        """Rows of a rank, at most."""
        return -(-self.size // self.ranks)

    @property
    def local(self) -> int:
        """Rows of this rank."""
        return max(0, min(self.size - self.rank * self.chunk, self.chunk))

    @property
    def padded(self) -> int:
        """Matrices in what owners are sent."""
        return self.ranks * self.each

    def wholes(self, rows: Tensor) -> Sent:
        """This rank's matrices [owned, g, size, r], from all ranks' rows [padded, g, chunk, r]."""
        received = torch.empty_like(rows)
        yield from self._issue(dist.all_to_all_single, received, rows)
        by_sender = received.view(self.ranks, self.each, *rows.shape[1:])[:, : self.owned]
        return by_sender.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.size]

    def rows(self, wholes: Tensor) -> Sent:
        """This rank's rows of all matrices, [count, g, local, r], from the owners' [owned, g, size, r]."""
        full, (owned, groups, size, r) = self.ranks * self.chunk, wholes.shape
        if size < full:
            padded = wholes.new_empty(owned, groups, full, r)
            padded[:, :, :size] = wholes
            wholes = padded
        sent = wholes.new_empty(self.ranks, self.each, groups, self.chunk, r)
        sent[:, :owned].copy_(wholes.unflatten(2, (self.ranks, self.chunk)).permute(2, 0, 1, 3, 4))
        received = torch.empty_like(sent)
        yield from self._issue(dist.all_to_all_single, received, sent)
        return received.view(self.padded, groups, self.chunk, r)[: self.count, :, : self.local]

    def sums(self, shares: Tensor) -> Sent:
        """This rank's matrices [owned, *], from all ranks' shares [padded, *] of their sums."""
        own = shares.new_empty(self.each, *shares.shape[1:])
        yield from self._issue(_reduce_scatter, own.view(-1), shares.view(-1))
        return own[: self.owned]

    def everywhere(self, wholes: Tensor) -> Sent:
        """All matrices [count, *], from the owners' [owned, *]."""
        if self.owned < self.each:
            padded = wholes.new_empty(self.each, *wholes.shape[1:])
            padded[: self.owned] = wholes
            wholes = padded
        received = wholes.new_empty(self.padded, *wholes.shape[1:])
        yield from self._issue(_all_gather, received.view(-1), wholes.contiguous().view(-1))
        return received[: self.count]

    def gathered(self, rows: Tensor) -> Sent:
        """All matrices [count, g, size, r], from all ranks' rows [count, g, chunk, r]."""
        received = rows.new_empty(self.ranks, *rows.shape)
        yield from self._issue(_all_gather, received.view(-1), rows.view(-1))
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.size]

    def total(self, shares: Tensor) -> Sent:
        """The sum of all ranks' shares, in their place."""
        yield from self._issue(dist.all_reduce, shares)
        return shares

    def _issue(self, collective: Callable[..., dist.Work | None], *tensors: Tensor) -> Generator[None]:
        work = collective(*tensors, group=self.group, async_op=True)
        yield
        if work is not None:
            work.wait()
