"""Triton kernel of products that are symmetric: tiles on and above the diagonal, mirrored."""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from titanforge.kernels._triton import jit, tl


@jit
def _operand(base, first, start, m, k, TALL: tl.constexpr, MASK_M: tl.constexpr, MASK_K: tl.constexpr,
             BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr):  # fmt: skip
    """[BLOCK, BLOCK_K] of X [m, k], or of X^T where X is stored [k, m]."""
    rows = first + tl.arange(0, BLOCK)
    steps = start + tl.arange(0, BLOCK_K)
    if TALL:
        places = base + steps.to(tl.int64)[:, None] * m + rows[None, :]
        if MASK_M or MASK_K:
            tile = tl.load(places, mask=(steps < k)[:, None] & (rows < m)[None, :], other=0.0)
        else:
            tile = tl.load(places)
        tile = tl.trans(tile)
    else:
        places = base + rows.to(tl.int64)[:, None] * k + steps[None, :]
        if MASK_M or MASK_K:
            tile = tl.load(places, mask=(rows < m)[:, None] & (steps < k)[None, :], other=0.0)
        else:
            tile = tl.load(places)
    if TO_FP32:
        tile = tile.to(tl.float32)
    return tile


@jit(unspecialized=("alpha", "beta", "diagonal"))
def symmetric_product_kernel(
    x_ptr, add_ptr, out_ptr, order_ptr, m, k, alpha, beta, diagonal,
    TALL: tl.constexpr, ADD: tl.constexpr, MASK_M: tl.constexpr, MASK_K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """out = alpha X X^T + beta add + diagonal I of each matrix X [m, k] (TALL: X^T X of one stored [k, m]).

    order: int32 [tiles, 2], the tile rows and columns that are computed. add: symmetric, [m, m]. fp32
    accumulation. Grid: tiles, matrices.
    """
    batch = tl.program_id(1).to(tl.int64)
    tile_row = tl.load(order_ptr + 2 * tl.program_id(0))
    tile_column = tl.load(order_ptr + 2 * tl.program_id(0) + 1)
    base = x_ptr + batch * m * k
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        a = _operand(base, tile_row * BLOCK, start, m, k, TALL, MASK_M, MASK_K, BLOCK, BLOCK_K, TO_FP32)
        b = _operand(base, tile_column * BLOCK, start, m, k, TALL, MASK_M, MASK_K, BLOCK, BLOCK_K, TO_FP32)
        total = tl.dot(a, tl.trans(b), total)
    total *= alpha
    rows = tile_row * BLOCK + tl.arange(0, BLOCK)
    columns = tile_column * BLOCK + tl.arange(0, BLOCK)
    places = rows.to(tl.int64)[:, None] * m + columns[None, :]
    inside = (rows < m)[:, None] & (columns < m)[None, :]
    if ADD:
        total += beta * tl.load(add_ptr + batch * m * m + places, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    value = total.to(out_ptr.dtype.element_ty)
    out = out_ptr + batch * m * m
    tl.store(out + places, value, mask=inside)
    if tile_row != tile_column:
        mirrored = columns.to(tl.int64)[:, None] * m + rows[None, :]
        tl.store(out + mirrored, tl.trans(value), mask=(columns < m)[:, None] & (rows < m)[None, :])
