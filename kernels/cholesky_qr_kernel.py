"""Triton kernels of the batched Cholesky QR: product, Gram matrix, blocked factorisation, triangular solve.

Matrices are [N, P, P], P = panels x TILE, padded with the identity, so that no inner loop has a mask. A
factor in fp32 precision is the sum of two bf16 *planes*, high and low: three bf16 products, accumulated in
fp32, then stand for an fp32 one (the fourth is below the rounding), at the tensor cores' full rate and in the
bytes of fp32. Q is two planes of [N, P, P]. The Gram matrix is fp32; a column of its tiles turns into the
planes of L where it stood, BLOCK_K columns of the high plane before the same of the low one.

A panel of the factorisation is two launches: `advance_kernel` inverts the diagonal tile, and at the same time
brings the tiles below it and the next diagonal tile up to date; `scale_kernel` multiplies by the inverse.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from titanforge.kernels._triton import jit, tl


@jit
def _split(x):
    """The high and the low plane of fp32 values."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@jit
def _dot(a, b, total, TO_FP32: tl.constexpr):
    if TO_FP32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@jit
def _dot3(a_high, a_low, b_high, b_low, total, TO_FP32: tl.constexpr):
    total = _dot(a_low, b_high, total, TO_FP32)
    total = _dot(a_high, b_low, total, TO_FP32)
    return _dot(a_high, b_high, total, TO_FP32)


@jit
def product_kernel(
    c_ptr, u_ptr, largest_ptr, q_ptr, plane, w, P, omega,
    MASKED: tl.constexpr, U_SPLIT: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    TO_FP32: tl.constexpr,
):  # fmt: skip
    """Q = C U / largest + omega U; 0 where `largest` is not positive. C: fp32 [N, w, w], U likewise, bf16 or
    (U_SPLIT) fp32. Grid: N, panels, panels.
    """
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    c_base, u_base = c_ptr + batch * w * w, u_ptr + batch * w * w
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, w, BLOCK_K):
        steps = start + tl.arange(0, BLOCK_K)
        c_places = c_base + rows[:, None] * w + steps[None, :]
        u_places = u_base + steps[:, None] * w + columns[None, :]
        if MASKED:
            c = tl.load(c_places, (rows < w)[:, None] & (steps < w)[None, :], other=0.0)
            u = tl.load(u_places, (steps < w)[:, None] & (columns < w)[None, :], other=0.0)
        else:
            c = tl.load(c_places)
            u = tl.load(u_places)
        high, low = _split(c)
        if U_SPLIT:
            u_high, u_low = _split(u)
            total = _dot3(high, low, u_high, u_low, total, TO_FP32)
        else:
            total = _dot(low, u, total, TO_FP32)
            total = _dot(high, u, total, TO_FP32)
    inside = (rows < w)[:, None] & (columns < w)[None, :]
    u = tl.load(u_base + rows[:, None] * w + columns[None, :], inside, other=0.0).to(tl.float32)
    largest = tl.load(largest_ptr + batch)
    q = tl.where(largest > 0, total / largest + omega * u, 0.0)
    q = tl.where(inside, q, tl.where(rows[:, None] == columns[None, :], 1.0, 0.0))
    high, low = _split(q)
    out = q_ptr + batch * P * P + rows[:, None] * P + columns[None, :]
    tl.store(out, high)
    tl.store(out + plane, low)


