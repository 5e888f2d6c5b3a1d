"""Sums of outer products of the rows of activations, by blocks of columns: what Dobb captures.

Only tiles on and below the diagonal are computed, and mirrored. Where blocks are few and narrow, rows are
dealt over several programs, whose sums are then added up in a fixed order: the same bits each time.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels._triton import (
    INTERPRET,
    LAUNCH_OPTIONS,
    cdiv,
    jit,
    next_power_of_2,
    runs_triton,
    tl,
)
from titanforge.kernels.planes import dot

_PROGRAMS = 528
"""Four for each of Hopper's 132 multiprocessors: so many that the last ones do not keep all waiting."""
_FEWEST_ROWS = 512
"""Of a part, which is written and read once more: it must be worth that."""
_WIDEST_TILE = 128
_ADDED_AT_ONCE = 1024


@jit
def _columns(x_ptr, row, rows, stride, column, w, MASK_W: tl.constexpr):
    """[BLOCK_T, TILE] of a block's columns."""
    mask = (row < rows)[:, None]
    if MASK_W:
        mask = mask & (column < w)[None, :]
    return tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@jit
def outer_products_kernel(
    x_ptr, out_ptr, count_ptr, rows, stride, span, w: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr, SPLIT: tl.constexpr,
    MASK_W: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """One tile of one block's sum over `span` rows. x: [rows, blocks w], unit stride along the columns.

    SPLIT: out is fp32 [parts, blocks, w, w] and is written; else the total, [blocks, w, w], and is added to.
    Grid: pairs of tiles, blocks, parts.
    """
    tile_row, tile_column = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    if tile_row >= tile_column:
        block, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
        column, other = tile_row * TILE + tl.arange(0, TILE), tile_column * TILE + tl.arange(0, TILE)
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        end = tl.minimum(rows, (part + 1) * span)
        x_ptr += block * w
        for start in range(part * span, end, BLOCK_T):
            row = start + tl.arange(0, BLOCK_T)
            a = _columns(x_ptr, row, end, stride, column, w, MASK_W)
            if TILES == 1:
                b = a
            else:
                b = _columns(x_ptr, row, end, stride, other, w, MASK_W)
            total = dot(tl.trans(a), b, total, TO_FP32)
        inside = (column < w)[:, None] & (other < w)[None, :]
        places = column[:, None] * w + other[None, :]
        mirrored = column[:, None] + other[None, :] * w
        if SPLIT:
            out_ptr += (part.to(tl.int64) * tl.num_programs(1) + block) * w * w
        else:
            out_ptr += block * w * w
            total += tl.load(out_ptr + places, inside, other=0.0)
            if (tl.program_id(0) == 0) & (block == 0):
                tl.store(count_ptr, tl.load(count_ptr) + rows)
        tl.store(out_ptr + places, total, inside)
        if tile_row != tile_column:
            tl.store(out_ptr + mirrored, total, inside)


@jit
def add_parts_kernel(parts_ptr, total_ptr, count_ptr, rows, elements, parts, BLOCK: tl.constexpr):
    """total += the sum over parts, in their order. parts: fp32 [parts, elements]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.load(parts_ptr + at, inside, other=0.0)
    for _ in range(1, parts):
        parts_ptr += elements
        total += tl.load(parts_ptr + at, inside, other=0.0)
    tl.store(total_ptr + at, tl.load(total_ptr + at, inside, other=0.0) + total, inside)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.load(count_ptr) + rows)


def add_outer_products(total: Tensor, count: Tensor, x: Tensor) -> None:
    """total [B, w, w] += x_bᵀ x_b for each block b of w columns of x, count += its number of rows. In place.

    total: fp32, contiguous. count: fp32 scalar. x: [..., B w], of any float type. Sums are in fp32; products
    of fp32 as `torch.backends.cuda.matmul.allow_tf32` says. Raises ValueError for blocks of 2^31 elements or
    more, which kernels do not address.
    """
    blocks, w = total.shape[:2]
    if w * w >= 2**31:
        raise ValueError(
            f"blocks of {w} columns are too wide for one sum of outer products: take more blocks"
        )
    x = x.reshape(-1, blocks * w)
    rows = len(x)
    if rows == 0:
        return
    if not runs_triton(x) or x.dtype not in (torch.bfloat16, torch.float16):
        of_blocks = x.to(torch.float32).reshape(rows, blocks, w).transpose(0, 1)
        total.baddbmm_(of_blocks.mT, of_blocks)
        count += rows
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = 16 if INTERPRET else min(_WIDEST_TILE, max(16, next_power_of_2(w)))
    tiles = cdiv(w, tile)
    block_t, fewest = (16, 16) if INTERPRET else (64, _FEWEST_ROWS)
    parts = max(1, min(_PROGRAMS // (blocks * tiles * (tiles + 1) // 2), cdiv(rows, fewest)))
    span = cdiv(cdiv(rows, parts), block_t) * block_t
    parts = cdiv(rows, span)
    out = total if parts == 1 else torch.empty((parts, *total.shape), device=total.device)
    outer_products_kernel[(tiles * tiles, blocks, parts)](
        x, out, count, rows, x.stride(0), span, w,
        TILE=tile, TILES=tiles, BLOCK_T=block_t, SPLIT=parts > 1, MASK_W=w % tile != 0,
        TO_FP32=INTERPRET and not x.is_cuda, num_warps=4, num_stages=3, **LAUNCH_OPTIONS,
    )  # fmt: skip
    if parts > 1:
        elements = total.numel()
        add_parts_kernel[(cdiv(elements, _ADDED_AT_ONCE),)](
            out, total, count, rows, elements, parts, BLOCK=_ADDED_AT_ONCE, num_warps=4, **LAUNCH_OPTIONS
        )
