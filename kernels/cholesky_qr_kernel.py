"""Triton kernels of the batched Cholesky QR: Gram matrix, blocked factorisation, triangular solve.

All work on fp32 [N, w, w], row-major and contiguous, in square tiles; w need not be a multiple of the tile.
The factorisation is left-looking: a column of tiles is read once for each later column and written twice;
a right-looking one would write the whole rest at every step. Rows of a solve are independent, so that one
program takes some rows through all columns.
"""

from __future__ import annotations

from titanforge.kernels._triton import jit, tl


@jit
def _square(base, row, column, w, TILE: tl.constexpr):
    """Pointers and mask of tile (row, column)."""
    rows = row * TILE + tl.arange(0, TILE)
    columns = column * TILE + tl.arange(0, TILE)
    mask = (rows < w)[:, None] & (columns < w)[None, :]
    return base + rows.to(tl.int64)[:, None] * w + columns[None, :], mask


@jit
def gram_kernel(q_ptr, gram_ptr, w, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """gram = q^T q, tiles on and below the diagonal. Grid: N, w / TILE, w / TILE."""
    batch, row, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if column <= row:
        q_base = q_ptr + batch * w * w
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        for step in range(tl.cdiv(w, TILE)):
            left, left_mask = _square(q_base, step, row, w, TILE)
            right, right_mask = _square(q_base, step, column, w, TILE)
            a = tl.load(left, left_mask, other=0.0)
            b = tl.load(right, right_mask, other=0.0)
            total += tl.dot(tl.trans(a), b, input_precision=PRECISION)
        out, mask = _square(gram_ptr + batch * w * w, row, column, w, TILE)
        tl.store(out, total, mask)


@jit(unspecialized=("panel",))
def update_column_kernel(gram_ptr, w, panel, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """A[i, panel] -= sum over p < panel of L[i, p] L[panel, p]^T, i >= panel. Grid: N, tiles from panel."""
    batch, row = tl.program_id(0).to(tl.int64), panel + tl.program_id(1)
    base = gram_ptr + batch * w * w
    out, mask = _square(base, row, panel, w, TILE)
    total = tl.load(out, mask, other=0.0)
    for step in range(panel):
        left, left_mask = _square(base, row, step, w, TILE)
        right, right_mask = _square(base, panel, step, w, TILE)
        a = tl.load(left, left_mask, other=0.0)
        b = tl.load(right, right_mask, other=0.0)
        total -= tl.dot(a, tl.trans(b), input_precision=PRECISION)
    tl.store(out, total, mask)


@jit(unspecialized=("panel",))
def factor_kernel(gram_ptr, inverse_ptr, failed_ptr, w, panel, panels, TILE: tl.constexpr):
    """inverse[panel] = L[panel, panel]^-1 of the Cholesky factor of the diagonal tile. Grid: N.

    A pivot that is not positive, or not finite, sets failed[n] and counts as 1: the rest stays finite.
    """
    batch = tl.program_id(0).to(tl.int64)
    place, mask = _square(gram_ptr + batch * w * w, panel, panel, w, TILE)
    index = tl.arange(0, TILE)
    rows, columns = index[:, None], index[None, :]
    identity = tl.where(rows == columns, 1.0, 0.0)
    a = tl.where(mask, tl.load(place, mask, other=0.0), identity)
    lower = tl.zeros((TILE, TILE), dtype=tl.float32)
    bad = 0
    for k in range(TILE):
        column = tl.sum(tl.where(columns == k, a, 0.0), axis=1)
        pivot = tl.sum(tl.where(index == k, column, 0.0), axis=0)
        good = (pivot > 0.0) & (pivot < float("inf"))  # pyright: ignore[reportOperatorIssue]
        bad = tl.where(good, bad, 1)
        root = tl.sqrt(tl.where(good, pivot, 1.0))
        scaled = tl.where(index > k, column / root, 0.0)
        scaled = tl.where(index == k, root, scaled)
        lower = tl.where(columns == k, scaled[:, None], lower)
        rest = tl.where(index > k, scaled, 0.0)
        a = a - rest[:, None] * rest[None, :]
    inverse = tl.zeros((TILE, TILE), dtype=tl.float32)
    for k in range(TILE):
        row = tl.sum(tl.where(rows == k, lower, 0.0), axis=0)
        diagonal = tl.sum(tl.where(index == k, row, 0.0), axis=0)
        before = tl.where(index < k, row, 0.0)
        known = tl.sum(before[:, None] * inverse, axis=0)
        solved = (tl.where(index == k, 1.0, 0.0) - known) / diagonal
        inverse = tl.where(rows == k, solved[None, :], inverse)
    out = inverse_ptr + (batch * panels + panel) * TILE * TILE + rows * TILE + columns
    tl.store(out, inverse)
    if bad != 0:
        tl.store(failed_ptr + batch, 1)


@jit(unspecialized=("panel",))
def scale_column_kernel(gram_ptr, inverse_ptr, w, panel, panels, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """L[i, panel] = A[i, panel] L[panel, panel]^-T, i > panel. Grid: N, tiles below panel."""
    batch, row = tl.program_id(0).to(tl.int64), panel + 1 + tl.program_id(1)
    place, mask = _square(gram_ptr + batch * w * w, row, panel, w, TILE)
    index = tl.arange(0, TILE)
    inverse = tl.load(
        inverse_ptr + (batch * panels + panel) * TILE * TILE + index[:, None] * TILE + index[None, :]
    )
    a = tl.load(place, mask, other=0.0)
    tl.store(place, tl.dot(a, tl.trans(inverse), input_precision=PRECISION), mask)


@jit
def solve_kernel(q_ptr, gram_ptr, inverse_ptr, w, panels, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """q <- q R^-1 in place, R = L^T, for TILE rows. Grid: N, w / TILE."""
    batch, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_base, l_base = q_ptr + batch * w * w, gram_ptr + batch * w * w
    index = tl.arange(0, TILE)
    for column in range(panels):
        out, mask = _square(q_base, row, column, w, TILE)
        x = tl.load(out, mask, other=0.0)
        for step in range(column):
            solved, solved_mask = _square(q_base, row, step, w, TILE)
            factor, factor_mask = _square(l_base, column, step, w, TILE)
            a = tl.load(solved, solved_mask, other=0.0)
            b = tl.load(factor, factor_mask, other=0.0)
            x -= tl.dot(a, tl.trans(b), input_precision=PRECISION)
        inverse = tl.load(
            inverse_ptr + (batch * panels + column) * TILE * TILE + index[:, None] * TILE + index[None, :]
        )
        tl.store(out, tl.dot(x, tl.trans(inverse), input_precision=PRECISION), mask)
        tl.debug_barrier()  # other threads of this program read these columns next