@jit
def gram_kernel(
    q_ptr, gram_ptr, plane, P,
    SPLIT: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """gram = Q^T Q (without SPLIT of Q's high plane), tiles on and below the diagonal. Grid: N, panels,
    panels.
    """
    batch, row, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if column <= row:
        index = tl.arange(0, TILE)
        steps = tl.arange(0, BLOCK_K)
        left = q_ptr + batch * P * P + steps[:, None] * P + (row * TILE + index)[None, :]
        right = q_ptr + batch * P * P + steps[:, None] * P + (column * TILE + index)[None, :]
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        for _ in range(0, P, BLOCK_K):
            a, b = tl.load(left), tl.load(right)
            if SPLIT:
                a_low, b_low = tl.load(left + plane), tl.load(right + plane)
                total = _dot3(tl.trans(a), tl.trans(a_low), b, b_low, total, TO_FP32)
            else:
                total = _dot(tl.trans(a), b, total, TO_FP32)
            left += BLOCK_K * P
            right += BLOCK_K * P
        out = gram_ptr + batch * P * P + (row * TILE + index)[:, None] * P + (column * TILE + index)[None, :]
        tl.store(out, total)


@jit
def _times_factor(
    a_ptr, a_low, l_ptr, P, first, last, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    A_IS_L: tl.constexpr, A_SPLIT: tl.constexpr, L_SPLIT: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """sum over the columns first .. last of A[:, k] L[:, k]^T, fp32 [ROWS, TILE].

    a_ptr: A's first row, of Q (its low plane `a_low` elements on) or, A_IS_L, of L. l_ptr: L's first row.
    A_SPLIT, L_SPLIT: whether the low planes count; L's only where A's do.
    """
    steps = tl.arange(0, BLOCK_K)
    total = tl.zeros((ROWS, TILE), dtype=tl.float32)
    a_rows = a_ptr + tl.arange(0, ROWS)[:, None] * (2 * P if A_IS_L else P)
    l_rows = l_ptr + tl.arange(0, TILE)[:, None] * (2 * P)
    for start in range(first, last, BLOCK_K):
        place = 2 * start + steps[None, :]  # of L: BLOCK_K columns of the high plane before those of the low
        a_place = a_rows + (place if A_IS_L else start + steps[None, :])
        a, b = tl.load(a_place), tl.load(l_rows + place)
        if A_SPLIT:
            total = _dot(tl.load(a_place + a_low), tl.trans(b), total, TO_FP32)
            if L_SPLIT:
                total = _dot(a, tl.trans(tl.load(l_rows + place + BLOCK_K)), total, TO_FP32)
        total = _dot(a, tl.trans(b), total, TO_FP32)
    return total


@jit
def _eliminate(a, SIZE: tl.constexpr):
    """L^-1 of the Cholesky factor of a [SIZE, SIZE], and whether a pivot was not positive or not finite.

    Such a pivot counts as 1: the rest stays finite if it was.
    """
    index = tl.arange(0, SIZE)
    rows, columns = index[:, None], index[None, :]
    inverse = tl.where(rows == columns, 1.0, 0.0)
    pivots = tl.full((SIZE,), 1.0, dtype=tl.float32)
    bad = 0
    for k in range(SIZE):
        row = tl.sum(tl.where(rows == k, a, 0.0), axis=0)
        inverse_row = tl.sum(tl.where(rows == k, inverse, 0.0), axis=0)
        column = tl.sum(tl.where(columns == k, a, 0.0), axis=1)
        pivot = tl.sum(tl.where(index == k, row, 0.0), axis=0)
        good = (pivot > 0.0) & (pivot < float("inf"))
        bad = tl.where(good, bad, 1)
        pivot = tl.where(good, pivot, 1.0)
        factor = tl.where(index > k, column / pivot, 0.0)
        a = a - factor[:, None] * row[None, :]
        inverse = inverse - factor[:, None] * inverse_row[None, :]
        pivots = tl.where(index == k, pivot, pivots)
    return inverse / tl.sqrt(pivots)[:, None], bad


@jit
def _ab(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@jit
def _abt(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@jit
def _store_split(out, low, value):
    high, rest = _split(value)
    tl.store(out, high)
    tl.store(out + low, rest)


@jit
def _invert_tile(tile_ptr, P, d_ptr, d_low, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """The planes of V = L^-1 of one diagonal tile, in quarters, by rows. Returns whether a pivot failed.

    Runtime loops over pieces in memory: unrolled, the quarters would not fit in registers. Below the diagonal
    the tile's memory takes L; V[i, j] stands at (j, i). Planes above the diagonal are not written.
    """
    SIZE: tl.constexpr = TILE // 4
    index = tl.arange(0, SIZE)
    piece = tile_ptr + index[:, None] * P + index[None, :]
    out = d_ptr + index[:, None] * TILE + index[None, :]
    down = SIZE * P
    bad = 0
    for s in range(4):
        own = tl.load(piece + s * down + s * SIZE)
        for t in range(s):
            left = tl.load(piece + s * down + t * SIZE)
            own -= _abt(left, left, PRECISION)
        inverse, failed = _eliminate(own, SIZE)
        bad += failed
        tl.debug_barrier()
        tl.store(piece + s * down + s * SIZE, inverse)
        _store_split(out + s * SIZE * TILE + s * SIZE, d_low, inverse)
        for r in range(s + 1, 4):
            rest = tl.load(piece + r * down + s * SIZE)
            for t in range(s):
                left = tl.load(piece + r * down + t * SIZE)
                right = tl.load(piece + s * down + t * SIZE)
                rest -= _abt(left, right, PRECISION)
            tl.debug_barrier()
            tl.store(piece + r * down + s * SIZE, _abt(rest, inverse, PRECISION))
        for t in range(s):
            known = tl.zeros((SIZE, SIZE), dtype=tl.float32)
            for u in range(t, s):
                left = tl.load(piece + s * down + u * SIZE)
                known += _ab(left, tl.load(piece + t * down + u * SIZE), PRECISION)
            value = -_ab(inverse, known, PRECISION)
            tl.store(piece + t * down + s * SIZE, value)
            _store_split(out + s * SIZE * TILE + t * SIZE, d_low, value)
        tl.debug_barrier()
    return bad


@jit(unspecialized=("panel",))
def advance_kernel(
    gram_ptr, l_ptr, d_ptr, failed_ptr, d_low, P, panel, panels,
    SPLIT: tl.constexpr, INVERT: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """Program 0 of a matrix: the inverse factor of the diagonal tile, which lacks the last panel's part alone
    (without INVERT that part alone: `invert_kernel` follows). The next ones: A[i, panel] -= sum over p <
    panel of L[i, p] L[panel, p]^T, i > panel. The last one: the same of the next diagonal tile, without its
    last part. Grid: N, and these.
    """
    batch, task = tl.program_id(0).to(tl.int64), tl.program_id(1)
    gram_base, l_base = gram_ptr + batch * P * P, l_ptr + batch * P * P * 2
    below = panels - panel - 1
    ahead = task == below + 1
    row = panel + tl.where(ahead, 1, task)
    column = panel + tl.where(ahead, 1, 0)
    first = tl.where(task == 0, tl.maximum(panel - 1, 0), 0) * TILE
    index = tl.arange(0, TILE)
    out = gram_base + (row * TILE + index)[:, None] * P + (column * TILE + index)[None, :]
    l_rows = l_base + row * TILE * 2 * P
    l_columns = l_base + column * TILE * 2 * P
    total = _times_factor(
        l_rows, BLOCK_K, l_columns, P, first, panel * TILE, TILE, TILE, BLOCK_K, True, SPLIT, SPLIT, TO_FP32
    )
    tl.store(out, tl.load(out) - total)
    if INVERT:  # noqa: SIM102 (known to the compiler)
        if task == 0:
            tl.debug_barrier()  # the tile is read in quarters, by other threads than wrote it
            tile = gram_base + panel * TILE * P + panel * TILE
            own = d_ptr + (batch * panels + panel) * TILE * TILE
            if _invert_tile(tile, P, own, d_low, TILE, PRECISION) != 0:
                tl.store(failed_ptr + batch, 1)


@jit(unspecialized=("panel",))
def invert_kernel(
    gram_ptr, d_ptr, failed_ptr, d_low, P, panel, panels, TILE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The inverse factor of one diagonal tile of each matrix, which is up to date. Grid: N.

    Its steps follow one another and wait for barriers: programs of few warps, many to a multiprocessor, suit
    it where there are many matrices; beside the updates of other tiles it costs less where there are few.
    """
    batch = tl.program_id(0).to(tl.int64)
    tile = gram_ptr + batch * P * P + panel * TILE * P + panel * TILE
    own = d_ptr + (batch * panels + panel) * TILE * TILE
    if _invert_tile(tile, P, own, d_low, TILE, PRECISION) != 0:
        tl.store(failed_ptr + batch, 1)


@jit(unspecialized=("panel",))
def scale_kernel(
    gram_ptr, l_ptr, d_ptr, d_low, P, panel, panels,
    TILE: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """L[i, panel] = A[i, panel] L[panel, panel]^-T, i > panel, in its planes. Grid: N, tiles below panel."""
    batch, row = tl.program_id(0).to(tl.int64), panel + 1 + tl.program_id(1)
    index, steps = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    a_ptr = gram_ptr + batch * P * P + (row * TILE + index)[:, None] * P + panel * TILE + steps[None, :]
    d = d_ptr + (batch * panels + panel) * TILE * TILE + index[:, None] * TILE + steps[None, :]
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, TILE, BLOCK_K):
        high, low = _split(tl.load(a_ptr + start))
        b, b_low = tl.load(d + start), tl.load(d + start + d_low)
        total = _dot3(high, low, tl.trans(b), tl.trans(b_low), total, TO_FP32)
    tl.debug_barrier()  # the planes are written over what was read
    out = l_ptr + batch * P * P * 2 + (row * TILE + index)[:, None] * (2 * P) + panel * 2 * TILE
    place = 2 * index - index % BLOCK_K
    _store_split(out + place[None, :], BLOCK_K, total)


@jit
def solve_kernel(
    q_ptr, l_ptr, d_ptr, out_ptr, plane, d_low, w, P, panels,
    LAST: tl.constexpr, Q_SPLIT: tl.constexpr, L_SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """Q <- Q R^-1 in place, R = L^T, for ROWS rows; LAST: into `out` [N, w, w] too. Grid: N, P / ROWS.

    Q_SPLIT: whether Q is both of its planes, else the high one. L_SPLIT: whether L is, off its diagonal.
    """
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    q_first = q_ptr + batch * P * P + tl.program_id(1) * ROWS * P
    l_base = l_ptr + batch * P * P * 2
    index, steps = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    own = tl.arange(0, ROWS)[:, None] * P
    for column in range(panels):
        l_rows = l_base + column * TILE * 2 * P
        known = _times_factor(
            q_first, plane, l_rows, P, 0, column * TILE, ROWS, TILE, BLOCK_K, False, Q_SPLIT, L_SPLIT, TO_FP32
        )
        place = q_first + own + (column * TILE + index)[None, :]
        rest = tl.load(place).to(tl.float32)
        if Q_SPLIT:
            rest += tl.load(place + plane).to(tl.float32)
        rest -= known
        _store_split(place, plane, rest)
        tl.debug_barrier()  # read again below in other pieces
        d = d_ptr + (batch * panels + column) * TILE * TILE + index[:, None] * TILE + steps[None, :]
        a_ptr = q_first + own + column * TILE + steps[None, :]
        total = tl.zeros((ROWS, TILE), dtype=tl.float32)
        for start in range(0, TILE, BLOCK_K):
            a, a_low = tl.load(a_ptr + start), tl.load(a_ptr + start + plane)
            b, b_low = tl.load(d + start), tl.load(d + start + d_low)
            total = _dot3(a, a_low, tl.trans(b), tl.trans(b_low), total, TO_FP32)
        tl.debug_barrier()
        _store_split(place, plane, total)
        if LAST:
            columns = column * TILE + index
            out = out_ptr + batch * w * w + rows[:, None] * w + columns[None, :]
            tl.store(out, total.to(out_ptr.dtype.element_ty), (rows < w)[:, None] & (columns < w)[None, :])
        tl.debug_barrier()  # other threads of this program read these columns next
