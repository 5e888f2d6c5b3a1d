"""The update of Dobb (algorithm 3, lines 11 to 23); bases come from `refresh`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titanforge.optim.matrix import MatrixRule, unit_columns
from titanforge.optim.matrix_options import DobbOptions, MatrixOptions
from titanforge.optim.rule import AuxiliarySlot, State

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Dobb(MatrixRule):
    """O[:, S_b] = N(M[:, S_b] U_b) U_b^T over the blocks S_b of the input axis (side A), or the same of M^T
    over blocks of the output axis (side G). N is sign / sqrt(d), d = m for side A and n for side G (norm
    linf), or columns of unit norm (norm l2).

    U_b is an orthonormal basis that tracks the eigenvectors of block b of the second moment of the layer's
    inputs (A) or output gradients (G). Auxiliary states: `statistic`, C [B, w, w], and `basis`, U [B, w, w],
    w the blocks' width; U begins as the identity. Weights that are several matrices read one input: with side
    A these share C and U.
    """

    name = "dobb"
    u_reads_capture = True
    u_gathers = False

    def __init__(self, options: MatrixOptions | None = None, nesterov: bool = False) -> None:
        super().__init__(options, nesterov)
        if self.options.update_scale == "own":
            raise ValueError('optimizer.update_scale = "own": Dobb has none beside the shared one')

    @property
    def dobb(self) -> DobbOptions:
        return self.options.dobb

    def blocks_of(self, shape: torch.Size) -> tuple[int, int]:
        """Number and width of the blocks of an m x n matrix.

        Raises ValueError, naming the key, where they do not divide the axis.
        """
        axis, length = ("input", shape[-1]) if self.dobb.side == "A" else ("output", shape[-2])
        key, count = "blocks", self.dobb.blocks
        if self.dobb.block_width:
            key, count = "block_width", length // self.dobb.block_width
            if count * self.dobb.block_width != length:
                count = 0
        if count < 1 or length % count:
            raise ValueError(
                f"optimizer.dobb.{key} = {getattr(self.dobb, key)} does not divide the {axis} axis of a "
                f"weight, {shape[-2]} x {shape[-1]}: take a divisor of {length}"
            )
        return count, length // count

    def auxiliary_slots(self, shape: torch.Size) -> tuple[AuxiliarySlot, ...]:
        count, width = self.blocks_of(shape)
        shared = [1] * (len(shape) - 2) if self.dobb.side == "A" else shape[:-2]
        whole = torch.Size((*shared, count, width, width))
        return (
            AuxiliarySlot("statistic", whole, DTYPES[self.dobb.statistics_dtype]),
            AuxiliarySlot("basis", whole, DTYPES[self.dobb.basis_dtype]),
        )

    def new_auxiliary(self, shape: torch.Size, device: torch.device, seed: int = 0) -> State:
        statistic, basis = super().new_auxiliary(shape, device)
        if device.type != "meta":
            basis.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return statistic, basis

    def direction(self, m: Tensor, auxiliary: State, h: Tensor) -> tuple[Tensor, Tensor, State]:
        basis = auxiliary[1].to(m.dtype)
        value = m if self.dobb.side == "A" else m.mT
        count, width = basis.shape[-3], basis.shape[-1]
        blocks = value.unflatten(-1, (count, width)).transpose(-2, -3)  # [*, B, d, w]
        coefficients = blocks @ basis
        if self.dobb.norm == "linf":
            coefficients = torch.sign(coefficients) / math.sqrt(value.shape[-2])
        else:
            coefficients = unit_columns(coefficients)
        rebuilt = (coefficients @ basis.mT).transpose(-2, -3).flatten(-2)
        return (rebuilt if self.dobb.side == "A" else rebuilt.mT), m, auxiliary

    def own_scale(self, rows: int, columns: int) -> float:
        raise AssertionError("refused when it was built")
