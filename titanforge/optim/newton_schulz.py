"""Orthogonalisation by Newton-Schulz iteration, batched over matrices of one shape."""

from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels.newton_schulz import newton_schulz_iterations
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
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (matrices.float() / norm.clamp_min(_NORM_FLOOR)).to(dtype)
    x = x.reshape(-1, *matrices.shape[-2:]).contiguous()
    return newton_schulz_iterations(x, steps, coefficients).view(matrices.shape).float()


def orthogonalized_(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """The same of a contiguous stack [N, m, n], in its dtype, no fp32 copy; x is scratch afterwards."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x.mul_(norm.clamp_min_(_NORM_FLOOR).reciprocal_())
    return newton_schulz_iterations(x, steps, coefficients)
