"""Orthonormalising (C + eps I) U by two passes of Cholesky QR, batched over blocks (Dobb, algorithm 4)."""

from __future__ import annotations

import torch
from torch import Tensor


def cholesky_qr_refresh(statistic: Tensor, basis: Tensor, relative_shift: float) -> tuple[Tensor, Tensor]:
    """One orthogonal iteration: U <- CholeskyQR((C + eps I) U), eps = omega max_i sum_j |C_ij|, per block.

    statistic: fp32 [N, w, w], symmetric and positive semidefinite. basis: [N, w, w], fp32 or bf16; the result
    has its dtype. relative_shift: omega; the condition number of what is factorised stays below (1 + omega) /
    omega for an orthonormal U.
    Returns the bases, and bool [N]: a block that failed (not finite, not positive definite) keeps its basis.
    The host does not wait for the device.
    """
    return reference_refresh(statistic, basis, relative_shift)


def reference_refresh(statistic: Tensor, basis: Tensor, relative_shift: float) -> tuple[Tensor, Tensor]:
    """The same through torch.linalg."""
    u = basis.float()
    epsilon = relative_shift * statistic.abs().sum(dim=-1).amax(dim=-1)
    q = statistic @ u + epsilon[:, None, None] * u
    # Scale does not matter to Q; without it the Gram matrix of a tiny statistic would underflow.
    scale = epsilon[:, None, None] / relative_shift
    q = torch.where(scale > 0, q / scale, 0.0)
    failed = torch.zeros(len(q), dtype=torch.bool, device=q.device)
    for _ in range(2):
        lower, info = torch.linalg.cholesky_ex(q.mT @ q)
        failed |= info != 0
        q = torch.linalg.solve_triangular(lower.mT, q, upper=True, left=False)
    failed |= ~torch.isfinite(q).all(dim=-1).all(dim=-1)
    return torch.where(failed[:, None, None], basis, q.to(basis.dtype)), failed
