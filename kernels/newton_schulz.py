"""Newton-Schulz iterations X <- a X + (b A + c A A) X, A = X X^T, batched over matrices of one shape."""

from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels._triton import runs_triton
from titanforge.kernels.symmetric import symmetric_product
from titanforge.kernels.symmetric_config import choose_symmetric


def newton_schulz_iterations(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """[N, m, n] after `steps` iterations, in x's dtype; x is scratch afterwards.

    x: contiguous, spectral norms at most about 1. On a GPU in bf16 A and b A + c A A, both symmetric, are
    computed by half where that is faster. The shorter axis is that of A: X^T X for a tall X.
    Workspace: one x and two [N, s, s], s = min(m, n).
    """
    if x.dtype != torch.bfloat16 or not runs_triton(x):
        return reference_iterations(x, steps, coefficients)
    a, b, c = coefficients
    count, rows, columns = x.shape
    tall = rows > columns
    short, long = min(rows, columns), max(rows, columns)
    first = choose_symmetric(short, long, count, x.device)
    second = choose_symmetric(short, short, count, x.device)
    gram = torch.empty(count, short, short, dtype=x.dtype, device=x.device)
    polynomial, other = torch.empty_like(gram), torch.empty_like(x)
    for _ in range(steps):
        symmetric_product(x, gram, tall=tall, config=first)
        # a I + b A + c A A, so that what is left is one plain product.
        symmetric_product(gram, polynomial, alpha=c, add=gram, beta=b, diagonal=a, config=second)
        torch.bmm(*((x, polynomial) if tall else (polynomial, x)), out=other)
        x, other = other, x
    return x


def reference_iterations(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """The same through torch, on any device and in any float dtype."""
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
