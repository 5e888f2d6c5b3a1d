"""Dion (Ahn et al. 2025): low-rank orthonormalised updates by one warm power iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from titanforge.optim.accounting import dion_rank
from titanforge.optim.batches import BATCH_BYTES, Batch
from titanforge.optim.low_rank_in_place import low_rank_update
from titanforge.optim.matrix import MatrixRule, unit_columns
from titanforge.optim.matrix_options import MatrixOptions
from titanforge.optim.orthonormal import orthonormal
from titanforge.optim.rule import AuxiliarySlot, State


class Dion(MatrixRule):
    """B = M + G; P = orth(B Q); R = B^T P; M = B - (1 - mu) P R^T; Q = colnorm(R); O = P Q^T.

    With error feedback A is M <- M + G, and U, which writes M, does the rest; without it (CurvaDion, section
    2.1) A is M <- mu M + G and M stays. The rank is r = max(1, floor(rho min(m, n))); a matrix that is wider
    than tall is taken transposed, so that Q has r min(m, n) entries. A zero column of R leaves Q's column as
    it was; a matrix whose factorisation is not finite makes no step and keeps M and Q.

    Its own scale is sqrt(m / n); `rank_corrected` is tau sqrt(m n / r) (Dobb paper, appendix E.1).
    """

    name = "dion"
    # Its launches do little each: fewer of them, at up to 8 bytes an element of workspace.
    batch_bytes = 2 * BATCH_BYTES

    def __init__(self, options: MatrixOptions | None = None, nesterov: bool = False) -> None:
        super().__init__(options)
        if nesterov:
            raise ValueError("optimizer.nesterov = true has no effect on Dion; set it to false")
        self.u_writes_state = self.options.dion.error_feedback
        self.hyper_names = (*self.hyper_names, "one_minus_momentum")

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        momentum = options["momentum"]
        return (1.0 if self.u_writes_state else momentum, 1.0, 1.0 - momentum)

    def rank(self, rows: int, columns: int) -> int:
        """r of an m x n matrix."""
        return dion_rank(rows, columns, self.options.dion.rank_fraction)

    def auxiliary_slots(self, shape: torch.Size, parts: int = 1) -> tuple[AuxiliarySlot, ...]:
        leading = shape[:-2] if parts == 1 else torch.Size((parts,))
        rows, columns = shape[-2] // parts, shape[-1]
        follows = tuple((dim, dim) for dim in range(len(shape) - 2))
        whole = torch.Size((*leading, min(rows, columns), self.rank(rows, columns)))
        return (AuxiliarySlot("q", whole, follows=follows),)

    def new_auxiliary(self, shape: torch.Size, device: torch.device, seed: int = 0, parts: int = 1) -> State:
        """Q with unit columns, drawn on the CPU from the seed alone."""
        (slot,) = self.auxiliary_slots(shape, parts)
        if device.type == "meta":
            return (torch.empty(slot.shape, device=device),)
        generator = torch.Generator().manual_seed(seed)
        return (unit_columns(torch.randn(slot.shape, generator=generator)).to(device),)

    def direction(self, m: Tensor, auxiliary: State, h: Tensor) -> tuple[Tensor, Tensor, State]:
        p = orthonormal(self.sketch(m, auxiliary))
        return self.of_factors(m, auxiliary, h, p, self.projection(m, p))

    def sketch(self, m: Tensor, auxiliary: State) -> Tensor:
        """B Q [*, long, r]: linear in the momentum, so its mean over replicas is that of their mean."""
        return _tall(m) @ auxiliary[0]

    def projection(self, m: Tensor, p: Tensor) -> Tensor:
        """R = B^T P [*, short, r]; linear in the momentum."""
        return _tall(m).mT @ p

    def of_factors(
        self, m: Tensor, auxiliary: State, h: Tensor, p: Tensor, r: Tensor
    ) -> tuple[Tensor, Tensor, State]:
        """What `direction` returns, from P and R: those of M, or of the mean of all replicas' M."""
        (q,) = auxiliary
        wide, b = m.shape[-1] > m.shape[-2], _tall(m)
        new_q, good = self.settle(r, q)
        update = torch.where(good, p @ new_q.mT, 0.0)
        left = torch.where(good, b - h[6] * (p @ r.mT), b) if self.u_writes_state else b
        return (update.mT, left.mT, (new_q,)) if wide else (update, left, (new_q,))

    @staticmethod
    def settle(r: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """The new Q of R [*, short, r], and bool [*, 1, 1]: whether the matrix makes a step."""
        norm = torch.linalg.vector_norm(r, dim=-2, keepdim=True)
        total = norm.sum(dim=-1, keepdim=True)  # not finite where anything is not
        good = (total > 0) & (total < torch.inf)
        return torch.where(good & (norm > 0), r / norm, q), good

    def update_in_place(self, batch: Batch, h: Tensor) -> bool:
        rows, columns = batch[0].weight.shape[-2] // batch[0].parts, batch[0].weight.shape[-1]
        return low_rank_update(self, batch, h, self.scale(rows, columns))

    def scale(self, rows: int, columns: int) -> float:
        if self.options.update_scale == "rank_corrected":
            return self.options.tau * math.sqrt(rows * columns / self.rank(rows, columns))
        return super().scale(rows, columns)

    def own_scale(self, rows: int, columns: int) -> float:
        return math.sqrt(rows / max(columns, 1))


def _tall(m: Tensor) -> Tensor:
    return m.mT if m.shape[-1] > m.shape[-2] else m
