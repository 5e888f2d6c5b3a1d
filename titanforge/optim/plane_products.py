"""Products of batches of bf16 matrices with thin factors, for Dion on a GPU: no fp32 copy of a matrix.

A thin factor F of fp32 goes into a product as two bf16 planes, high and low, side by side: one product on
the tensor cores, accumulated in fp32, then has F to 2^-16. A momentum that is stored in bf16 is exact as it
is; of one in fp32 there are two planes too.

Matrices are [k, rows, columns], whole or the same part of each. B is such a matrix, or its transpose where
it is wide, so that B Q is its long side by r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from titanforge.kernels._triton import runs_triton
from titanforge.kernels.apply_update import ApplyUpdates, reference_apply_updates

_ALIGNED = 8
"""Columns of a plane are padded to a multiple of this, which 16-byte accesses need."""
_FEEDBACK = 6
"""Where 1 - mu is among a step's numbers."""


def split(matrices: Tensor) -> list[Tensor]:
    """bf16 planes whose sum is the fp32 `matrices`, high first."""
    high = matrices.to(torch.bfloat16)
    return [high, torch.sub(matrices, high, out=torch.empty_like(high))]


def planes(factor: Tensor, pattern: str) -> Tensor:
    """bf16 [*, n, planes c] of an fp32 [*, n, r]: its high (h) and low (l) planes side by side, each padded
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


def left_planes(p: Tensor, wide: bool) -> Tensor:
    """Those of P: as `project` and `write_back` take them."""
    return planes(p, "hhl" if wide else "hlh")


def sketch(b: list[Tensor], q: Tensor, rank: int, wide: bool, out: Tensor | None = None) -> Tensor:
    """B Q, fp32 [k, long side, r].

    b: bf16 planes of the matrices. q: `planes(Q, "hl")`, Q of [k, short side, r]. out: takes the result, of
    these dims or with k as two.
    """
    return _times([x.mT for x in b] if wide else b, q, rank, out)


def project(b: list[Tensor], p: Tensor, rank: int, wide: bool, out: Tensor | None = None) -> Tensor:
    """R = B^T P, fp32 [k, short side, r]. p: `left_planes` of P. Else as `sketch`."""
    width = p.shape[-1] // 3
    beside = p[..., width:] if wide else p[..., : 2 * width]
    return _times(b if wide else [x.mT for x in b], beside, rank, out)


class Targets:
    """Weights and momenta of one shape that move along products of factors, in place: what their launches
    need is found once. All are [m, n]; they do not move.

    stack: the memory of the momenta as [k, rows, columns], the matrices that factors are of; bf16. None: they
    lie apart, or are stored in another way.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        copies: Sequence[Tensor | None],
        momenta: Sequence[Tensor],
        stack: Tensor | None = None,
    ) -> None:
        self.shape = (len(weights), *weights[0].shape)
        self.dtype = weights[0].dtype
        self._move = _in_place(weights, copies, 1, True)
        self._momenta, self.stack = momenta, stack
        self._feed_back: Callable[[Tensor, Tensor, float], None] | None = None

    def move(self, update: Tensor, h: Tensor, scale: float) -> None:
        """W <- (1 - lr wd) W - lr scale times the update."""
        self._move(update.view(self.shape), h, scale)

    def feed_back(self, left: Tensor, right: Tensor, h: Tensor) -> None:
        """M <- M - h[6] times the product of `left` [k, rows, c] and `right` [k, c, columns]; of a stack,
        whose one launch knows nothing of h, M <- M - their product.
        """
        if self.stack is not None:
            _subtract_product(self.stack, left, right)
            return
        if self._feed_back is None:  # a momentum that nobody writes may be stored in other ways
            self._feed_back = _in_place(self._momenta, [None] * len(self._momenta), _FEEDBACK, False)
        self._feed_back(_product(left, right).view(self.shape), h, 1.0)


def write_back(
    targets: Targets,
    p: Tensor,
    r: Tensor | None,
    new_q: Tensor,
    h: Tensor,
    scale: float,
    wide: bool,
) -> None:
    """M <- B - h[6] P R^T and W <- (1 - lr wd) W - lr scale P Q^T, of transposed products where wide.

    p: `left_planes` of P, 0 where a matrix makes no step. r: fp32, 0 there too; None where M stays. new_q:
    fp32.
    """
    width = p.shape[-1] // 3
    if r is not None:
        if targets.stack is not None:
            r = r * (h[_FEEDBACK] * (h[0] != 0))
        kept = planes(r, "hlh" if wide else "hhl")
        targets.feed_back(*((kept, p.mT) if wide else (p, kept.mT)), h)
        del kept
    if targets.dtype == torch.bfloat16:  # of the high planes alone, in bf16
        high, own = planes(new_q, "h"), p[..., :width]
        update = _product(high, own.mT, own.dtype) if wide else _product(own, high.mT, own.dtype)
    else:
        both = planes(new_q, "hlh" if wide else "hhl")
        update = _product(both, p.mT) if wide else _product(p, both.mT)
    targets.move(update, h, scale)


def _in_place(
    tensors: Sequence[Tensor], copies: Sequence[Tensor | None], rate: int, decay: bool
) -> Callable[[Tensor, Tensor, float], None]:
    """`apply_updates` of tensors that do not move. Kernels go over memory, plain torch over any strides."""
    all_of_them = [*tensors, *(copy for copy in copies if copy is not None)]
    if runs_triton(tensors[0]) and all(tensor.is_contiguous() for tensor in all_of_them):
        return ApplyUpdates(tensors, copies, rate, decay)
    return partial(_reference, tensors, copies, rate, decay)


def _reference(
    tensors: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    rate: int,
    decay: bool,
    update: Tensor,
    h: Tensor,
    scale: float,
) -> None:
    reference_apply_updates(tensors, copies, update, h, scale, rate, decay)


def _padded(rank: int) -> int:
    return -(-rank // _ALIGNED) * _ALIGNED


def _product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of bf16 matrices, accumulated in fp32."""
    if a.is_cuda:
        return torch.bmm(a, b) if dtype == a.dtype else torch.bmm(a, b, out_dtype=dtype)
    return (a.float() @ b.float()).to(dtype)


def _subtract_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target <- target - a b, of bf16, accumulated in fp32. A product of zeros leaves every bit: -0 - (+0) is
    -0. Of cuBLAS's kernels some (nvjet's "badd", seen at small sizes on an H200) round the product to bf16
    before they subtract it; the others, and CPUs, round once.
    """
    if a.is_cuda:
        target.baddbmm_(a, b, alpha=-1)
    else:
        target.copy_(target.float() - a.float() @ b.float())


def _times(b: list[Tensor], beside: Tensor, rank: int, out: Tensor | None = None) -> Tensor:
    """B F, fp32 [k, m, r]. b: planes of B [k, m, n]. beside: `planes(F, "hl")` of F [k, n, r]."""
    width = beside.shape[-1] // 2
    both = _product(b[0], beside)
    high, low = both[..., :rank], both[..., width : width + rank]
    if out is None:
        total = high + low
    else:
        leading = out.shape[:-2]
        total = torch.add(high.unflatten(0, leading), low.unflatten(0, leading), out=out)
    for plane in b[1:]:
        rest = _product(plane, beside[..., :width])[..., :rank]
        total += rest.unflatten(0, total.shape[:-2])
    return total
