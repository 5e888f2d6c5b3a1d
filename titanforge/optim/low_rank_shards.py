"""U of Dion on shards of a GPU: products of bf16 planes of this rank's parts, in place, and three collectives
a batch. `low_rank` has the same in plain torch.

B is a momentum, transposed where it is wide; its long side has m entries, its short one n. Each rank forms
its share of Y = B Q; every matrix of the batch has one owner, who gets Y whole, orthonormalises it and sends
P back; each forms its share of R = B^T P, which all get whole. What goes over the wire depends on the side
that the shards cut (FSDP cuts rows: the long side of tall and square matrices, the short one of wide ones):

| cut | Y | to owners | P back | R |
|---|---|---|---|---|
| the long side | rows | all-to-all | all-to-all, its own rows to each rank | all-reduce of n r |
| the short side | a share of the sum | reduce-scatter | all-gather | all-gather of n r |

Of a matrix a rank sends m r (N - 1)/N^2 in each all-to-all of the first row, where an all-gather of Y would
send m r (N - 1)/N: both together as much between two ranks, half of it between four. The second row's pair is
what an all-reduce of Y is made of. So owners cost no bytes, and each does 1/N of the orthonormalisation,
whose float64 passes and small factorisations would else be the one part that more ranks do not shorten:
8 m r^2 operations in float64 a matrix, and 12 passes over m r numbers of 8 bytes. The products take 16 m n r
in bf16, of which each rank has 1/N anyway. Owners also make the bits of P the same everywhere. R goes to all:
the norm of its columns is a pass, not worth an owner.

A batch takes some 65 launches whatever its size, so batches are as large as workspace allows, of equal
size. Two are under way: one computes while the other's collective runs.
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from titanforge.optim.dealt_factors import Deal
from titanforge.optim.entries import Entry
from titanforge.optim.local_update import LocalWeight
from titanforge.optim.low_rank import Cut
from titanforge.optim.orthonormal import orthonormal
from titanforge.optim.plane_products import Targets, left_planes, planes, project, sketch, split, write_back
from titanforge.optim.state_stacks import one_stack

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DONE = object()
Record = Callable[[str, int], None]


class ShardedLowRankRule(Protocol):
    """What is needed of Dion."""

    u_writes_state: bool
    batch_bytes: int

    @staticmethod
    def settle(r: Tensor, q: Tensor) -> tuple[Tensor, Tensor]: ...
    def scale(self, rows: int, columns: int) -> float: ...


@dataclass(frozen=True)
class Piece:
    """Rows of a part of each weight, or whole parts that follow each other: matrices [k parts, rows, n].

    parts: which ones. mine: their rows in this rank's part of a weight. long, short: what there is of the
    sides of B. momenta, targets: of these rows, each momentum by itself and in place.
    """

    parts: slice
    mine: slice
    long: slice
    short: slice
    momenta: list[Tensor]
    targets: Targets

    @property
    def count(self) -> int:
        return self.parts.stop - self.parts.start

    def long_of(self, x: Tensor) -> Tensor:
        """[k parts, rows of the long side, *] of x [k, all parts, m, *]."""
        return x[:, self.parts, self.long].flatten(0, 1)

    def short_of(self, x: Tensor) -> Tensor:
        """The same of the short side."""
        return x[:, self.parts, self.short].flatten(0, 1)


class ShardBatch:
    """Weights of one shape and cut that are updated together, and what is found out about them once."""

    def __init__(self, entries: Sequence[Entry], items: Sequence[LocalWeight]) -> None:
        param, first = entries[0].param, items[0]
        assert isinstance(param, DTensor) and first.matrix is not None
        self.items, self.parts, self.matrix = list(items), first.parts, first.matrix
        rows, columns = first.matrix
        self.wide = columns > rows
        self.long, self.short = max(rows, columns), min(rows, columns)
        cut = _one_cut(param)
        assert cut is not None
        (axis, self.dim), mesh = cut, param.device_mesh
        self.deal = Deal(
            mesh.get_group(axis),
            mesh.get_local_rank(axis),
            mesh.size(axis),
            len(items),
            param.shape[self.dim],
        )
        self.long_is_cut = self.wide == (self.dim == 1)
        self.momenta = [item.states[0].values for item in items]
        self.auxiliary = [item.auxiliary[0] for item in items]
        self.q = one_stack(self.auxiliary)
        self.stack = one_stack(self.momenta) if self.momenta[0].dtype == torch.bfloat16 else None
        self.pieces = [self._piece(*run) for run in _runs(Cut.of(param, self.parts), rows)]

    def _piece(self, parts: slice, mine: slice, rows: slice, columns: slice) -> Piece:
        long, short = (columns, rows) if self.wide else (rows, columns)
        momenta = [momentum[mine] for momentum in self.momenta]
        targets = Targets(
            [item.weight[mine] for item in self.items],
            [None if item.copy is None else item.copy[mine] for item in self.items],
            momenta,
            self._in_stack(parts.stop - parts.start, mine),
        )
        return Piece(parts, mine, long, short, momenta, targets)

    def _in_stack(self, count: int, mine: slice) -> Tensor | None:
        """The momenta's own memory as [k count, rows, columns], where it is such a view."""
        if self.stack is None:
            return None
        of_piece = self.stack[:, mine]
        if count > 1 and of_piece.shape != self.stack.shape:
            return None
        return of_piece.unflatten(1, (count, -1)).flatten(0, 1)

    def planes_of(self, piece: Piece) -> list[Tensor]:
        """bf16 [k parts, rows, columns], whose sum is the momenta, high first."""
        if piece.targets.stack is not None:
            return [piece.targets.stack]
        if piece.momenta[0].dtype == torch.bfloat16:
            found = [torch.stack(piece.momenta)]
        else:
            found = split(torch.stack([momentum.float() for momentum in piece.momenta]))
        return [plane.unflatten(1, (piece.count, -1)).flatten(0, 1) for plane in found]

    def factors(self) -> Tensor:
        """Q [k, parts, n, r]."""
        q = torch.stack(self.auxiliary) if self.q is None else self.q
        return q.view(len(self.items), self.parts, *q.shape[-2:])

    def keep(self, q: Tensor) -> None:
        """Write Q [k, parts, n, r], where it is not the states' own memory."""
        if self.q is None:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                self.auxiliary, list(q.view(len(self.items), *self.auxiliary[0].shape).unbind(0))
            )

    def new_rows(self, count: int, r: int) -> Tensor:
        """For what has this rank's rows of the cut side, [count, g, chunk, r]: g is 1 where parts follow each
        other along that side, else their number.
        """
        groups = 1 if self.dim == 0 else self.parts
        return self.momenta[0].new_empty(count, groups, self.deal.chunk, r, dtype=torch.float32)

    def of_rows(self, x: Tensor, piece: Piece) -> Tensor:
        """[k, parts of the piece, rows, *] of what has this rank's rows, a view."""
        x = x[: len(self.items)]
        if self.dim == 1:
            return x[:, :, : self.deal.local]
        return x[:, 0, piece.mine].unflatten(1, (piece.count, -1))

    def new_shares(self, count: int, size: int, r: int) -> Tensor:
        """For shares of sums, [count, parts, size, r]: 0 where this rank has nothing of a part."""
        all_here = sum(piece.count for piece in self.pieces) == self.parts
        new = torch.empty if all_here else torch.zeros
        shape = (count, self.parts, size, r)
        return new(shape, dtype=torch.float32, device=self.momenta[0].device)


