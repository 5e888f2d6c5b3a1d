"""L^-1 of gram = L L^T of many small matrices in float64, in one launch.

cuSOLVER's batched factorisation and cuBLAS's batched solve take a column or a block of columns a launch: the
host issues many for matrices that a multiprocessor has done in the time of a few.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels._triton import LAUNCH_OPTIONS, jit, next_power_of_2, runs_triton, tl
from titanforge.kernels.cholesky_factor_kernel import eliminate

WIDEST = 128
"""A whole matrix of this width fits into the registers of a multiprocessor, in float64."""


@jit
def inverse_factor_kernel(
    gram_ptr, out_ptr, failed_ptr, gram_stride, gram_row, SIZE: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """One matrix a program. gram: float64, strides of matrices and rows; out: [N, R, R]. Grid: N."""
    batch = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    rows, columns = index[:, None], index[None, :]
    inside = (rows < R) & (columns < R)
    a = tl.load(gram_ptr + batch * gram_stride + rows * gram_row + columns, mask=inside, other=0.0)
    inverse, bad = eliminate(a, SIZE, R)
    tl.store(out_ptr + batch * (R * R) + rows * R + columns, inverse, mask=inside)
    tl.store(failed_ptr + batch, bad)


def inverse_factors(gram: Tensor, identity: Tensor) -> tuple[Tensor, Tensor]:
    """(L^-1 [N, r, r], float64; int32 [N], not 0 where gram is not positive definite or not finite).

    gram: float64 [N, r, r], r up to `WIDEST`; its rows are contiguous each, matrices may be parts of larger
    ones. identity: float64 [r, r].
    """
    if not runs_triton(gram):
        return reference_inverse_factors(gram, identity)
    count, r = gram.shape[:2]
    if gram.stride(-1) != 1 or r > WIDEST or gram.dtype != torch.float64:
        raise ValueError(f"inverse_factors of {gram.dtype} {tuple(gram.shape)}, strides {gram.stride()}")
    out = gram.new_empty(count, r, r)
    failed = torch.empty(count, dtype=torch.int32, device=gram.device)
    size = max(16, next_power_of_2(r))
    if count:
        inverse_factor_kernel[(count,)](
            gram, out, failed, gram.stride(0), gram.stride(1), SIZE=size, R=r,
            num_warps=factor_warps(size), **LAUNCH_OPTIONS,
        )  # fmt: skip
    return out, failed


def factor_warps(size: int) -> int:
    """32 values a thread at the widest: the matrix and what a step makes of it stay in registers."""
    return max(1, min(16, size * size // 1024))


def reference_inverse_factors(gram: Tensor, identity: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    lower, bad = torch.linalg.cholesky_ex(gram)
    return torch.linalg.solve_triangular(lower, identity, upper=False), bad
