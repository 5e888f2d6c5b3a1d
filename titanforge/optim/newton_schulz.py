"""Orthogonalisation by Newton-Schulz iteration, batched over matrices of one shape."""

from __future__ import annotations

import torch
from torch import Tensor

from titanforge.optim.matrix_options import QUINTIC

_NORM_FLOOR = 1e-7


def newton_schulz(
    matrices: Tensor,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    coefficients: tuple[float, float, float] = QUINTIC,
) -> Tensor:
    """Approximately U V^T of each matrix's singular value decomposition.

    matrices: [*, m, n], any float dtype; a zero matrix gives zero, an empty one is returned as it is.
    dtype: what the products are computed in; default bfloat16 on an accelerator (as the method was published)
        and float32 on CPU, where bfloat16 products are slow.
    coefficients: a, b, c of X <- a X + (b A + c A A) X, A = X X^T.
    Returns fp32 [*, m, n].
    """
    if matrices.numel() == 0:
        return matrices.float()
    if dtype is None:
        dtype = torch.float32 if matrices.device.type == "cpu" else torch.bfloat16
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (x.float() / norm.clamp_min(_NORM_FLOOR)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).float()
