"""Sums of squares of the states that a launch over many tensors writes, while they are in registers.

Each program of the launch leaves the sum of its chunk in a place of its own. A second, small launch adds up
those of each tensor in a fixed order, so that the same states have the same sum, bit for bit: replicas decide
by it.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titanforge.kernels._triton import LAUNCH_OPTIONS, jit, tl
from titanforge.kernels.codec_arithmetic import plain_codes
from titanforge.kernels.epilogues import Epilogue
from titanforge.kernels.pointers import upload
from titanforge.kernels.step import Target
from titanforge.kernels.tiles import decode_tile, store

_CHUNK = 1024


@jit
def state_tile_squares(
    g, good, off, mask, s0_ptr, h_ptr, EPILOGUE: tl.constexpr, S0_CODEC: tl.constexpr, MASKED: tl.constexpr
):
    """`tiles.update_tile` of a rule that writes one state, stored as floats, and no weight: the same bits.

    Returns the fp32 sum of squares of what is stored after it.
    """
    old = decode_tile(s0_ptr, s0_ptr, 0, off, mask, 0, off, mask, S0_CODEC, MASKED)
    _, new, _ = EPILOGUE(g, g, old, g, h_ptr)
    codes = plain_codes(new, 0, S0_CODEC)
    # As a tile of one element: the interpreter cannot combine a scalar truth value with a mask.
    write = tl.full([1, 1], (tl.load(h_ptr) != 0).to(tl.int32) * good, tl.int32) != 0
    kept = tl.where(write, codes.to(tl.float32), old)
    if MASKED:
        kept = tl.where(mask, kept, 0.0)
        write = mask & write
    store(s0_ptr + off, codes, write)
    return tl.sum(tl.sum(kept * kept, axis=1), axis=0)


@jit
def sum_squares_kernel(span_ptr, partial_ptr, CHUNK: tl.constexpr):
    """Grid: tensors. span: int64 [tensors, 3]: the first of its partial sums, their number, the address of
    the total.
    """
    span = span_ptr + 3 * tl.program_id(0)
    first, count = tl.load(span), tl.load(span + 1)
    total_ptr = tl.load(span + 2).to(tl.pointer_type(tl.float32))
    total = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in range(0, count, CHUNK):
        index = start + tl.arange(0, CHUNK)
        total += tl.load(partial_ptr + first + index, mask=index < count, other=0.0)
    tl.store(total_ptr, tl.sum(total, axis=0))


def check_squares(epilogue: Epilogue, targets: Sequence[Target], totals: Sequence[Tensor]) -> None:
    """Raises ValueError where `state_tile_squares` does not do the update, or a total is no fp32 scalar."""
    if epilogue.updates_weight or len(epilogue.slots) != 1:
        raise ValueError(f"{epilogue.name}: squares are of rules that write one state and no weight")
    for target in targets:
        codec = target.states[0].codec
        if codec.kind != "plain" or codec.stochastic:
            raise ValueError(f"{epilogue.name}: squares are of states in floats, not of {codec.name}")
    if any(total.dtype != torch.float32 or total.dim() for total in totals):
        raise ValueError(f"{epilogue.name}: squares go into fp32 scalars")


class SquareSums:
    """Where one launch leaves its partial sums, and the second that adds them up.

    programs: of each tensor, in the launch's order. totals: fp32 scalars, one a tensor, which may not move.
    """

    def __init__(self, programs: Sequence[int], totals: Sequence[Tensor]) -> None:
        self._totals, device = list(totals), totals[0].device  # held: the table has their addresses
        counts = torch.tensor(programs, dtype=torch.int64)
        addresses = torch.tensor([total.data_ptr() for total in totals], dtype=torch.int64)
        self._spans = upload(torch.stack((counts.cumsum(0) - counts, counts, addresses), 1), device)
        self.partial = torch.empty(sum(programs), dtype=torch.float32, device=device)

    def add_up(self) -> None:
        """The totals from the partial sums, after the launch that filled them."""
        sum_squares_kernel[(len(self._totals),)](
            self._spans, self.partial, CHUNK=_CHUNK, num_warps=4, **LAUNCH_OPTIONS
        )
