"""Refreshing block bases (Dobb, algorithms 2 and 4), batched over blocks of one width."""

from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels.cholesky_qr import cholesky_qr_refresh
from titanforge.optim.matrix_options import DobbOptions


def refresh_bases(statistic: Tensor, basis: Tensor, options: DobbOptions) -> tuple[Tensor, Tensor]:
    """Algorithm 2 on blocks [N, w, w] that have a basis: (C + eps I) U orthonormalised, k times. fp32
    arithmetic whatever the storage.

    Returns the new bases as stored (a block whose factorisation failed keeps its old one), and the number of
    those that failed, int64 scalar on the device. Nothing waits for the device.
    """
    c, failed = statistic.float(), torch.zeros((), dtype=torch.int64, device=basis.device)
    if options.iterations == 0:
        return eigenbases(statistic, basis, options)
    for _ in range(options.iterations):
        if options.qr == "cholesky":
            basis, bad = cholesky_qr_refresh(c, basis, options.relative_shift)
        else:
            basis, bad = _householder(c, basis, options.shift)
        failed = failed + bad.sum()
    return basis, failed


def eigenbases(statistic: Tensor, basis: Tensor, options: DobbOptions) -> tuple[Tensor, Tensor]:
    """The eigenvectors of C + eps I: the first basis of a block. Arguments and results of `refresh_bases`."""
    c = statistic.float()
    # A library that meets NaN may raise or not return: such blocks decompose the identity instead.
    good = torch.isfinite(c).all(dim=(-2, -1), keepdim=True)
    identity = torch.eye(c.shape[-1], device=c.device)
    vectors = torch.linalg.eigh(torch.where(good, c, identity) + options.shift * identity).eigenvectors
    return torch.where(good, vectors.to(basis.dtype), basis), (~good).sum()


def _householder(c: Tensor, basis: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    u = basis.float()
    q = torch.linalg.qr(c @ u + shift * u).Q
    good = torch.isfinite(q).all(dim=(-2, -1), keepdim=True)
    return torch.where(good, q.to(basis.dtype), basis), ~good[:, 0, 0]
