"""U of Dion on a GPU: products of bf16 matrices with thin factors, batched; no fp32 copy of a matrix.

A thin factor F of fp32 goes into a product as two bf16 planes, high and low, side by side: one product on
the tensor cores, accumulated in fp32, then has F to 2^-16. A momentum that is stored in bf16 is exact as it
is; of one in fp32 there are two planes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from titanforge.kernels._triton import runs_triton
from titanforge.kernels.apply_update import ApplyUpdates, reference_apply_updates
from titanforge.kernels.codecs import decode
from titanforge.optim import in_place
from titanforge.optim.batches import Batch
from titanforge.optim.orthonormal import orthonormal

_ALIGNED = 8
"""Columns of a plane are padded to a multiple of this, which 16-byte accesses need."""


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
    auxiliary = [item.auxiliary[0] for item in batch]
    q = torch.stack(auxiliary).view(-1, *auxiliary[0].shape[-2:])
    p = orthonormal(_times([x.mT for x in b] if wide else b, q))
    r = _times(b if wide else [x.mT for x in b], p)
    del b
    new_q, good = rule.settle(r, q)
    p = torch.where(good, p, 0.0)  # no step, and nothing that leaves the momentum
    if rule.u_writes_state:
        kept = torch.where(good, r, 0.0)
        feedback = h.clone()
        feedback[1:2] = h[6:7]
        feedback[2:3].zero_()
        momenta = [item.states[0].values for item in batch]
        taken = _outer(kept, p) if wide else _outer(p, kept)
        _apply(batch, "feed back", momenta, [None] * len(batch), taken.view(shape), feedback, 1.0)
        del taken
    coarse = batch[0].weight.dtype == torch.bfloat16
    update = _outer(new_q, p, coarse) if wide else _outer(p, new_q, coarse)
    weights, copies = [item.weight for item in batch], [item.copy for item in batch]
    _apply(batch, "apply", weights, copies, update.view(shape), h, scale)
    kept_q = torch.where(h[0] != 0, new_q, q).view(len(batch), *auxiliary[0].shape)
    torch._foreach_copy_(auxiliary, list(kept_q.unbind(0)))  # pyright: ignore[reportPrivateImportUsage]
    return True


def _apply(
    batch: Batch,
    key: str,
    targets: list[Tensor],
    copies: Sequence[Tensor | None],
    update: Tensor,
    h: Tensor,
    scale: float,
) -> None:
    if runs_triton(update):
        batch.once(key, lambda: ApplyUpdates(targets, copies))(update, h, scale)
    else:
        reference_apply_updates(targets, copies, update, h, scale)


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
    rank = factor.shape[-1]
    width = _padded(rank)
    high = factor.to(torch.bfloat16)
    parts = {"h": high, "l": factor - high if "l" in pattern else high}
    beside = factor.new_zeros(*factor.shape[:-1], len(pattern) * width, dtype=torch.bfloat16)
    for index, plane in enumerate(pattern):
        beside[..., index * width : index * width + rank] = parts[plane]
    return beside


def _padded(rank: int) -> int:
    return -(-rank // _ALIGNED) * _ALIGNED


def _product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of bf16 matrices, accumulated in fp32."""
    if a.is_cuda:
        return torch.bmm(a, b) if dtype == a.dtype else torch.bmm(a, b, out_dtype=dtype)
    return (a.float() @ b.float()).to(dtype)


def _times(planes: list[Tensor], factor: Tensor) -> Tensor:
    """B F, fp32 [k, m, r]. planes: of B [k, m, n]; factor: fp32 [k, n, r]."""
    rank = factor.shape[-1]
    beside = _planes(factor, "hl")
    width = _padded(rank)
    both = _product(planes[0], beside)
    total = both[..., :rank] + both[..., width : width + rank]
    for plane in planes[1:]:
        total += _product(plane, beside[..., :width])[..., :rank]
    return total


def _outer(left: Tensor, right: Tensor, coarse: bool = False) -> Tensor:
    """L R^T [k, m, n] of fp32 [k, m, r] and [k, n, r], in fp32; coarse: of the high planes alone, in bf16."""
    if coarse:
        return _product(_planes(left, "h"), _planes(right, "h").mT, torch.bfloat16)
    return _product(_planes(left, "hlh"), _planes(right, "hhl").mT)
