"""Triton kernels of Dobb's step: M <- mu M + gain G, then W <- (1 - lr wd) W - lr s sign(M U) U^T.

One launch works on many weights of one shape, from a table of addresses, int64 [weights, 5]: momentum, bases,
weight, its rounded copy, gradient. A program has rows of a whole block: what of them was read is never read
again from memory, and signs stay on the chip. Two forms, by the width of a block:

- `narrow_step_kernel`: the block and its basis fit into one tile. Signs stay in registers.
- `wide_step_kernel`: products go tile by tile, through each program's own rows of `sign_ptr`, which are few
  enough for the L2 cache to hold.

The width is known when a kernel is compiled: the columns of a block begin at multiples of it, and only a
known one tells the compiler how many bytes it may load at once.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from titanforge.kernels._triton import jit, tl
from titanforge.kernels.codec_arithmetic import INTERPRETED, to_bf16
from titanforge.kernels.epilogues import minus_product, momentum_state
from titanforge.kernels.planes import dot, dot2, split
from titanforge.kernels.tiles import LARGEST, larger_or_nan


@jit
def _rounded(x, TYPE: tl.constexpr):
    if TYPE == tl.bfloat16:  # noqa: SIM300 (of the argument, not of the constant)
        return to_bf16(x)
    return x.to(TYPE)


@jit
def _address(entry, FIELD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(entry + FIELD).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _places(
    entry, first, block, n, w: tl.constexpr,
    M_TYPE: tl.constexpr, W_TYPE: tl.constexpr, COPY_TYPE: tl.constexpr, G_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Where a block's momentum, basis, weight, copy and gradient begin, all but the basis at row `first`."""
    here = first.to(tl.int64) * n + block * w
    m_ptr = _address(entry, 0, M_TYPE, ALIGNED) + here
    u_ptr = _address(entry, 1, tl.bfloat16, ALIGNED) + block.to(tl.int64) * w * w
    w_ptr = _address(entry, 2, W_TYPE, ALIGNED) + here
    copy_ptr = _address(entry, 3, COPY_TYPE, ALIGNED) + here
    g_ptr = _address(entry, 4, G_TYPE, ALIGNED) + here
    return m_ptr, u_ptr, w_ptr, copy_ptr, g_ptr


@jit
def _sign(x):
    """-1, 0 or 1 in bf16, exactly; 0 of a NaN. By bits, which takes fewer instructions."""
    bits = (x.to(tl.uint32, bitcast=True) & 0x80000000) | 0x3F800000
    return tl.where(tl.abs(x) > 0, bits.to(tl.float32, bitcast=True), 0.0).to(tl.bfloat16)


@jit
def _widened(x):
    """fp32 of what is stored. In instructions of its own, which also keep the compiler from choosing among
    bf16 values one by one, where it can round two at once.
    """
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=r,=r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@jit
def _with_gradient(old, g, h, M_TYPE: tl.constexpr):
    """The momentum with the gradient in it, as it is stored; as it was where the gradient is not finite."""
    m = _widened(old)
    _, new, _ = momentum_state(g, m, m, m, h)
    return _rounded(tl.where(tl.abs(g) <= LARGEST, new, m), M_TYPE)


