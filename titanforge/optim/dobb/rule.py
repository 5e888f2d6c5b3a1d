"""The update of Dobb (algorithm 3, lines 11 to 23); bases come from `refresh`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titanforge.optim import in_place
from titanforge.optim.batches import Batch
from titanforge.optim.matrix import MatrixRule, unit_columns
from titanforge.optim.matrix_options import DobbOptions, MatrixOptions
from titanforge.optim.rule import AuxiliarySlot, State

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Dobb(MatrixRule):
    """O[:, S_b] = N(M[:, S_b] U_b) U_b^T over the blocks S_b of the input axis (side A), or the same of M^T
    over blocks of the output axis (side G). N is sign / sqrt(d), d = m for side A and n for side G (norm
    linf), or columns of unit norm (norm l2).

    U_b is an orthonormal basis that tracks the eigenvectors of block b of the second moment of the layer's
    inputs (A) or output gradients (G). Auxiliary states: `statistic`, C, and `basis`, U, blocks [w, w] in the
    order of the axis that they cut, [B, w, w], w their width; U begins as the identity. With side A a weight
    of several matrices has [1, B, w, w], which these share, as they read one input ([parts, B, w, w] if
    statistics are of gradients), with side G [parts B, w, w]. Experts [E, m, n] have [E, B, w, w].
    """

    name = "dobb"
    u_reads_capture = True
    u_gathers = False

    def __init__(self, options: MatrixOptions | None = None, nesterov: bool = False) -> None:
        super().__init__(options, nesterov)
        self.whole_parts = self.dobb.side == "A"
        self.u_statistic_of_gradient = self.dobb.source == "gradient"
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

    def auxiliary_slots(self, shape: torch.Size, parts: int = 1) -> tuple[AuxiliarySlot, ...]:
        count, width = self.blocks_of(torch.Size((shape[-2] // parts, shape[-1])))
        axis = len(shape) - 1 if self.dobb.side == "A" else len(shape) - 2
        if len(shape) > 2:
            leading = (*shape[:-2], count)
            follows = (*((dim, dim) for dim in range(len(shape) - 2)), (axis, len(shape) - 2))
        elif self.dobb.side == "A" and parts > 1:
            leading, follows = (1 if self.dobb.source == "activation" else parts, count), ((axis, 1),)
        else:
            leading, follows = (parts * count,), ((axis, 0),)
        whole = torch.Size((*leading, width, width))
        return (
            AuxiliarySlot("statistic", whole, DTYPES[self.dobb.statistics_dtype], follows),
            AuxiliarySlot("basis", whole, DTYPES[self.dobb.basis_dtype], follows),
        )

    def new_auxiliary(self, shape: torch.Size, device: torch.device, seed: int = 0, parts: int = 1) -> State:
        statistic, basis = super().new_auxiliary(shape, device, parts=parts)
        if device.type != "meta":
            basis.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return statistic, basis

    def shard_dim(self, shape: torch.Size) -> int:
        """Experts go whole; matrices are cut along the axis of their blocks."""
        return 0 if len(shape) > 2 or self.dobb.side == "G" else 1

    def check_shards(
        self, name: str, shape: torch.Size, parts: int, dim: int | None, shards: int, same_input: bool = False
    ) -> None:
        size = " x ".join(map(str, shape))
        if same_input and dim == 0 and len(shape) == 2 and self.rows_apart:
            return  # each rank sees the whole input, finds the same bases and turns its own rows with them
        slot = self.auxiliary_slots(shape, parts)[0]
        dims = dict(slot.follows)
        if dim is None or dim not in dims:
            raise ValueError(
                f"Dobb has its blocks along another axis of {name!r}, {size}, than shards cut: give "
                "fully_shard(shard_placement_fn=...) the dim of `optim.shard_dims`, as apply_fsdp does"
            )
        length, width = shape[dim], shape[dim] // slot.shape[dims[dim]]
        if dim > 0 and length % shards:  # fully_shard cuts evenly there
            raise ValueError(
                "parallelism.data_parallel_shard_degree: Dobb shards weights along their blocks, and "
                f"{shards} shards do not divide axis {dim} of {name!r}, {size}: take a divisor of {length}, "
                "and parallelism.data_parallel_replicate_degree for the other ranks"
            )
        chunk = -(-length // shards)
        if chunk % width:
            by_width = self.dobb.block_width > 0
            key = "block_width" if by_width else "blocks"
            fit = f"a divisor of {chunk}" if by_width else f"a multiple of {shards}"
            if not by_width and dim == 0 and (parts > 1 or length % shards):
                fit = f"blocks whose width divides {chunk}"
            raise ValueError(
                f"optimizer.dobb.{key} = {getattr(self.dobb, key)}: blocks of {name!r}, {size}, are {width} "
                f"wide and would not lie within one of {shards} shards of {chunk}: take {fit}, or fewer "
                "shards (parallelism.data_parallel_shard_degree, tensor_parallel_degree)"
            )

    @property
    def rows_apart(self) -> bool:
        """Whether rows of the update are found from the input's bases each by itself: what the tensor axis,
        which shares rows of some matrices and columns of others, needs.
        """
        return self.dobb.side == "A" and self.dobb.norm == "linf" and self.dobb.source == "activation"

    def direction(self, m: Tensor, auxiliary: State, h: Tensor) -> tuple[Tensor, Tensor, State]:
        return self._direction(m, auxiliary, m.shape[-2] if self.dobb.side == "A" else m.shape[-1])

    def scaled_direction(
        self,
        state: State,
        auxiliary: State,
        h: Tensor,
        g: Tensor | None = None,
        matrix: tuple[int, int] | None = None,
    ) -> tuple[Tensor, State, State]:
        (m,) = state
        rows, columns = matrix or m.shape[-2:]
        length = rows if self.dobb.side == "A" else columns
        found = self._direction(self.looked_at(m, h, g), auxiliary, length)
        return self.applied(m, auxiliary, h, found, matrix)

    def _direction(self, m: Tensor, auxiliary: State, length: int) -> tuple[Tensor, Tensor, State]:
        """length: d, of whole columns (side G: rows), of which `m` may be a part."""
        basis = auxiliary[1].to(m.dtype)
        value = m if self.dobb.side == "A" else m.mT
        count, width = basis.shape[-3], basis.shape[-1]
        blocks = value.unflatten(-1, (count, width)).transpose(-2, -3)  # [*, B, d, w]
        coefficients = blocks @ basis
        if self.dobb.norm == "linf":
            coefficients = torch.sign(coefficients) / math.sqrt(length)
        else:
            coefficients = unit_columns(coefficients)
        rebuilt = (coefficients @ basis.mT).transpose(-2, -3).flatten(-2)
        return (rebuilt if self.dobb.side == "A" else rebuilt.mT), m, auxiliary

    @property
    def whole_steps(self) -> bool:
        return self.dobb.side == "A" and self.dobb.norm == "linf" and not self.u_reads_gradient

    def step_in_place(self, batch: Batch, h: Tensor, nonfinite: Tensor) -> bool:
        return self.whole_steps and in_place.block_sign_step(batch, h, 1, self._sign_scale(batch), nonfinite)

    def update_in_place(self, batch: Batch, h: Tensor) -> bool:
        return self.whole_steps and in_place.block_sign_update(batch, h, 1, self._sign_scale(batch))

    def _sign_scale(self, batch: Batch) -> float:
        shape, parts = batch[0].weight.shape, batch[0].parts
        rows, columns = batch[0].matrix or (shape[-2] // parts, shape[-1])
        return self.scale(rows, columns) / math.sqrt(rows)

    def own_scale(self, rows: int, columns: int) -> float:
        raise AssertionError("refused when it was built")
