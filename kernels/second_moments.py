"""From sums of outer products to second moments in one pass: their mean enters the decayed sum (Dobb)."""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels._triton import (
    INTERPRET,
    LAUNCH_OPTIONS,
    cdiv,
    jit,
    next_power_of_2,
    runs_triton,
    tl,
)
from titanforge.kernels.codec_arithmetic import INTERPRETED, to_bf16


@jit(unspecialized=("decay",))
def take_sums_kernel(
    sums_ptr, count_ptr, factor_ptr, old_ptr, largest_ptr, decay, w: tl.constexpr,
    FACTOR: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: N, parts of a block's rows. largest: int32, the bits of the largest sum of a row so far."""
    batch, rows = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    count = tl.load(count_ptr + batch)
    seen = count > 0
    divisor, kept = tl.maximum(count, 1.0), tl.where(seen, decay, 1.0)
    if FACTOR:
        factor = tl.load(factor_ptr + batch)
    norms = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, w, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        inside = (rows < w)[:, None] & (columns < w)[None, :]
        places = batch * w * w + rows[:, None] * w + columns[None, :]
        total = tl.load(sums_ptr + places, inside, other=0.0)
        old = tl.load(old_ptr + places, inside, other=0.0)
        if INTERPRETED:
            mean = total / divisor
        else:
            mean = tl.div_rn(total, tl.zeros_like(total) + divisor)
        if FACTOR:
            mean *= factor
        new = tl.where(seen, mean, 0.0) + kept * old.to(tl.float32)
        if old_ptr.dtype.element_ty == tl.bfloat16:
            new = to_bf16(new).to(tl.float32)  # as it will be stored
        tl.store(sums_ptr + places, new, inside)
        norms += tl.sum(tl.abs(new), axis=1)
    # Without their sign the bits of numbers are in the numbers' order, and those of a NaN above all.
    bits = norms.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(largest_ptr + batch, tl.max(bits, axis=0))


def largest_sums(statistic: Tensor) -> Tensor:
    """max_i sum_j |C_ij| of each block of [N, w, w], fp32 [N]; not finite where any value is not."""
    return torch.linalg.vector_norm(statistic, ord=1, dim=-1, dtype=torch.float32).amax(dim=-1)


def take_sums(
    sums: Tensor, counts: Tensor, statistic: Tensor, decay: float, factor: Tensor | None = None
) -> Tensor:
    """In place: sums <- factor sums / counts + decay C, and C where counts are 0, rounded as C is stored.

    sums: fp32 [N, w, w], contiguous. counts, factor: fp32 [N]; factor None for 1. statistic: C, [N, w, w],
    fp32 or bf16, read only. Returns the `largest_sums` of the result.
    """
    if not runs_triton(sums):
        return reference_take_sums(sums, counts, statistic, decay, factor)
    count, w = len(sums), sums.shape[-1]
    largest = torch.zeros(count, dtype=torch.int32, device=sums.device)
    rows, width = (16, 16) if INTERPRET else (16, min(512, max(16, next_power_of_2(w))))
    take_sums_kernel[(count, cdiv(w, rows))](
        sums, counts, counts if factor is None else factor, statistic, largest, decay, w,
        FACTOR=factor is not None, ROWS=rows, WIDTH=width, num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return largest.view(torch.float32)


def reference_take_sums(
    sums: Tensor, counts: Tensor, statistic: Tensor, decay: float, factor: Tensor | None = None
) -> Tensor:
    """The same in plain torch."""
    sums.div_(counts.clamp_min(1.0)[:, None, None])
    if factor is not None:
        sums.mul_(factor[:, None, None])
    seen = counts > 0
    sums.copy_(torch.where(seen[:, None, None], sums, 0.0))
    sums.addcmul_(statistic.float(), torch.where(seen, decay, 1.0)[:, None, None])
    sums.copy_(sums.to(statistic.dtype))
    return largest_sums(sums)