class ShardBatches:
    """Batches of weights that Dion updates on shards, made anew only when the weights are others.

    stacked: whether momenta lie in one memory (`stack_momenta`); the same on all ranks.
    """

    def __init__(self, stacked: bool = False) -> None:
        self._stacked = stacked
        self._items: list[LocalWeight] = []
        self._batches: list[ShardBatch] = []
        self._left: list[Entry] = []

    def update(
        self, rule: ShardedLowRankRule, entries: Sequence[Entry], h: Tensor, record: Record | None
    ) -> list[Entry]:
        """U of Dion after A has run on the shards, and the weights that are left: those that are cut by two
        mesh axes or not along a dim of a matrix, or not stored as floats.

        entries: the same ones at each step, on all ranks, empty shards too. record: as of `DataLinks`, told
        of r (m + n) numbers a matrix.
        """
        items = [entry.current() for entry in entries]
        if len(items) != len(self._items) or not all(map(operator.is_, items, self._items)):
            self._items = items
            self._batches, self._left = _batches(rule, entries, items, self._stacked)
        if record is not None:
            for batch in self._batches:
                r = batch.auxiliary[0].shape[-1]
                record("factors", 4 * r * (batch.long + batch.short) * len(batch.items) * batch.parts)
        plain = all(batch.momenta[0].dtype == torch.bfloat16 for batch in self._batches)
        # Of fp32 momenta there are two planes: their memory is that of two batches.
        _in_turns((_update(rule, batch, h) for batch in self._batches), 2 if plain else 1)
        for item in items:
            item.gradient = None
        return self._left


