"""Orthonormal columns for batches of thin matrices; the host neither waits nor goes from one to the next."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from titanforge.kernels.inverse_factor import WIDEST, inverse_factors

_NOISE, _SHIFT = 1e-8, 1e-12
_DRAW_SEED = 0x5DEECE66D


def orthonormal(x: Tensor) -> Tensor:
    """Columns of [*, m, r], r <= m, made orthonormal: Q of the QR factorisation with a positive diagonal.

    Two passes of Cholesky QR, batched, in float64: the pivots of the Gram matrix of fp32 columns then stand
    above its rounding. (In fp32 it takes the Householder QR of a sketch before them, Dion's algorithm 2,
    which libraries drive from the host, matrix by matrix.) Columns have unit norm first. Noise of 1e-8, below
    what fp32 tells apart, stands in for what dependent columns lack; with the first pass shifted by 1e-12
    they end as noise that is made orthonormal, as in QR. The noise follows from the shape alone: the same on
    all ranks, in every step and after a resume. What fails (a value is not finite) comes out as NaN.

    On a GPU a second call of a shape is launches alone, so that a CUDA graph can hold it: the noise is there.
    """
    rows, rank = x.shape[-2:]
    leading, dtype = x.shape[:-2], x.dtype
    # In place from here on: of the thin matrices there is one copy and the next.
    wide = x.reshape(-1, rows, rank).to(torch.float64, copy=True)
    norm = torch.linalg.vector_norm(wide, dim=-2, keepdim=True)
    none = (norm == 0).double()
    wide.div_(norm + none).addcmul_(none.clamp(min=_NOISE), _noise(rows, rank, x.device))
    identity = _identity(rank, x.device)
    gram = torch.bmm(wide.mT, wide)
    gram.diagonal(dim1=-2, dim2=-1).add_(_SHIFT)
    # A small triangle's inverse and one product: a solve with m right-hand sides is slow on a GPU.
    inverse, failed = inverse_factor(gram, identity)
    wide = torch.bmm(wide, inverse.mT)
    inverse, worse = inverse_factor(torch.bmm(wide.mT, wide), identity)
    inverse.masked_fill_(((failed + worse) != 0)[:, None, None], torch.nan)
    return torch.bmm(wide, inverse.mT).to(dtype).view(*leading, rows, rank)


def inverse_factor(gram: Tensor, identity: Tensor, leaf: int = WIDEST) -> tuple[Tensor, Tensor]:
    """L^-1 of gram = L L^T, both [N, r, r], and int32 [N], not 0 where gram is not positive definite.

    By halves: with L = [[A, 0], [B, C]] it is [[A^-1, 0], [-C^-1 B A^-1, C^-1]], so that nearly all of it is
    products, which a GPU takes side by side; the leaves are one launch each.
    identity: [r, r]. leaf: the widest.
    """
    rank = gram.shape[-1]
    if rank <= leaf:
        return inverse_factors(gram, identity[:rank, :rank])
    half = rank // 2
    first, bad = inverse_factor(gram[..., :half, :half], identity, leaf)
    below = gram[..., half:, :half] @ first.mT
    second, worse = inverse_factor(gram[..., half:, half:] - below @ below.mT, identity, leaf)
    inverse = torch.zeros_like(gram)
    inverse[..., :half, :half] = first
    inverse[..., half:, half:] = second
    inverse[..., half:, :half] = -(second @ (below @ first))
    return inverse, bad + worse


# Without a bound: a graph goes on reading what its capture was handed.
@functools.cache
def _noise(rows: int, columns: int, device: torch.device) -> Tensor:
    """Columns of about unit norm, float64."""
    generator = torch.Generator().manual_seed(_DRAW_SEED + rows)
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) / math.sqrt(rows)).to(device)


# Nor with one here.
@functools.cache
def _identity(size: int, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=torch.float64, device=device)


def noise_bytes(rows: int, columns: int) -> int:
    """What is kept from the first `orthonormal` of matrices of this shape on."""
    return 8 * rows * columns
