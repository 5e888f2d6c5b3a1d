"""U of Dion on a GPU: products of bf16 matrices with thin factors, batched; no fp32 copy of a matrix.

A thin factor F of fp32 goes into a product as two bf16 planes, high and low, side by side: one product on
the tensor cores, accumulated in fp32, then has F to 2^-16. A momentum that is stored in bf16 is exact as it
is; of one in fp32 there are two planes too.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from titanforge.kernels._triton import runs_triton
from titanforge.kernels.apply_update import ApplyUpdates, reference_apply_updates
from titanforge.kernels.codecs import decode
from titanforge.optim import in_place
from titanforge.optim.batches import Batch
from titanforge.optim.orthonormal import orthonormal
from titanforge.optim.state_stacks import one_stack

_ALIGNED = 8
"""Columns of a plane are padded to a multiple of this, which 16-byte accesses need."""
_FEEDBACK = 6
"""Where 1 - mu is among a step's numbers."""


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
    shape = (len(batch), *batch[0].weight.shape)
    rows, columns = shape[-2] // batch[0].parts, shape[-1]
    wide = columns > rows
    b = _momenta(batch, rows, columns)
    q = batch.once("q", lambda: one_stack([item.auxiliary[0] for item in batch]))
    in_one = q is not None
    if q is None:
        q = torch.stack([item.auxiliary[0] for item in batch])
    q = q.view(-1, *q.shape[-2:])
    rank = q.shape[-1]
    p = _planes(orthonormal(_times([x.mT for x in b] if wide else b, q)), "hhl" if wide else "hlh")
    width = p.shape[-1] // 3
    r = _times_planes(b if wide else [x.mT for x in b], p[..., width:] if wide else p[..., : 2 * width], rank)
    del b
    new_q, good = rule.settle(r, q)
    bad = ~good
    p.masked_fill_(bad, 0.0)  # no step, and nothing that leaves the momentum
    if rule.u_writes_state:
        kept = _planes(r.masked_fill_(bad, 0.0), "hlh" if wide else "hhl")
        taken = _product(kept, p.mT) if wide else _product(p, kept.mT)
        _apply(batch, "feed back", taken.view(shape), h, 1.0)
        del taken, kept
    if batch[0].weight.dtype == torch.bfloat16:  # of the high planes alone, in bf16
        high, own = _planes(new_q, "h"), p[..., :width]
        update = _product(high, own.mT, own.dtype) if wide else _product(own, high.mT, own.dtype)
    else:
        both = _planes(new_q, "hlh" if wide else "hhl")
        update = _product(both, p.mT) if wide else _product(p, both.mT)
    _apply(batch, "apply", update.view(shape), h, scale)
    torch.where(h[0] != 0, new_q, q, out=q)
    if not in_one:
        auxiliary = [item.auxiliary[0] for item in batch]
        torch._foreach_copy_(auxiliary, list(q.view(len(batch), *auxiliary[0].shape).unbind(0)))  # pyright: ignore[reportPrivateImportUsage]
    return True


def _apply(batch: Batch, key: str, update: Tensor, h: Tensor, scale: float) -> None:
    """W moves along the update; or, to "feed back", M <- M - h[6] times it."""
    rate, decay = (_FEEDBACK, False) if key == "feed back" else (1, True)

    def tensors() -> tuple[list[Tensor], list[Tensor | None]]:
        if decay:
            return [item.weight for item in batch], [item.copy for item in batch]
        return [item.states[0].values for item in batch], [None] * len(batch)

    if runs_triton(update):
        batch.once(key, lambda: ApplyUpdates(*tensors(), rate, decay))(update, h, scale)
    else:
        reference_apply_updates(*tensors(), update, h, scale, rate, decay)


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
        planes = [in_place.stacked(batch)]
    else:
        whole = torch.stack([decode(item.states[0]).float() for item in batch])
        high = whole.to(torch.bfloat16)
        planes = [high, whole.sub_(high).to(torch.bfloat16)]
    return [plane.view(-1, rows, columns) for plane in planes]


def _planes(factor: Tensor, pattern: str) -> Tensor:
    """bf16 [k, n, planes c] of an fp32 [k, n, r]: its high (h) and low (l) planes side by side, each padded
    with zeros to c columns.
    """
    rank, many = factor.shape[-1], len(pattern)
    width = _padded(rank)
    shape = (*factor.shape[:-1], many, width)
    new = torch.empty if width == rank else torch.zeros
    beside = new(shape, dtype=torch.bfloat16, device=factor.device)
    filled, low = beside[..., :rank], pattern.find("l")
    high = filled[..., ::2, :] if low == 1 else filled[..., : low if low > 0 else many, :]
    high.copy_(factor.unsqueeze(-2))
    if low > 0:
        torch.sub(factor, filled[..., 0, :], out=filled[..., low, :])
    return beside.flatten(-2)


def _padded(rank: int) -> int:
    return -(-rank // _ALIGNED) * _ALIGNED


def _product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of bf16 matrices, accumulated in fp32."""
    if a.is_cuda:
        return torch.bmm(a, b) if dtype == a.dtype else torch.bmm(a, b, out_dtype=dtype)
    return (a.float() @ b.float()).to(dtype)


def _times(planes: list[Tensor], factor: Tensor) -> Tensor:
    """B F, fp32 [k, m, r]. planes: of B [k, m, n]; factor: fp32 [k, n, r]."""
    return _times_planes(planes, _planes(factor, "hl"), factor.shape[-1])


def _times_planes(planes: list[Tensor], beside: Tensor, rank: int) -> Tensor:
    """The same of an F that is in planes, high and low: bf16 [k, n, 2 c]."""
    width = beside.shape[-1] // 2
    both = _product(planes[0], beside)
    total = both[..., :rank] + both[..., width : width + rank]
    for plane in planes[1:]:
        total += _product(plane, beside[..., :width])[..., :rank]
    return total
