"""Triton kernels of the batched Cholesky QR: products before and after its factorisation, and corrections.

Matrices are [N, P, P], P = panels x TILE, padded with the identity, so that few inner loops have a mask; of
the last panel, where most of it is padding, products take EDGE rows and columns alone. C, A = (C + eps I) U
and Q are planes (`planes`) of [N, P, P], the low one `plane` elements on.

The Gram matrix is fp32, in tiles. `cholesky_factor_kernel` turns each into two planes where it stood, TILE
columns of the high one before the same of the low one: below the diagonal of L, on and above it of V = L^-1,
whose tile [i, j] stands at (j, i). With V at hand no solve is left, whose columns would follow one another:
Q is A V^T, a product.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from titanforge.kernels._triton import constant, jit, tl
from titanforge.kernels.planes import dot, dot2, dot3, split, store_split

FARTHEST = constant(0.25)
"""Largest |Q^T Q - I| of an element that the correction takes."""


@jit
def split_kernel(
    c_ptr, out_ptr, plane, P, filled, w: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The planes of C, fp32 [N, w, w], with zeros up to row and column `filled`. Grid: N, filled / ROWS."""
    batch, rows = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    for start in range(0, filled, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        inside = (rows < w)[:, None] & (columns < w)[None, :]
        c = tl.load(c_ptr + batch * w * w + rows[:, None] * w + columns[None, :], inside, other=0.0)
        store_split(out_ptr + batch * P * P + rows[:, None] * P + columns[None, :], plane, c)


@jit
def _product_tile(
    c_ptr, u_ptr, largest_ptr, q_ptr, plane, P, omega, first_row, first_column, w: tl.constexpr,
    MASKED: tl.constexpr, C_PLANES: tl.constexpr, U_SPLIT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    u_base = u_ptr + batch * w * w
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, w, BLOCK_K):
        steps = start + tl.arange(0, BLOCK_K)
        if C_PLANES:
            c_places = c_ptr + batch * P * P + rows[:, None] * P + steps[None, :]
            high, low = tl.load(c_places), tl.load(c_places + plane)
        else:
            inside = (rows < w)[:, None] & (steps < w)[None, :]
            c_places = c_ptr + batch * w * w + rows[:, None] * w + steps[None, :]
            high, low = split(tl.load(c_places, inside, other=0.0))
        u_places = u_base + steps[:, None] * w + columns[None, :]
        if MASKED:
            u = tl.load(u_places, (steps < w)[:, None] & (columns < w)[None, :], other=0.0)
        else:
            u = tl.load(u_places)
        if U_SPLIT:
            u_high, u_low = split(u)
            total = dot3(high, low, u_high, u_low, total, TO_FP32)
        else:
            total = dot2(high, low, u, total, TO_FP32)
    inside = (rows < w)[:, None] & (columns < w)[None, :]
    u = tl.load(u_base + rows[:, None] * w + columns[None, :], inside, other=0.0).to(tl.float32)
    largest = tl.load(largest_ptr + batch)
    a = tl.where(largest > 0, total / largest + omega * u, 0.0)
    a = tl.where(inside, a, tl.where(rows[:, None] == columns[None, :], 1.0, 0.0))
    store_split(q_ptr + batch * P * P + rows[:, None] * P + columns[None, :], plane, a)


@jit
def product_kernel(
    c_ptr, u_ptr, largest_ptr, q_ptr, plane, P, omega, panels, w: tl.constexpr,
    MASKED: tl.constexpr, C_PLANES: tl.constexpr, U_SPLIT: tl.constexpr, TILE: tl.constexpr,
    EDGE: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """A = C U / largest + omega U; 0 where `largest` is not positive. C: fp32 [N, w, w] or, C_PLANES, from
    `split_kernel`. U: [N, w, w], bf16 or (U_SPLIT) fp32. Grid: N, panels, panels.
    """
    row, column = tl.program_id(1) * TILE, tl.program_id(2) * TILE
    last = (panels - 1) * TILE
    given = (c_ptr, u_ptr, largest_ptr, q_ptr, plane, P, omega)
    if EDGE == TILE:
        _product_tile(*given, row, column, w, MASKED, C_PLANES, U_SPLIT, TILE, TILE, BLOCK_K, TO_FP32)
    elif row < last:
        if column < last:
            _product_tile(*given, row, column, w, MASKED, C_PLANES, U_SPLIT, TILE, TILE, BLOCK_K, TO_FP32)
        else:
            _product_tile(*given, row, column, w, MASKED, C_PLANES, U_SPLIT, TILE, EDGE, BLOCK_K, TO_FP32)
    elif column < last:
        _product_tile(*given, row, column, w, MASKED, C_PLANES, U_SPLIT, EDGE, TILE, BLOCK_K, TO_FP32)
    else:
        _product_tile(*given, row, column, w, MASKED, C_PLANES, U_SPLIT, EDGE, EDGE, BLOCK_K, TO_FP32)


@jit
def _gram_tile(
    q_ptr, out_ptr, failed_ptr, plane, P, first_row, first_column, w: tl.constexpr,
    SPLIT: tl.constexpr, NEAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    steps = tl.arange(0, BLOCK_K)
    left = q_ptr + batch * P * P + steps[:, None] * P + rows[None, :]
    right = q_ptr + batch * P * P + steps[:, None] * P + columns[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, w, BLOCK_K):
        a, b = tl.load(left), tl.load(right)
        if SPLIT:
            a_low, b_low = tl.load(left + plane), tl.load(right + plane)
            total = dot3(tl.trans(a), tl.trans(a_low), b, b_low, total, TO_FP32)
        else:
            total = dot(tl.trans(a), b, total, TO_FP32)
        left += BLOCK_K * P
        right += BLOCK_K * P
    # Of the identity that pads Q the loop has seen what shares its last rows.
    unseen = rows[:, None] >= tl.cdiv(w, BLOCK_K) * BLOCK_K
    total += tl.where((rows[:, None] == columns[None, :]) & unseen, 1.0, 0.0)
    out = out_ptr + batch * P * P + rows[:, None] * P + columns[None, :]
    if NEAR:
        off = total - tl.where(rows[:, None] == columns[None, :], 1.0, 0.0)
        far = tl.where(tl.abs(off) <= FARTHEST, 0, 1)
        if tl.max(tl.max(far, axis=1), axis=0) > 0:
            tl.store(failed_ptr + batch, 1)
        x = tl.where(rows[:, None] > columns[None, :], off, 0.0)
        x = tl.where(rows[:, None] == columns[None, :], 0.5 * off, x)
        high, low = split(x)
        tl.store(out, high)
        if SPLIT:
            tl.store(out + plane, low)
    else:
        tl.store(out, total)


@jit
def _identity_tile(
    out_ptr, P, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    rows, columns = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    out = out_ptr + tl.program_id(0).to(tl.int64) * P * P + rows[:, None] * P + columns[None, :]
    tl.store(out, tl.where(rows[:, None] == columns[None, :], 1.0, 0.0))


@jit
def gram_kernel(
    q_ptr, out_ptr, failed_ptr, plane, P, panels, w: tl.constexpr,
    SPLIT: tl.constexpr, NEAR: tl.constexpr, TILE: tl.constexpr, EDGE: tl.constexpr, BLOCK_K: tl.constexpr,
    TO_FP32: tl.constexpr,
):  # fmt: skip
    """Q^T Q (without SPLIT of Q's high plane), fp32, tiles on and below the diagonal; whole ones, which are
    factorised. Grid: N, panels, panels.

    NEAR: Q is nearly orthonormal, and `out` takes the planes (without SPLIT the high one) of the triangle X
    that corrects it to first order: with E = Q^T Q - I the strictly lower part of E and half of its diagonal,
    zeros above. Sets failed where an element of E is above FARTHEST, or not a number.
    """
    row, column = tl.program_id(1) * TILE, tl.program_id(2) * TILE
    last = (panels - 1) * TILE
    given = (q_ptr, out_ptr, failed_ptr, plane, P)
    if column <= row:
        if EDGE == TILE:  # noqa: SIM114 (known when it is compiled; the other when it runs)
            _gram_tile(*given, row, column, w, SPLIT, NEAR, TILE, TILE, BLOCK_K, TO_FP32)
        elif row < last:
            _gram_tile(*given, row, column, w, SPLIT, NEAR, TILE, TILE, BLOCK_K, TO_FP32)
        elif column < last:
            _gram_tile(*given, row, column, w, SPLIT, NEAR, EDGE, TILE, BLOCK_K, TO_FP32)
            if not NEAR:
                for start in range(EDGE, TILE, EDGE):
                    _identity_tile(out_ptr, P, row + start, column, EDGE, TILE)
        else:
            _gram_tile(*given, row, column, w, SPLIT, NEAR, EDGE, EDGE, BLOCK_K, TO_FP32)
            if not NEAR:
                for start in range(EDGE, TILE, EDGE):
                    _identity_tile(out_ptr, P, row, column + start, EDGE, EDGE)
                    _identity_tile(out_ptr, P, row + start, column, EDGE, TILE)


@jit
def _orthonormal_tile(
    a_ptr, l_ptr, q_ptr, plane, P, first_row, first_column, end,
    SPLIT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    rows, index, steps = first_row + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, BLOCK_K)
    a_rows = a_ptr + batch * P * P + rows[:, None] * P + steps[None, :]
    v = l_ptr + batch * P * P * 2 + index[:, None] * (2 * P) + 2 * first_column + steps[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, end, BLOCK_K):
        within = tl.multiple_of(start % TILE, BLOCK_K)  # the compiler does not see it
        place = v + (start - within) * (2 * P) + within
        b, b_low = tl.load(place), tl.load(place + TILE)
        a, a_low = tl.load(a_rows + start), tl.load(a_rows + start + plane)
        total = dot3(a, a_low, tl.trans(b), tl.trans(b_low), total, TO_FP32)
    out = q_ptr + batch * P * P + rows[:, None] * P + (first_column + index)[None, :]
    high, low = split(total)
    tl.store(out, high)
    if SPLIT:
        tl.store(out + plane, low)


@jit
def orthonormal_kernel(
    a_ptr, l_ptr, q_ptr, plane, P, panels,
    SPLIT: tl.constexpr, TILE: tl.constexpr, EDGE: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """Q = A V^T, in planes (without SPLIT the high one). Grid: N, panels, panels."""
    row = tl.program_id(1) * TILE
    column = (panels - 1 - tl.program_id(2)) * TILE  # the longest first
    last = (panels - 1) * TILE
    given = (a_ptr, l_ptr, q_ptr, plane, P)
    end = tl.minimum(column + TILE, last + EDGE)
    if EDGE == TILE:
        _orthonormal_tile(*given, row, column, end, SPLIT, TILE, TILE, TILE, BLOCK_K, TO_FP32)
    elif row < last:
        if column < last:
            _orthonormal_tile(*given, row, column, end, SPLIT, TILE, TILE, TILE, BLOCK_K, TO_FP32)
        else:
            _orthonormal_tile(*given, row, column, end, SPLIT, TILE, TILE, EDGE, BLOCK_K, TO_FP32)
    elif column < last:
        _orthonormal_tile(*given, row, column, end, SPLIT, TILE, EDGE, TILE, BLOCK_K, TO_FP32)
    else:
        _orthonormal_tile(*given, row, column, end, SPLIT, TILE, EDGE, EDGE, BLOCK_K, TO_FP32)


@jit
def _correct_tile(
    q_ptr, x_ptr, out_ptr, plane, P, first_row, first_column, end, w: tl.constexpr,
    SPLIT: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    batch, steps = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    rows, columns = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    q_rows = q_ptr + batch * P * P + rows[:, None] * P
    x_rows = x_ptr + batch * P * P + columns[:, None] * P + steps[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, end, BLOCK_K):
        a, b = tl.load(q_rows + start + steps[None, :]), tl.load(x_rows + start)
        if SPLIT:
            a_low, b_low = tl.load(q_rows + plane + start + steps[None, :]), tl.load(x_rows + plane + start)
            total = dot3(a, a_low, tl.trans(b), tl.trans(b_low), total, TO_FP32)
        else:
            total = dot(a, tl.trans(b), total, TO_FP32)
    q = tl.load(q_rows + columns[None, :]).to(tl.float32)
    if SPLIT:
        q += tl.load(q_rows + plane + columns[None, :]).to(tl.float32)
    q -= total
    if LAST:
        out = out_ptr + batch * w * w + rows[:, None] * w + columns[None, :]
        tl.store(out, q.to(out_ptr.dtype.element_ty), (rows < w)[:, None] & (columns < w)[None, :])
    else:
        out = out_ptr + batch * P * P + rows[:, None] * P + columns[None, :]
        high, low = split(q)
        tl.store(out, high)
        if SPLIT:
            tl.store(out + plane, low)


@jit
def correct_kernel(
    q_ptr, x_ptr, out_ptr, plane, P, panels, w: tl.constexpr,
    SPLIT: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, EDGE: tl.constexpr, BLOCK_K: tl.constexpr,
    TO_FP32: tl.constexpr,
):  # fmt: skip
    """Q - Q X^T: what is left of E is of its second order. Into planes or, LAST, into bases [N, w, w]. SPLIT:
    whether Q and X are both of their planes. Grid: N, panels, panels.
    """
    row = tl.program_id(1) * TILE
    column = (panels - 1 - tl.program_id(2)) * TILE
    last = (panels - 1) * TILE
    given = (q_ptr, x_ptr, out_ptr, plane, P)
    end = tl.minimum(column + TILE, last + EDGE)
    if EDGE == TILE:
        _correct_tile(*given, row, column, end, w, SPLIT, LAST, TILE, TILE, BLOCK_K, TO_FP32)
    elif row < last:
        if column < last:
            _correct_tile(*given, row, column, end, w, SPLIT, LAST, TILE, TILE, BLOCK_K, TO_FP32)
        else:
            _correct_tile(*given, row, column, end, w, SPLIT, LAST, TILE, EDGE, BLOCK_K, TO_FP32)
    elif column < last:
        _correct_tile(*given, row, column, end, w, SPLIT, LAST, EDGE, TILE, BLOCK_K, TO_FP32)
    else:
        _correct_tile(*given, row, column, end, w, SPLIT, LAST, EDGE, EDGE, BLOCK_K, TO_FP32)


@jit
def restore_kernel(failed_ptr, old_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    """Failed (or chosen) blocks get what they had (or are to have). Grid: N, parts of a block."""
    batch = tl.program_id(0).to(tl.int64)
    if tl.load(failed_ptr + batch) != 0:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        old = tl.load(old_ptr + batch * numel + place, place < numel, other=0.0)
        tl.store(out_ptr + batch * numel + place, old, place < numel)
