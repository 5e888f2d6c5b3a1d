"""U of Muon and Scion on shards: the matrices of a batch are dealt to the ranks that have parts of them.

Newton-Schulz is nearly all of U's time, and no two ranks take the same matrix. An all-to-all brings each rank
the whole momenta of the matrices that it owns, another one takes each rank its part of every O, and each rank
moves its own part of the weights. What travels is what a single device begins and ends with: momenta as they
are stored, rounded to bf16 where products are of bf16 (on a GPU); O in the dtype of the products. With
Nesterov G h[3] + h[4] M is formed on the shards, so that one tensor is sent and not two.

Of each m x n matrix a rank of N even shards hands mn/N to the first exchange, its part, and on average mn/N
to the second, the whole O of what it owns: 2 mn/N, of which (N - 1)/N leave the rank. Those are the bytes
that are recorded, as "momenta" and "updates". An all-gather of the momenta, the mn of the Dobb paper's Table
3, sends (N - 1)/N of mn.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed.tensor import DTensor, Shard

from titanforge.kernels._triton import runs_triton
from titanforge.kernels.apply_update import ApplyUpdates, reference_apply_updates
from titanforge.optim import in_place
from titanforge.optim.batches import Batch
from titanforge.optim.local_update import LocalWeight
from titanforge.optim.matrix import OrthogonalRule
from titanforge.optim.newton_schulz import newton_schulz, orthogonalized_

if TYPE_CHECKING:
    from titanforge.optim.entries import Entry

Record = Callable[[str, int], None]


def cut_axis(param: Tensor) -> int | None:
    """The axis of its mesh that cuts a matrix into contiguous parts, where only one does; else None.

    None too for an empty matrix, and for experts, whose leading dim may be cut as well.
    """
    if not isinstance(param, DTensor) or param.dim() != 2 or param.numel() == 0:
        return None
    mesh, placements = param.device_mesh, param.placements
    axes = [axis for axis, one in enumerate(placements) if mesh.size(axis) > 1 and not one.is_replicate()]
    return axes[0] if len(axes) == 1 and type(placements[axes[0]]) is Shard else None


class Dealt(Batch):
    """This rank's parts of weights of one shape and cut, in one order on all ranks, and who owns which.

    counts: matrices of each rank; rank 0 owns the first of the batch, and so on. first: the rank that gets
    one more than others where they are not many times the ranks.
    """

    def __init__(self, items: Sequence[LocalWeight], param: DTensor, first: int) -> None:
        super().__init__(items)
        axis = cut_axis(param)
        assert axis is not None
        placement, mesh = param.placements[axis], param.device_mesh
        assert isinstance(placement, Shard)
        self.shape, self.dim = param.shape, placement.dim
        self._group = mesh.get_group(axis)
        ranks, length = mesh.size(axis), param.shape[self.dim]
        chunk = -(-length // ranks)
        self._lengths = [max(0, min(chunk, length - rank * chunk)) for rank in range(ranks)]
        each, more = divmod(len(items), ranks)
        self.counts = [each + ((rank - first) % ranks < more) for rank in range(ranks)]
        self.own = self.counts[mesh.get_local_rank(axis)]
        # Elements that this rank exchanges with each: of its parts for owners, of its own matrices for parts.
        self.by_owner = [count * items[0].weight.numel() for count in self.counts]
        self.by_part = [self.own * (param.numel() // length) * extent for extent in self._lengths]

    def exchange(self, sent: Tensor, sizes: list[int], others: list[int]) -> tuple[Tensor, Work]:
        """Sends sizes[r] elements of `sent`, flat, to rank r, and takes others[r] from it. Returns them,
        complete for whoever has waited.
        """
        received = sent.new_empty(sum(others))
        work = dist.all_to_all_single(received, sent, others, sizes, group=self._group, async_op=True)
        assert work is not None
        return received, work

    def joined(self, received: Tensor) -> Tensor:
        """[own, m, n], contiguous, of their parts as they came, rank by rank."""
        parts = zip(received.split(self.by_part), self._lengths)
        return torch.cat([part.view(self._of(extent)) for part, extent in parts], dim=self.dim + 1)

    def parted(self, matrices: Tensor) -> Tensor:
        """The reverse: [own, m, n] as their parts one after the other, flat."""
        flat = torch.empty(matrices.numel(), dtype=matrices.dtype, device=matrices.device)
        for part, piece in zip(flat.split(self.by_part), matrices.split(self._lengths, dim=self.dim + 1)):
            part.view(piece.shape).copy_(piece)
        return flat

    def _of(self, extent: int) -> tuple[int, int, int]:
        rows, columns = self.shape
        return (self.own, extent, columns) if self.dim == 0 else (self.own, rows, extent)


class Dealings:
    """The batches of a list of weights, made anew only when one has moved."""

    def __init__(self) -> None:
        self._items: list[LocalWeight] = []
        self._batches: list[Dealt] = []
        self._left: list[Entry] = []

    def of(self, weights: Sequence[Entry], most: int) -> tuple[list[Dealt], list[Entry]]:
        """What is dealt, in batches, and what cannot be. weights: the same on all ranks, empty parts too.
        most: bytes of the matrices of one owner in a batch, as fp32.
        """
        items = [weight.current() for weight in weights]
        if len(items) != len(self._items) or not all(map(operator.is_, items, self._items)):
            self._items = items
            self._left = [weight for weight in weights if cut_axis(weight.param) is None]
            self._batches = list(_batches(weights, items, most))
        return self._batches, self._left

    def release(self) -> None:
        """Let go of the gradients."""
        for item in self._items:
            item.gradient = None


def _batches(weights: Sequence[Entry], items: Sequence[LocalWeight], most: int) -> Iterator[Dealt]:
    groups: dict[tuple, list[tuple[DTensor, LocalWeight]]] = defaultdict(list)
    for weight, item in zip(weights, items):
        param, dtype = weight.param, weight.momentum.dtype
        if cut_axis(param) is not None:
            assert isinstance(param, DTensor)
            key = (param.shape, item.parts, dtype, param.device_mesh, param.placements)
            groups[key].append((param, item))
    dealt = 0
    for group in groups.values():
        param = group[0][0]
        ranks = param.device_mesh.size(cut_axis(param))
        size = ranks * max(1, most // (4 * param.numel()))
        for start in range(0, len(group), size):
            members = [item for _, item in group[start : start + size]]
            yield Dealt(members, param, dealt % ranks)
            dealt += len(members)


def update_dealt(rule: OrthogonalRule, batches: Sequence[Dealt], h: Tensor, record: Record | None) -> None:
    """W <- (1 - lr wd) W - lr s O of all batches, after A has run on the shards. Call it on all ranks.

    While a batch is computed the momenta of the next and the updates of the one before travel.
    """
    stages = [_update(rule, batch, h, record) for batch in batches]
    for turn in range(len(stages) + 2):
        for stage in reversed(stages[max(0, turn - 2) : turn + 1]):
            next(stage, None)


def _update(rule: OrthogonalRule, batch: Dealt, h: Tensor, record: Record | None) -> Iterator[None]:
    """One batch; pauses where its momenta travel, and where its updates do."""
    sent = _looked_at(rule, batch, h)
    if record is not None:
        record("momenta", sent.nbytes)
    received, work = batch.exchange(sent.view(-1), batch.by_owner, batch.by_part)
    yield
    work.wait()
    del sent
    whole = batch.joined(received)
    del received  # here and below nothing stays that the next line does not need: batches are large
    whole = _orthogonal(rule, whole, batch[0].parts)
    updates = batch.parted(whole)
    del whole
    if record is not None:
        record("updates", updates.nbytes)
    moves, work = batch.exchange(updates, batch.by_part, batch.by_owner)
    yield
    work.wait()
    del updates
    (rows, columns), shape = batch.shape, batch[0].weight.shape
    if shape.numel():
        _move(batch, moves.view(len(batch), *shape), h, rule.scale(rows // batch[0].parts, columns))


def _looked_at(rule: OrthogonalRule, batch: Dealt, h: Tensor) -> Tensor:
    """[k, *local]: this rank's parts of what O is taken of, as they are sent."""
    momenta = [item.states[0].values for item in batch]
    first, nesterov = momenta[0], rule.u_reads_gradient
    dtype = torch.bfloat16 if runs_triton(first) else first.dtype
    stack = first.new_empty(len(batch), *first.shape, dtype=torch.float32 if nesterov else dtype)
    torch._foreach_copy_(list(stack.unbind(0)), momenta)  # pyright: ignore[reportPrivateImportUsage]
    if not nesterov:
        return stack
    stack.mul_(h[4])
    for row, item in zip(stack, batch):
        if item.gradient is not None:
            row.addcmul_(item.gradient, h[3])
    return stack.to(torch.bfloat16) if runs_triton(first) else stack


def _orthogonal(rule: OrthogonalRule, whole: Tensor, parts: int) -> Tensor:
    """O of [own, m, n], each of `parts` matrices; `whole` is scratch afterwards."""
    muon, (own, rows, columns) = rule.options.muon, whole.shape
    matrices = whole.view(own * parts, rows // parts, columns)
    if own == 0:
        return whole if runs_triton(whole) else whole.float()
    if runs_triton(whole):  # as `in_place.orthogonal_update`
        return orthogonalized_(matrices, muon.steps, muon.coefficients).reshape(whole.shape)
    return newton_schulz(matrices, muon.steps, coefficients=muon.coefficients).reshape(whole.shape)


def _move(batch: Dealt, updates: Tensor, h: Tensor, scale: float) -> None:
    """updates: [k, *local] of O. Weights, or fp32 masters and the weights that are copies of them."""

    def tensors() -> tuple[list[Tensor], list[Tensor | None]]:
        return [item.weight for item in batch], [item.copy for item in batch]

    if runs_triton(updates) and in_place.takes(batch):
        batch.once("apply", lambda: ApplyUpdates(*tensors()))(updates, h, scale)
    else:
        reference_apply_updates(*tensors(), updates, h, scale)
