"""Triton kernels that factorise the Gram matrices of the batched Cholesky QR: L below the diagonal, V = L^-1
on it and above, as `cholesky_qr_kernel` says they lie.

A panel is two launches: `advance_kernel` inverts the diagonal tile, and at the same time brings all that the
panel's columns of L and rows of V need up to date; `scale_kernel` multiplies these by the inverse. Or three:
`invert_kernel` then takes the diagonal tiles.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from titanforge.kernels._triton import jit, tl
from titanforge.kernels.planes import dot3, store_split


@jit
def eliminate(a, SIZE: tl.constexpr, R: tl.constexpr):
    """L^-1 of the Cholesky factor of a [SIZE, SIZE], and whether a pivot was not positive or not finite.
    Only the first R rows and columns count; what `a` has of others is 0.

    Such a pivot counts as 1: the rest stays finite if it was. One array takes all: what is left of `a` right
    of column k, whose row k is its column k too, and the inverse's rows, not yet scaled, left of it.
    """
    index = tl.arange(0, SIZE)
    rows, columns = index[:, None], index[None, :]
    bad = 0
    for k in range(R):
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
        inverse, failed = eliminate(own, SIZE, SIZE)
        bad += failed
        tl.debug_barrier()
        tl.store(piece + s * down + s * SIZE, inverse)
        store_split(out + s * SIZE * TILE + s * SIZE, d_low, inverse)
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
            store_split(out + s * SIZE * TILE + t * SIZE, d_low, value)
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
            total = dot3(
                tl.load(a_place), tl.load(a_place + TILE), tl.load(b_place), tl.load(b_place + TILE),
                total, TO_FP32,
            )  # fmt: skip
        out = l_base + (column * TILE + index)[:, None] * (2 * P) + panel * (2 * TILE) + index[None, :]
        store_split(out, TILE, total)
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
            total = dot3(
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
            store_split(out, TILE, total)


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
                total = dot3(
                    tl.load(a_rows + start), tl.load(a_rows + start + TILE), tl.trans(b), tl.trans(b_low),
                    total, TO_FP32,
                )  # fmt: skip
        else:
            b_rows = tile + steps[:, None] * (2 * P) + index[None, :]
            for start in range(0, TILE, BLOCK_K):
                b_place = b_rows + start * (2 * P)
                total = dot3(
                    tl.load(own + start), tl.load(own + start + d_low), tl.load(b_place),
                    tl.load(b_place + TILE), total, TO_FP32,
                )  # fmt: skip
            total = -total
        tl.debug_barrier()  # written over what was read
        store_split(out, TILE, total)