@jit
def _largest(worst, g, SLICES: tl.constexpr):
    """The largest of each element of `worst` [rows / SLICES, columns] and of those of |g| at its place in a
    slice: a thread has them all, so that no other is waited for.
    """
    rows: tl.constexpr = g.shape[0]
    columns: tl.constexpr = g.shape[1]
    if INTERPRETED:
        g = tl.where(tl.abs(g) <= LARGEST, g, float("inf"))
    slices = tl.reshape(tl.abs(g), (SLICES, rows // SLICES, columns))
    if INTERPRETED:
        return tl.maximum(worst, tl.max(slices, axis=0))
    return larger_or_nan(worst, tl.reduce(slices, 0, larger_or_nan))


@jit
def _count(worst, nonfinite_ptr):
    if INTERPRETED:
        bad = tl.max(tl.max(tl.where(worst <= LARGEST, 0, 1), axis=1), axis=0)
    else:
        worst = tl.reduce(tl.reduce(worst, 1, larger_or_nan), 0, larger_or_nan)
        bad = tl.where(worst <= LARGEST, 0, 1)
    tl.atomic_add(nonfinite_ptr, bad, mask=bad > 0)


@jit
def product(m, u, total, M_SPLIT: tl.constexpr, TO_FP32: tl.constexpr):
    """total + M U. M_SPLIT: M as two bf16 planes: the sign is that of the fp32 product but within 2^-16."""
    if M_SPLIT:
        high, low = split(m)
        return dot2(high, low, u, total, TO_FP32)
    return dot(m.to(tl.bfloat16), u, total, TO_FP32)


@jit
def _moved(old, update, scale, h):
    old = _widened(old)
    return minus_product(minus_product(old, h[1] * h[2], old), h[1] * scale, update)


@jit(unspecialized=("scale",))
def narrow_step_kernel(
    table_ptr, h_ptr, nonfinite_ptr, scale, m, n, w: tl.constexpr,
    G_TYPE: tl.constexpr, GRADIENT: tl.constexpr, M_TYPE: tl.constexpr, M_SPLIT: tl.constexpr,
    W_TYPE: tl.constexpr, COPY_TYPE: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
    MASK_ROWS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
    KEPT: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """Blocks w <= WIDTH. A program reads U once for TILES tiles of rows. GRADIENT: the momentum takes it
    first; else it has. Grid: these, blocks, weights.
    """
    block, entry = tl.program_id(1), table_ptr + 5 * tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * ROWS * TILES
    # Before the flag is looked at, so that one wait is for both.
    m_ptr, u_ptr, w_ptr, copy_ptr, g_ptr = _places(
        entry, first, block, n, w, M_TYPE, W_TYPE, COPY_TYPE, G_TYPE, ALIGNED
    )
    if tl.load(h_ptr) != 0:
        h = (
            1.0, tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3), tl.load(h_ptr + 4),
            tl.load(h_ptr + 5),
        )  # fmt: skip
        columns, steps = tl.arange(0, WIDTH), tl.arange(0, WIDTH)
        u_inside = (steps < w)[:, None] & (columns < w)[None, :]
        u = tl.load(u_ptr + steps[:, None] * w + columns[None, :], u_inside, other=0.0)
        worst = tl.zeros((KEPT, WIDTH), dtype=tl.float32)
        for start in range(0, tl.minimum(ROWS * TILES, m - first), ROWS):
            rows = start + tl.arange(0, ROWS)
            inside = (columns < w)[None, :]
            if MASK_ROWS:
                inside = inside & (first + rows < m)[:, None]
            places = rows[:, None] * n + columns[None, :]
            value = tl.load(m_ptr + places, inside, other=0.0)
            if GRADIENT:
                g = tl.load(g_ptr + places, inside, other=0.0)
            old = tl.load(w_ptr + places, inside, other=0.0)  # arrives while the products run
            if GRADIENT:
                g = _widened(g)
                worst = _largest(worst, g, ROWS // KEPT)
                value = _with_gradient(value, g, h, M_TYPE)
                tl.store(m_ptr + places, value, inside)
            total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
            total = product(value, u, total, M_SPLIT, TO_FP32)
            sign = _sign(total)
            total = dot(sign, tl.trans(u), tl.zeros((ROWS, WIDTH), dtype=tl.float32), TO_FP32)
            moved = _moved(old, total, scale, h)
            tl.store(w_ptr + places, moved.to(W_TYPE), inside)
            if COPY:
                tl.store(copy_ptr + places, moved.to(COPY_TYPE), inside)
        if GRADIENT:
            _count(worst, nonfinite_ptr)


@jit(unspecialized=("scale",))
def wide_step_kernel(
    table_ptr, sign_ptr, h_ptr, nonfinite_ptr, scale, m, n, weights, w: tl.constexpr,
    G_TYPE: tl.constexpr, GRADIENT: tl.constexpr, M_TYPE: tl.constexpr, M_SPLIT: tl.constexpr,
    W_TYPE: tl.constexpr, COPY_TYPE: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
    MASK_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, KEPT: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """The same of wider blocks. A program takes tiles of ROWS rows of a block in turn, in three passes: the
    momentum takes the gradient; signs go to its own part of `sign_ptr`, [programs, ROWS, w rounded up to
    BLOCK_K]; weights move. Grid: as many programs as run at once.
    """
    if tl.load(h_ptr) != 0:
        h = (
            1.0, tl.load(h_ptr + 1), tl.load(h_ptr + 2), tl.load(h_ptr + 3), tl.load(h_ptr + 4),
            tl.load(h_ptr + 5),
        )  # fmt: skip
        WIDTH: tl.constexpr = (w + BLOCK_K - 1) // BLOCK_K * BLOCK_K
        row_tiles, blocks = tl.cdiv(m, ROWS), n // w
        local = tl.arange(0, ROWS)
        own = sign_ptr + tl.program_id(0).to(tl.int64) * (ROWS * WIDTH)
        sign_rows = own + local[:, None] * WIDTH
        worst = tl.zeros((KEPT, CHUNK), dtype=tl.float32)
        for tile in range(tl.program_id(0), row_tiles * blocks * weights, tl.num_programs(0)):
            first = (tile % row_tiles) * ROWS
            block = (tile // row_tiles) % blocks
            entry = table_ptr + 5 * (tile // (row_tiles * blocks)).to(tl.int64)
            m_ptr, u_ptr, w_ptr, copy_ptr, g_ptr = _places(
                entry, first, block, n, w, M_TYPE, W_TYPE, COPY_TYPE, G_TYPE, ALIGNED
            )
            if MASK_ROWS:
                row_inside = (first + local < m)[:, None]
            else:
                row_inside = (local < ROWS)[:, None]
            if GRADIENT:
                for start in tl.range(0, w, CHUNK, num_stages=3):
                    columns = start + tl.arange(0, CHUNK)
                    inside = row_inside & (columns < w)[None, :]
                    places = local[:, None] * n + columns[None, :]
                    g = _widened(tl.load(g_ptr + places, inside, other=0.0, eviction_policy="evict_first"))
                    value = tl.load(m_ptr + places, inside, other=0.0)
                    worst = _largest(worst, g, ROWS // KEPT)
                    tl.store(m_ptr + places, _with_gradient(value, g, h, M_TYPE), inside)
            # What other threads have written is read, and signs go over those of the last tile.
            tl.debug_barrier()
            for start in range(0, w, COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
                for first_step in range(0, w, BLOCK_K):
                    steps = first_step + tl.arange(0, BLOCK_K)
                    inside = row_inside & (steps < w)[None, :]
                    value = tl.load(m_ptr + local[:, None] * n + steps[None, :], inside, other=0.0)
                    u_inside = (steps < w)[:, None] & (columns < w)[None, :]
                    u = tl.load(u_ptr + steps[:, None] * w + columns[None, :], u_inside, other=0.0)
                    total = product(value, u, total, M_SPLIT, TO_FP32)
                tl.store(sign_rows + columns[None, :], _sign(total), (columns < WIDTH)[None, :])
            tl.debug_barrier()
            for start in range(0, w, COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                inside = row_inside & (columns < w)[None, :]
                places = local[:, None] * n + columns[None, :]
                # Arrives while the products run; what others read again stays in the cache in its place.
                old = tl.load(w_ptr + places, inside, other=0.0, eviction_policy="evict_first")
                total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
                for first_step in range(0, w, BLOCK_K):
                    steps = first_step + tl.arange(0, BLOCK_K)
                    sign = tl.load(sign_rows + steps[None, :])
                    u_inside = (columns < w)[:, None] & (steps < w)[None, :]
                    u = tl.load(u_ptr + columns[:, None] * w + steps[None, :], u_inside, other=0.0)
                    total = dot(sign, tl.trans(u), total, TO_FP32)
                moved = _moved(old, total, scale, h)
                tl.store(w_ptr + places, moved.to(W_TYPE), inside)
                if COPY:
                    tl.store(copy_ptr + places, moved.to(COPY_TYPE), inside)
        if GRADIENT:
            _count(worst, nonfinite_ptr)
