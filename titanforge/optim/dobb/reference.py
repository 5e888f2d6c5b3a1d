"""Dobb line by line in float64 (algorithms 1 to 4): short, slow, and what the fast form is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cholesky_qr(q: Tensor) -> Tensor:
    """Algorithm 4."""
    for _ in range(2):
        r = torch.linalg.cholesky(q.T @ q).T
        q = q @ torch.linalg.inv(r)
    return q


def eigenvectors(
    c: Tensor, u: Tensor | None, shift: float, omega: float, qr: str, iterations: int = 1
) -> Tensor:
    """Algorithm 2; iterations: k, 0 for an exact eigendecomposition at every refresh."""
    identity = torch.eye(len(c), dtype=c.dtype)
    if u is None or iterations == 0:
        # Largest first, the order that iterations keep; the paper leaves it open.
        return torch.linalg.eigh(c + shift * identity).eigenvectors.flip(-1)
    basis: Tensor = u
    for _ in range(iterations):
        if qr == "householder":
            basis = torch.linalg.qr((c + shift * identity) @ basis).Q
        else:
            epsilon = omega * c.abs().sum(dim=1).max()
            basis = cholesky_qr((c + epsilon * identity) @ basis)
    return basis


class DobbReference:
    """Algorithm 3 for one m x n matrix, in the paper's symbols."""

    def __init__(
        self, shape: tuple[int, int], *, side: str = "A", norm: str = "linf", blocks: int = 1,
        period: int = 9, beta_c: float = 0.95, mu: float = 0.95, shift: float = 1e-6, omega: float = 1e-2,
        tau: float = 0.2, qr: str = "cholesky", iterations: int = 1, nesterov: bool = False,
        every_step: bool = False,
    ) -> None:  # fmt: skip
        """every_step: second moments enter at every step, of the gradient (appendix F.3)."""
        self.side, self.norm, self.period = side, norm, period
        self.beta_c, self.mu, self.shift, self.omega, self.tau = beta_c, mu, shift, omega, tau
        self.qr, self.iterations, self.nesterov = qr, iterations, nesterov
        self.m, self.n = shape
        axis = self.n if side == "A" else self.m
        self.sets = torch.arange(axis).view(blocks, -1)
        self.d = self.m if side == "A" else self.n
        self.momentum = torch.zeros(shape, dtype=torch.float64)
        self.c: list[Tensor | None] = [None] * blocks
        self.u: list[Tensor | None] = [None] * blocks
        self.t = 0
        self.every_step, self.skipped = every_step, False

    def skip_capture(self) -> None:
        """Nothing is captured on the coming step (an expert without tokens): statistics stay, and bases of
        those are refreshed.
        """
        self.skipped = True

    def step(self, w: Tensor, g: Tensor, captured: Tensor | None, lr: float, decay: float) -> Tensor:
        """captured: X [n, N] or D [m, N] of a refresh step (t mod T = 0). Returns the new weight."""
        refreshes = self.t % self.period == 0
        for b, s in enumerate(self.sets):
            c, u = self.c[b], self.u[b]
            if (refreshes or self.every_step) and not self.skipped:
                assert captured is not None
                second = captured[s] @ captured[s].T / captured.shape[1]
                c = second if c is None else self.beta_c * c + second
                self.c[b] = c
            if refreshes and c is not None:
                self.u[b] = eigenvectors(c, u, self.shift, self.omega, self.qr, self.iterations)
        self.skipped = False
        self.momentum = self.mu * self.momentum + g
        m = g + self.mu * self.momentum if self.nesterov else self.momentum
        o = torch.zeros_like(m)
        for s, u in zip(self.sets, self.u):
            if u is None:  # never captured
                u = torch.eye(len(s), dtype=torch.float64)
            v = m[:, s] if self.side == "A" else m[s].T
            z = v @ u
            if self.norm == "linf":
                z = torch.sign(z) / math.sqrt(self.d)
            else:
                length = z.norm(dim=0)
                z = torch.where(length > 0, z / length, 0.0)
            v = z @ u.T
            if self.side == "A":
                o[:, s] = v
            else:
                o[s] = v.T
        self.t += 1
        return (1 - lr * decay) * w - lr * self.tau * math.sqrt(max(self.m, self.n)) * o
