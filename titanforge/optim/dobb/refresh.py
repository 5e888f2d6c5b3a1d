"""Refreshing block bases (Dobb, algorithms 2 and 4), batched over blocks of one width."""

from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels.cholesky_qr import cholesky_qr_refresh
from titanforge.optim.dobb.stacks import STACK_BYTES
from titanforge.optim.matrix_options import DobbOptions
from titanforge.optim.orthonormal import orthonormal


def refresh_bases(
    statistic: Tensor, basis: Tensor, options: DobbOptions, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 on blocks [N, w, w] that have a basis: (C + eps I) U orthonormalised, k times. fp32
    arithmetic whatever the storage. largest: max_i sum_j |C_ij| of each block, if it is known.

    Returns the new bases as stored (a block whose factorisation failed keeps its old one), and the number of
    those that failed, int64 scalar on the device. Nothing waits for the device.
    """
    c, failed = statistic.float(), torch.zeros((), dtype=torch.int64, device=basis.device)
    if options.iterations == 0:
        return eigenbases(statistic, basis, options)
    for _ in range(options.iterations):
        if options.qr == "cholesky":
            basis, bad = cholesky_qr_refresh(c, basis, options.relative_shift, largest=largest)
        else:
            basis, bad = _householder(c, basis, options.shift)
        failed = failed + bad.sum()
    return basis, failed


def eigenbases(statistic: Tensor, basis: Tensor, options: DobbOptions) -> tuple[Tensor, Tensor]:
    """The eigenvectors of C + eps I: the first basis of a block. Arguments and results of `refresh_bases`.

    The largest eigenvalue's first: the order that orthogonal iterations keep. From the opposite one, which
    they turn round over many refreshes, bases in between are mixtures of eigenvectors.
    """
    c = statistic.float()
    # A library that meets NaN may raise or not return: such blocks decompose the identity instead.
    good = torch.isfinite(c).all(dim=(-2, -1), keepdim=True)
    identity = torch.eye(c.shape[-1], device=c.device)
    vectors = torch.linalg.eigh(torch.where(good, c, identity) + options.shift * identity).eigenvectors
    return torch.where(good, vectors.flip(-1).to(basis.dtype), basis), (~good).sum()


def _householder(c: Tensor, basis: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    u = basis.float()
    y = c @ u + shift * u
    q = torch.linalg.qr(y).Q if y.device.type == "cpu" else orthonormal_stack(y)
    good = torch.isfinite(q).all(dim=(-2, -1), keepdim=True)
    return torch.where(good, q.to(basis.dtype), basis), ~good[:, 0, 0]


def orthonormal_stack(y: Tensor, most: int = STACK_BYTES) -> Tensor:
    """Q of the QR factorisation of each fp32 [N, w, w], as Householder's, but for the signs of columns.

    The signs are of no effect on an update. Libraries drive Householder QR from the host, block by block, and
    it waits for the device; Cholesky QR in float64 is batched, and its Gram matrix holds what fp32 columns
    differ by. most: bytes of a float64 stack, of which a few are there at a time.
    """
    size = max(1, most // (8 * y[0].numel()))
    return torch.cat([orthonormal(part) for part in y.split(size)])
