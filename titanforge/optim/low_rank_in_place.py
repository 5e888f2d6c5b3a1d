"""U of Dion on a GPU, of whole weights: batched products of bf16 planes (`plane_products`), and kernels that
write weights and momenta in place.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from titanforge.kernels.codecs import decode
from titanforge.optim import in_place
from titanforge.optim.batches import Batch
from titanforge.optim.orthonormal import orthonormal
from titanforge.optim.plane_products import Targets, left_planes, planes, project, sketch, split, write_back
from titanforge.optim.state_stacks import one_stack


class LowRankRule(Protocol):
    """What is needed of Dion."""

    u_writes_state: bool

    @staticmethod
    def settle(r: Tensor, q: Tensor) -> tuple[Tensor, Tensor]: ...


def low_rank_update(rule: LowRankRule, batch: Batch, h: Tensor, scale: float) -> bool:
    """P = orth(B Q), R = B^T P, M <- B - h[6] P R^T (with error feedback), Q <- colnorm(R),
    W <- (1 - lr wd) W - lr s P Q^T.

    False, and nothing done, where the tensors are not plain, or the momentum that it is to write is not.
    """
    if not (in_place.takes(batch) and batch.once("feeds back", lambda: _feeds_back(batch, rule))):
        return False
    shape = batch[0].weight.shape
    rows, columns = shape[-2] // batch[0].parts, shape[-1]
    wide = columns > rows
    targets = batch.once("targets", lambda: _targets(batch, rows, columns))
    b = [targets.stack] if targets.stack is not None else _momenta(batch, rows, columns)
    q = batch.once("q", lambda: one_stack([item.auxiliary[0] for item in batch]))
    in_one = q is not None
    if q is None:
        q = torch.stack([item.auxiliary[0] for item in batch])
    q = q.view(-1, *q.shape[-2:])
    rank = q.shape[-1]
    p = left_planes(orthonormal(sketch(b, planes(q, "hl"), rank, wide)), wide)
    r = project(b, p, rank, wide)
    del b
    new_q, good = rule.settle(r, q)
    bad = ~good
    p.masked_fill_(bad, 0.0)  # no step, and nothing that leaves the momentum
    kept = r.masked_fill_(bad, 0.0) if rule.u_writes_state else None
    write_back(targets, p, kept, new_q, h, scale, wide)
    torch.where(h[0] != 0, new_q, q, out=q)
    if not in_one:
        auxiliary = [item.auxiliary[0] for item in batch]
        torch._foreach_copy_(auxiliary, list(q.view(len(batch), *auxiliary[0].shape).unbind(0)))  # pyright: ignore[reportPrivateImportUsage]
    return True


def _targets(batch: Batch, rows: int, columns: int) -> Targets:
    momenta = [item.states[0].values for item in batch]
    stack = None
    if momenta[0].dtype == torch.bfloat16 and all(item.states[0].codec.kind == "plain" for item in batch):
        stack = one_stack(momenta)
    return Targets(
        [item.weight for item in batch],
        [item.copy for item in batch],
        momenta,
        None if stack is None else stack.view(-1, rows, columns),
    )


def _feeds_back(batch: Batch, rule: LowRankRule) -> bool:
    states = [item.states[0] for item in batch]
    return not rule.u_writes_state or all(
        state.codec.kind == "plain"
        and not state.codec.stochastic
        and state.values.is_contiguous()
        and state.values.dtype == states[0].values.dtype
        for state in states
    )


def _momenta(batch: Batch, rows: int, columns: int) -> list[Tensor]:
    """bf16 planes [matrices, rows, columns] whose sum is the momenta, high first."""
    if all(item.states[0].values.dtype == torch.bfloat16 for item in batch):
        whole = [in_place.stacked(batch)]
    else:
        whole = split(torch.stack([decode(item.states[0]).float() for item in batch]))
    return [plane.view(-1, rows, columns) for plane in whole]
