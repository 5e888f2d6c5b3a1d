"""Orthonormalising (C + eps I) U by two passes of Cholesky QR, batched over blocks (Dobb, algorithm 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels._triton import INTERPRET, LAUNCH_OPTIONS, cdiv, runs_triton
from titanforge.kernels.cholesky_qr_kernel import (
    factor_kernel,
    gram_kernel,
    scale_column_kernel,
    solve_kernel,
    update_column_kernel,
)

TILE = 16 if INTERPRET else 32
# Three TF32 products for an fp32 one: Cholesky QR squares the condition number, plain TF32 would not do.
PRECISION = "ieee" if INTERPRET else "tf32x3"


def cholesky_qr_refresh(statistic: Tensor, basis: Tensor, relative_shift: float) -> tuple[Tensor, Tensor]:
    """One orthogonal iteration: U <- CholeskyQR((C + eps I) U), eps = omega max_i sum_j |C_ij|, per block.

    statistic: fp32 [N, w, w], symmetric and positive semidefinite. basis: [N, w, w], fp32 or bf16; the result
    has its dtype. relative_shift: omega; the condition number of what is factorised stays below (1 + omega) /
    omega for an orthonormal U.
    Returns the bases, and bool [N]: a block that failed (not finite, not positive definite) keeps its basis.
    The host does not wait for the device.
    """
    factorise = _triton_pass if runs_triton(statistic) else _reference_pass
    return _refresh(statistic, basis, relative_shift, factorise)


def reference_refresh(statistic: Tensor, basis: Tensor, relative_shift: float) -> tuple[Tensor, Tensor]:
    """The same through torch.linalg, on any device."""
    return _refresh(statistic, basis, relative_shift, _reference_pass)


def _refresh(statistic: Tensor, basis: Tensor, relative_shift: float, factorise) -> tuple[Tensor, Tensor]:
    u = basis.float()
    largest = statistic.abs().sum(dim=-1).amax(dim=-1)[:, None, None]
    # Scale does not matter to Q; without this the Gram matrix of a tiny statistic would underflow.
    q = torch.where(largest > 0, (statistic @ u) / largest + relative_shift * u, 0.0)
    failed = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    for _ in range(2):
        q = factorise(q, failed)
    bad = (failed != 0) | ~torch.isfinite(q).all(dim=-1).all(dim=-1)
    return torch.where(bad[:, None, None], basis, q.to(basis.dtype)), bad


def _reference_pass(q: Tensor, failed: Tensor) -> Tensor:
    lower, info = torch.linalg.cholesky_ex(q.mT @ q)
    failed |= (info != 0).to(failed.dtype)
    return torch.linalg.solve_triangular(lower.mT, q, upper=True, left=False)


def _triton_pass(q: Tensor, failed: Tensor) -> Tensor:
    """q R^-1, R^T R = q^T q, fp32 [N, w, w]; in place if q is contiguous. failed: int32 [N], set to 1."""
    q = q.contiguous()
    count, width = q.shape[0], q.shape[-1]
    panels = cdiv(width, TILE)
    gram = torch.empty_like(q)
    inverse = torch.empty(count, panels, TILE, TILE, device=q.device)
    constants = {"TILE": TILE, "PRECISION": PRECISION, **LAUNCH_OPTIONS}
    gram_kernel[(count, panels, panels)](q, gram, width, **constants)
    for panel in range(panels):
        if panel:
            update_column_kernel[(count, panels - panel)](gram, width, panel, **constants)
        factor_kernel[(count,)](gram, inverse, failed, width, panel, panels, TILE=TILE, **LAUNCH_OPTIONS)
        if panel + 1 < panels:
            scale_column_kernel[(count, panels - panel - 1)](gram, inverse, width, panel, panels, **constants)
    solve_kernel[(count, panels)](q, gram, inverse, width, panels, **constants)
    return q
