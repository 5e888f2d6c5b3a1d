"""U of Dion and RMNP on sharded matrices without gathering the momentum (Dobb paper, Tables 3 and 7).

Dion exchanges its two factors, r (m + n) entries of a matrix and step: the rows of B Q that each rank has, or
its share of their sum, and likewise of B^T P. Every rank then has the same bits of P and Q, and moves its own
part of the weight. RMNP adds up the squared norms of rows that are cut, m entries; whole rows need nothing.

Here in plain torch: for a CPU, and for what `low_rank_shards` leaves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titanforge.optim.dion import Dion
from titanforge.optim.entries import Entry
from titanforge.optim.local_update import write_copies
from titanforge.optim.matrix import MatrixRule
from titanforge.optim.orthonormal import orthonormal
from titanforge.optim.placement import from_parts, local_tensor, sharded_dim
from titanforge.optim.rule import select

_BATCH_BYTES = 256 * 2**20
"""Largest set of whole matrices taken together, fp32."""
Record = Callable[[str, int], None]


def same_shape(weights: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Runs of weights of one shape and cut, in one order on all ranks."""
    groups: dict[tuple, list[Entry]] = defaultdict(list)
    for weight in weights:
        param = weight.param
        assert isinstance(param, DTensor)
        groups[param.shape, weight.item().parts, param.device_mesh, param.placements].append(weight)
    for group in groups.values():
        size = max(1, _BATCH_BYTES // (4 * group[0].param.numel()))
        for start in range(0, len(group), size):
            yield group[start : start + size]


@dataclass(frozen=True)
class Cut:
    """The part of an [parts m, n] weight on this rank, and how products of it become whole.

    rows: (part, slice of this rank's rows, slice of the part's rows) for each part that it has rows of.
    columns: slice of n.
    """

    param: DTensor
    parts: int
    rows: tuple[tuple[int, slice, slice], ...]
    columns: slice

    @staticmethod
    def possible(param: Tensor) -> bool:
        """Whether each dim of a matrix is cut once, into contiguous parts."""
        assert isinstance(param, DTensor)
        dims = [sharded_dim(placement) for placement in param.placements]
        plain = all(type(placement) in (Shard, Replicate) for placement in param.placements)
        return plain and param.dim() == 2 and all(dims.count(dim) < 2 for dim in (0, 1))

    @classmethod
    def of(cls, param: Tensor, parts: int) -> Cut:
        assert isinstance(param, DTensor)
        firsts, local = [0, 0], local_tensor(param)
        for axis, placement in enumerate(param.placements):
            dim = sharded_dim(placement)
            if dim is not None and param.device_mesh.size(axis) > 1:
                chunk = -(-param.shape[dim] // param.device_mesh.size(axis))
                firsts[dim] = min(chunk * param.device_mesh.get_local_rank(axis), param.shape[dim])
        height = param.shape[0] // parts
        rows = []
        for part in range(parts):
            begin = max(part * height, firsts[0])
            end = min((part + 1) * height, firsts[0] + local.shape[0])
            if begin < end:
                of_rank = slice(begin - firsts[0], end - firsts[0])
                rows.append((part, of_rank, slice(begin - part * height, end - part * height)))
        return cls(param, parts, tuple(rows), slice(firsts[1], firsts[1] + local.shape[1]))

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """X F [k, parts, m, r] of whole matrices; x: this rank's part [k, ., .]; factor [k, parts, n, r]."""
        pieces = [x[:, mine] @ factor[:, part, self.columns] for part, mine, _ in self.rows]
        own = torch.cat(pieces, dim=1) if pieces else x.new_zeros(len(x), 0, factor.shape[-1])
        whole = self._whole(own, {0: Shard(1), 1: Partial()}, (len(x), self.param.shape[0], factor.shape[-1]))
        return whole.unflatten(1, (self.parts, -1))

    def transposed_times(self, x: Tensor, factor: Tensor) -> Tensor:
        """X^T F [k, parts, n, r]; factor [k, parts, m, r]."""
        own = x.new_zeros(len(x), self.parts, x.shape[2], factor.shape[-1])
        for part, mine, rows in self.rows:
            own[:, part] = x[:, mine].mT @ factor[:, part, rows]
        shape = (len(x), self.parts, self.param.shape[1], factor.shape[-1])
        return self._whole(own, {0: Partial(), 1: Shard(2)}, shape)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """This rank's part of L R^T; left [k, parts, m, r], right [k, parts, n, r]."""
        pieces = [left[:, part, rows] @ right[:, part, self.columns].mT for part, _, rows in self.rows]
        return (
            torch.cat(pieces, dim=1) if pieces else left.new_zeros(len(left), *local_tensor(self.param).shape)
        )

    def _whole(self, own: Tensor, placements: dict[int, Placement], shape: tuple[int, ...]) -> Tensor:
        """placements: of the product, by the dim of the weight that a mesh axis cuts."""
        of_axes = [placements.get(_dim(placement), Replicate()) for placement in self.param.placements]
        return from_parts(own.contiguous(), self.param.device_mesh, of_axes, shape).full_tensor()


def _dim(placement: Placement) -> int:
    dim = sharded_dim(placement)
    return -1 if dim is None else dim


def exchange_factors(rule: Dion, weights: Sequence[Entry], h: Tensor, record: Record | None) -> None:
    """U of Dion, after A has run on the shards; weights of one shape, for which `Cut.possible`."""
    items = [weight.item() for weight in weights]
    cut = Cut.of(weights[0].param, items[0].parts)
    b = torch.stack([local_tensor(weight.momentum).float() for weight in weights])
    old_q = torch.stack([item.auxiliary[0] for item in items])
    q = old_q.view(len(b), cut.parts, *old_q.shape[-2:])
    assert items[0].matrix is not None
    rows, columns = items[0].matrix
    wide = columns > rows
    y = cut.transposed_times(b, q) if wide else cut.times(b, q)
    p = orthonormal(y)
    r = cut.times(b, p) if wide else cut.transposed_times(b, p)
    if record is not None:
        record("factors", 4 * (y.numel() + r.numel()))
    new_q, good = rule.settle(r, q)
    p = torch.where(good, p, 0.0)  # no step, and nothing that leaves the momentum
    if rule.u_writes_state:
        kept = torch.where(good, r, 0.0)
        taken = cut.outer(kept, p) if wide else cut.outer(p, kept)
        left = select(h, b - h[6] * taken, b)
        torch._foreach_copy_([local_tensor(w.momentum) for w in weights], list(left))  # pyright: ignore[reportPrivateImportUsage]
    update = (cut.outer(new_q, p) if wide else cut.outer(p, new_q)) * rule.scale(rows, columns)
    for item, one in zip(items, update):
        item.weight.copy_(rule.move(item.weight.float(), one, h))
    kept_q = select(h, new_q, q).view_as(old_q)
    torch._foreach_copy_([item.auxiliary[0] for item in items], list(kept_q))  # pyright: ignore[reportPrivateImportUsage]
    write_copies(items)


def exchange_row_norms(rule: MatrixRule, weights: Sequence[Entry], h: Tensor, record: Record | None) -> None:
    """U of RMNP where rows are cut; weights of one shape."""
    items = [weight.item() for weight in weights]
    param = weights[0].param
    assert isinstance(param, DTensor)
    gradients = None
    if rule.u_reads_gradient:
        gradients = torch.stack([item.gradient_or_zeros().float() for item in items])
    m = torch.stack([local_tensor(weight.momentum).float() for weight in weights])
    x = rule.looked_at(m, h, gradients)
    squares = x.square().sum(dim=-1, keepdim=True)
    if record is not None:
        record("row norms", 4 * squares.numel())
    over = [Partial() if sharded_dim(p) == param.dim() - 1 else Replicate() for p in param.placements]
    norm = DTensor.from_local(squares, param.device_mesh, over, run_check=False).full_tensor().sqrt()
    assert items[0].matrix is not None
    update = torch.where(norm > 0, x / norm, 0.0) * rule.scale(*items[0].matrix)
    for item, one in zip(items, update):
        item.weight.copy_(rule.move(item.weight.float(), one, h))
    write_copies(items)
