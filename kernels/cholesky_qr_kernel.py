"""Triton kernels of the batched Cholesky QR: products, blocked factorisation and inverse, correction.

Matrices are [N, P, P], P = panels x TILE, padded with the identity, so that few inner loops have a mask; of
the last panel, where most of it is padding, products take EDGE rows and columns alone. A factor in fp32
precision is the sum of two bf16 *planes*, high and low: three bf16 products, accumulated in fp32, then stand
for an fp32 one (the fourth is below the rounding), at the tensor cores' full rate and in the bytes of fp32.
C, A = (C + eps I) U and Q are planes of [N, P, P], the low one `plane` elements on.

The Gram matrix is fp32, in tiles. Each turns into two planes where it stood, TILE columns of the high one
before the same of the low one: below the diagonal of L, on and above it of V = L^-1, whose tile [i, j] stands
at (j, i). With V at hand no solve is left, whose columns would follow one another: Q is A V^T, a product.

A panel is two launches: `advance_kernel` inverts the diagonal tile, and at the same time brings all that the
panel's columns of L and rows of V need up to date; `scale_kernel` multiplies these by the inverse.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from titanforge.kernels._triton import constant, jit, tl

FARTHEST = constant(0.25)
"""Largest |Q^T Q - I| of an element that the correction takes."""


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
def _store_split(out, low, value):
    high, rest = _split(value)
    tl.store(out, high)
    tl.store(out + low, rest)


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
        _store_split(out_ptr + batch * P * P + rows[:, None] * P + columns[None, :], plane, c)


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
            high, low = _split(tl.load(c_places, inside, other=0.0))
        u_places = u_base + steps[:, None] * w + columns[None, :]
        if MASKED:
            u = tl.load(u_places, (steps < w)[:, None] & (columns < w)[None, :], other=0.0)
        else:
            u = tl.load(u_places)
        if U_SPLIT:
            u_high, u_low = _split(u)
            total = _dot3(high, low, u_high, u_low, total, TO_FP32)
        else:
            total = _dot(low, u, total, TO_FP32)
            total = _dot(high, u, total, TO_FP32)
    inside = (rows < w)[:, None] & (columns < w)[None, :]
    u = tl.load(u_base + rows[:, None] * w + columns[None, :], inside, other=0.0).to(tl.float32)
    largest = tl.load(largest_ptr + batch)
    a = tl.where(largest > 0, total / largest + omega * u, 0.0)
    a = tl.where(inside, a, tl.where(rows[:, None] == columns[None, :], 1.0, 0.0))
    _store_split(q_ptr + batch * P * P + rows[:, None] * P + columns[None, :], plane, a)


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
    if EDGE == TILE:
        _product_tile(
            c_ptr, u_ptr, largest_ptr, q_ptr, plane, P, omega, row, column, w, MASKED, C_PLANES, U_SPLIT,
            TILE, TILE, BLOCK_K, TO_FP32,
        )  # fmt: skip
    elif row < last:
        if column < last:
            _product_tile(
                c_ptr, u_ptr, largest_ptr, q_ptr, plane, P, omega, row, column, w, MASKED, C_PLANES, U_SPLIT,
                TILE, TILE, BLOCK_K, TO_FP32,
            )  # fmt: skip
        else:
            _product_tile(
                c_ptr, u_ptr, largest_ptr, q_ptr, plane, P, omega, row, column, w, MASKED, C_PLANES, U_SPLIT,
                TILE, EDGE, BLOCK_K, TO_FP32,
            )  # fmt: skip
    elif column < last:
        _product_tile(
            c_ptr, u_ptr, largest_ptr, q_ptr, plane, P, omega, row, column, w, MASKED, C_PLANES, U_SPLIT,
            EDGE, TILE, BLOCK_K, TO_FP32,
        )  # fmt: skip
    else:
        _product_tile(
            c_ptr, u_ptr, largest_ptr, q_ptr, plane, P, omega, row, column, w, MASKED, C_PLANES, U_SPLIT,
            EDGE, EDGE, BLOCK_K, TO_FP32,
        )  # fmt: skip


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
            total = _dot3(tl.trans(a), tl.trans(a_low), b, b_low, total, TO_FP32)
        else:
            total = _dot(tl.trans(a), b, total, TO_FP32)
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
        high, low = _split(x)
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
    if column <= row:
        if EDGE == TILE:  # noqa: SIM114 (known when it is compiled; the other when it runs)
            _gram_tile(
                q_ptr, out_ptr, failed_ptr, plane, P, row, column, w, SPLIT, NEAR,
                TILE, TILE, BLOCK_K, TO_FP32,
            )  # fmt: skip
        elif row < last:
            _gram_tile(
                q_ptr, out_ptr, failed_ptr, plane, P, row, column, w, SPLIT, NEAR,
                TILE, TILE, BLOCK_K, TO_FP32,
            )  # fmt: skip
        elif column < last:
            _gram_tile(
                q_ptr, out_ptr, failed_ptr, plane, P, row, column, w, SPLIT, NEAR,
                EDGE, TILE, BLOCK_K, TO_FP32,
            )  # fmt: skip
            if not NEAR:
                for start in range(EDGE, TILE, EDGE):
                    _identity_tile(out_ptr, P, row + start, column, EDGE, TILE)
        else:
            _gram_tile(
                q_ptr, out_ptr, failed_ptr, plane, P, row, column, w, SPLIT, NEAR,
                EDGE, EDGE, BLOCK_K, TO_FP32,
            )  # fmt: skip
            if not NEAR:
                for start in range(EDGE, TILE, EDGE):
                    _identity_tile(out_ptr, P, row, column + start, EDGE, EDGE)
                    _identity_tile(out_ptr, P, row + start, column, EDGE, TILE)


@jit
def _eliminate(a, SIZE: tl.constexpr):
    """L^-1 of the Cholesky factor of a [SIZE, SIZE], and whether a pivot was not positive or not finite.

    Such a pivot counts as 1: the rest stays finite if it was. One array takes all: what is left of `a` right
    of column k, whose row k is its column k too, and the inverse's rows, not yet scaled, left of it.
    """
    index = tl.arange(0, SIZE)
    rows, columns = index[:, None], index[None, :]
    bad = 0
    for k in range(SIZE):
        row = tl.sum(tl.where(rows == k, a, 0.0), axis=0)
        pivot = tl.sum(tl.where(index == k, row, 0.0), axis=0)
        good = (pivot > 0.0) & (pivot < float("inf"))
        bad = tl.where(good, bad, 1)
        factor = tl.where(index > k, row / tl.where(good, pivot, 1.0), 0.0)
        row = tl.where(index == k, 1.0, row)
        a = tl.where((columns == k) & (rows > k), 0.0, a) - factor[:, None] * row[None, :]
    pivots = tl.sum(tl.where(rows == columns, a, 0.0), axis=1)
    pivots = tl.where((pivots > 0.0) & (pivots < float("inf")), pivots, 1.0)
    inverse = tl.where(rows == columns, 1.0, tl.where(rows > columns, a, 0.0))
    return inverse / tl.sqrt(pivots)[:, None], bad


@jit
def _ab(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@jit
def _abt(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, tl.trans(b), input_precision=PRECISION)


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
    INVERT: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    TO_FP32: tl.constexpr,
):  # fmt: skip
    """Program 0 of a matrix: the inverse factor of the diagonal tile, which lacks the last panel's part alone
    (without INVERT that part alone: `invert_kernel` follows). The next ones: A[i, panel] - sum over p < panel
    of L[i, p] L[panel, p]^T, i > panel. The next: the same of the next diagonal tile, without its last part.
    The rest: sum over j <= p < panel of L[panel, p] V[p, j], j < panel. Grid: N, and these.
    """
    batch, task = tl.program_id(0).to(tl.int64), tl.program_id(1)
    gram_base, l_base = gram_ptr + batch * P * P, l_ptr + batch * P * P * 2
    below = panels - panel - 1
    others = tl.where(below > 0, below + 2, 1)
    index, steps = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    if task >= others:
        column = task - others
        a_rows = l_base + (panel * TILE + index)[:, None] * (2 * P) + steps[None, :]
        v = l_base + (column * TILE + steps)[:, None] * (2 * P) + index[None, :]
        for start in range(column * TILE, panel * TILE, BLOCK_K):
            within = tl.multiple_of(start % TILE, BLOCK_K)  # the compiler does not see it
            tiles = tl.multiple_of(2 * (start - within), 2 * TILE)
            a_place = a_rows + (tiles + within)
            b_place = v + within * (2 * P) + tiles
            total = _dot3(
                tl.load(a_place), tl.load(a_place + TILE), tl.load(b_place), tl.load(b_place + TILE),
                total, TO_FP32,
            )  # fmt: skip
        out = l_base + (column * TILE + index)[:, None] * (2 * P) + panel * (2 * TILE) + index[None, :]
        _store_split(out, TILE, total)
    else:
        ahead = task == below + 1
        diagonal = ahead | (task == 0)
        row = panel + tl.where(ahead, 1, task)
        column = panel + tl.where(ahead, 1, 0)
        first = tl.where(task == 0, tl.maximum(panel - 1, 0), 0) * TILE
        a_rows = l_base + (row * TILE + index)[:, None] * (2 * P) + steps[None, :]
        b_rows = l_base + (column * TILE + index)[:, None] * (2 * P) + steps[None, :]
        for start in range(first, panel * TILE, BLOCK_K):
            within = tl.multiple_of(start % TILE, BLOCK_K)
            place = tl.multiple_of(2 * (start - within), 2 * TILE) + within
            b, b_low = tl.load(b_rows + place), tl.load(b_rows + place + TILE)
            total = _dot3(
                tl.load(a_rows + place), tl.load(a_rows + place + TILE), tl.trans(b), tl.trans(b_low),
                total, TO_FP32,
            )  # fmt: skip
        old = gram_base + (row * TILE + index)[:, None] * P + (column * TILE + index)[None, :]
        total = tl.load(old) - total
        tl.debug_barrier()  # the planes are written over what was read; a tile is read below in quarters
        if diagonal:
            tl.store(old, total)
            if INVERT:  # noqa: SIM102 (known to the compiler)
                if task == 0:
                    tl.debug_barrier()
                    tile = gram_base + panel * TILE * P + panel * TILE
                    own = d_ptr + (batch * panels + panel) * TILE * TILE
                    if _invert_tile(tile, P, own, d_low, TILE, PRECISION) != 0:
                        tl.store(failed_ptr + batch, 1)
        else:
            out = l_base + (row * TILE + index)[:, None] * (2 * P) + column * (2 * TILE) + index[None, :]
            _store_split(out, TILE, total)


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
    l_ptr, d_ptr, d_low, P, panel, panels,
    TILE: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """In planes, in place: L[i, panel] = A[i, panel] V[panel, panel]^T, i > panel; then V[panel, j] =
    -V[panel, panel] T[panel, j], j < panel, T what `advance_kernel` found; at last V[panel, panel] goes where
    it belongs. Grid: N, panels.
    """
    batch, task = tl.program_id(0).to(tl.int64), tl.program_id(1)
    below = panels - panel - 1
    index, steps = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    row = tl.where(task < below, panel + 1 + task, task - below)
    tile = l_ptr + batch * P * P * 2 + row * TILE * 2 * P + panel * (2 * TILE)
    inverse = d_ptr + (batch * panels + panel) * TILE * TILE
    out = tile + index[:, None] * (2 * P) + index[None, :]
    if row == panel:
        whole = inverse + index[:, None] * TILE + index[None, :]
        tl.store(out, tl.load(whole))
        tl.store(out + TILE, tl.load(whole + d_low))
    else:
        own = inverse + index[:, None] * TILE + steps[None, :]
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        if task < below:
            a_rows = tile + index[:, None] * (2 * P) + steps[None, :]
            for start in range(0, TILE, BLOCK_K):
                b, b_low = tl.load(own + start), tl.load(own + start + d_low)
                total = _dot3(
                    tl.load(a_rows + start), tl.load(a_rows + start + TILE), tl.trans(b), tl.trans(b_low),
                    total, TO_FP32,
                )  # fmt: skip
        else:
            b_rows = tile + steps[:, None] * (2 * P) + index[None, :]
            for start in range(0, TILE, BLOCK_K):
                b_place = b_rows + start * (2 * P)
                total = _dot3(
                    tl.load(own + start), tl.load(own + start + d_low), tl.load(b_place),
                    tl.load(b_place + TILE), total, TO_FP32,
                )  # fmt: skip
            total = -total
        tl.debug_barrier()  # written over what was read
        _store_split(out, TILE, total)


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
        total = _dot3(a, a_low, tl.trans(b), tl.trans(b_low), total, TO_FP32)
    out = q_ptr + batch * P * P + rows[:, None] * P + (first_column + index)[None, :]
    high, low = _split(total)
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
    end = tl.minimum(column + TILE, last + EDGE)
    if EDGE == TILE:
        _orthonormal_tile(
            a_ptr, l_ptr, q_ptr, plane, P, row, column, end, SPLIT, TILE,
            TILE, TILE, BLOCK_K, TO_FP32,
        )  # fmt: skip
    elif row < last:
        if column < last:
            _orthonormal_tile(
                a_ptr, l_ptr, q_ptr, plane, P, row, column, end, SPLIT, TILE,
                TILE, TILE, BLOCK_K, TO_FP32,
            )  # fmt: skip
        else:
            _orthonormal_tile(
                a_ptr, l_ptr, q_ptr, plane, P, row, column, end, SPLIT, TILE,
                TILE, EDGE, BLOCK_K, TO_FP32,
            )  # fmt: skip
    elif column < last:
        _orthonormal_tile(
            a_ptr, l_ptr, q_ptr, plane, P, row, column, end, SPLIT, TILE,
            EDGE, TILE, BLOCK_K, TO_FP32,
        )  # fmt: skip
    else:
        _orthonormal_tile(
            a_ptr, l_ptr, q_ptr, plane, P, row, column, end, SPLIT, TILE,
            EDGE, EDGE, BLOCK_K, TO_FP32,
        )  # fmt: skip


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
            total = _dot3(a, a_low, tl.trans(b), tl.trans(b_low), total, TO_FP32)
        else:
            total = _dot(a, tl.trans(b), total, TO_FP32)
    q = tl.load(q_rows + columns[None, :]).to(tl.float32)
    if SPLIT:
        q += tl.load(q_rows + plane + columns[None, :]).to(tl.float32)
    q -= total
    if LAST:
        out = out_ptr + batch * w * w + rows[:, None] * w + columns[None, :]
        tl.store(out, q.to(out_ptr.dtype.element_ty), (rows < w)[:, None] & (columns < w)[None, :])
    else:
        out = out_ptr + batch * P * P + rows[:, None] * P + columns[None, :]
        high, low = _split(q)
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
    end = tl.minimum(column + TILE, last + EDGE)
    if EDGE == TILE:
        _correct_tile(
            q_ptr, x_ptr, out_ptr, plane, P, row, column, end, w, SPLIT, LAST,
            TILE, TILE, BLOCK_K, TO_FP32,
        )  # fmt: skip
    elif row < last:
        if column < last:
            _correct_tile(
                q_ptr, x_ptr, out_ptr, plane, P, row, column, end, w, SPLIT, LAST,
                TILE, TILE, BLOCK_K, TO_FP32,
            )  # fmt: skip
        else:
            _correct_tile(
                q_ptr, x_ptr, out_ptr, plane, P, row, column, end, w, SPLIT, LAST,
                TILE, EDGE, BLOCK_K, TO_FP32,
            )  # fmt: skip
    elif column < last:
        _correct_tile(
            q_ptr, x_ptr, out_ptr, plane, P, row, column, end, w, SPLIT, LAST,
            EDGE, TILE, BLOCK_K, TO_FP32,
        )  # fmt: skip
    else:
        _correct_tile(
            q_ptr, x_ptr, out_ptr, plane, P, row, column, end, w, SPLIT, LAST,
            EDGE, EDGE, BLOCK_K, TO_FP32,
        )  # fmt: skip


@jit
def restore_kernel(failed_ptr, old_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    """Failed (or chosen) blocks get what they had (or are to have). Grid: N, parts of a block."""
    batch = tl.program_id(0).to(tl.int64)
    if tl.load(failed_ptr + batch) != 0:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        old = tl.load(old_ptr + batch * numel + place, place < numel, other=0.0)
        tl.store(out_ptr + batch * numel + place, old, place < numel)