def _update(rule: ShardedLowRankRule, batch: ShardBatch, h: Tensor) -> Generator[None]:
    deal, pieces, wide = batch.deal, batch.pieces, batch.wide
    long, short, by_rows = batch.long, batch.short, batch.long_is_cut
    q = batch.factors()
    r = q.shape[-1]
    b = [batch.planes_of(piece) for piece in pieces]
    beside = planes(q, "hl")
    y = batch.new_rows(deal.padded, r) if by_rows else batch.new_shares(deal.padded, long, r)
    for piece, own in zip(pieces, b):
        out = batch.of_rows(y, piece) if by_rows else y[: deal.count, piece.parts]
        sketch(own, piece.short_of(beside), r, wide, out=out)
    whole = yield from (deal.wholes(y) if by_rows else deal.sums(y))
    del y
    if deal.owned:
        whole = orthonormal(whole.reshape(-1, long, r)).view(whole.shape)
    p = yield from (deal.rows(whole) if by_rows else deal.everywhere(whole))
    del whole
    p = left_planes(p, wide)
    left = [(batch.of_rows(p, piece) if by_rows else p[:, piece.parts]) for piece in pieces]
    found = batch.new_shares(deal.count, short, r) if by_rows else batch.new_rows(deal.count, r)
    for piece, own, of_piece in zip(pieces, b, left):
        out = found[:, piece.parts] if by_rows else batch.of_rows(found, piece)
        project(own, of_piece.flatten(0, 1), r, wide, out=out)
    del b
    found = yield from (deal.total(found) if by_rows else deal.gathered(found))
    new_q, good = rule.settle(found.reshape(-1, short, r), q.view(-1, short, r))
    bad = ~good.view(deal.count, batch.parts, 1, 1)
    new_q, found = new_q.view(q.shape), found.reshape(q.shape)
    if rule.u_writes_state:
        found.masked_fill_(bad, 0.0)
    scale = rule.scale(*batch.matrix)
    for piece, of_piece in zip(pieces, left):
        of_piece.masked_fill_(bad[:, piece.parts], 0.0)  # no step, and nothing that leaves the momentum
        kept = piece.short_of(found) if rule.u_writes_state else None
        write_back(piece.targets, of_piece.flatten(0, 1), kept, piece.short_of(new_q), h, scale, wide)
    torch.where(h[0] != 0, new_q, q, out=q)
    batch.keep(q)


def _in_turns(updates: Iterable[Generator[None]], most: int) -> None:
    """Go on with each in turn, `most` of them at a time; in one order on all ranks."""
    source, under_way = iter(updates), deque[Generator[None]]()
    while True:
        if len(under_way) < most and (new := next(source, None)) is not None:
            under_way.append(new)
        if not under_way:
            return
        one = under_way.popleft()
        if next(one, _DONE) is not _DONE:
            under_way.append(one)


def _batches(
    rule: ShardedLowRankRule, entries: Sequence[Entry], items: Sequence[LocalWeight], stacked: bool
) -> tuple[list[ShardBatch], list[Entry]]:
    """Batches of equal size, of up to `rule.batch_bytes` as fp32 on a rank; and the weights that are left."""
    groups: dict[tuple, list[tuple[Entry, LocalWeight]]] = defaultdict(list)
    left = []
    for entry, item in zip(entries, items):
        param = entry.param
        assert isinstance(param, DTensor)
        cut = _one_cut(param)
        if cut is not None and _is_plain(item):
            stored = [None if t is None else t.dtype for t in (item.weight, item.copy, item.states[0].values)]
            groups[param.shape, *cut, item.parts, param.device_mesh, *stored].append((entry, item))
        else:
            left.append(entry)
    found = []
    for (_, axis, dim, *_), members in groups.items():
        param = members[0][0].param
        assert isinstance(param, DTensor)
        ranks = param.device_mesh.size(axis)
        largest = -(-param.shape[dim] // ranks) * param.shape[1 - dim]  # the same number on all ranks
        # Momenta in bf16 that lie in one memory need no planes, weights in bf16 no fp32 product.
        item = members[0][1]
        lean = stacked and item.weight.dtype == item.states[0].values.dtype == torch.bfloat16
        most = max(1, (2 if lean else 1) * rule.batch_bytes // (4 * largest))
        size = -(-len(members) // -(-len(members) // most))
        size = min(-(-size // ranks) * ranks, max(size, most))  # every rank owns as many, if that fits
        for start in range(0, len(members), size):
            chosen = members[start : start + size]
            found.append(ShardBatch([entry for entry, _ in chosen], [item for _, item in chosen]))
    return found, left


def _is_plain(item: LocalWeight) -> bool:
    """Whether weights and momenta are floats. All ranks say the same, whatever their shards' strides."""
    codec = item.states[0].codec
    stored = [t.dtype for t in (item.weight, item.copy, item.states[0].values) if t is not None]
    return (
        item.codec is None
        and codec.kind == "plain"
        and not codec.stochastic
        and all(dtype in _FLOATS for dtype in stored)
    )


def _one_cut(param: DTensor) -> tuple[int, int] | None:
    """The mesh axis that cuts a matrix, and the dim; None where there are several, or chunks are not those of
    `Shard`.
    """
    axes = [
        (axis, placement)
        for axis, placement in enumerate(param.placements)
        if not placement.is_replicate() and param.device_mesh.size(axis) > 1
    ]
    if param.dim() != 2 or len(axes) != 1 or type(axes[0][1]) is not Shard:
        return None
    return axes[0][0], axes[0][1].dim


def _runs(cut: Cut, height: int) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Parts that this rank has whole, one after the other, and each that it has rows of: which ones, their
    rows here, the rows of the part, the columns of it.
    """
    if cut.columns.start == cut.columns.stop:
        return
    begun: tuple[int, slice] | None = None
    whole = slice(0, height)
    for index, (part, mine, rows) in enumerate(cut.rows):
        if rows != whole:
            yield slice(part, part + 1), mine, rows, cut.columns
            continue
        first, begin = begun or (part, mine)
        follows = index + 1 < len(cut.rows) and cut.rows[index + 1][2] == whole
        begun = (first, begin) if follows else None
        if not follows:
            yield slice(first, part + 1), slice(begin.start, mine.stop), whole, cut.columns
