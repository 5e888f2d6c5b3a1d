"""The weight-gradient mainloop: G = dyᵀ x in fp32 registers, then whatever is to be done with it there.

Algorithm 1 of the FORGE paper. `wgrad` holds the functions that launch it.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false
from __future__ import annotations

from titanforge.kernels._triton import jit, tl
from titanforge.kernels.tiles import count_nonfinite, update_tile


@jit
def tile_of(program, tiles_n, tiles_k, GROUP: tl.constexpr):
    """Order of tiles: GROUP rows of tiles at a time, so that neighbours in time share operand slabs in L2."""
    per_group = GROUP * tiles_k
    first = (program // per_group) * GROUP
    height = tl.minimum(tiles_n - first, GROUP)
    inside = program % per_group
    return first + inside % height, inside // height


@jit
def prefetch_rows(pointers):
    """Ask for cache lines in L2 without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def prefetch_tile(ptr, base, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LINE: tl.constexpr):
    count: tl.constexpr = COLUMNS // LINE if COLUMNS > LINE else 1
    rows = tl.arange(0, ROWS)[:, None]
    lines = tl.arange(0, count)[None, :] * LINE
    prefetch_rows(ptr + base + rows * K + lines)


@jit(unspecialized=("tensor_id", "T"))
def wgrad_kernel(
    dy_ptr, x_ptr, offsets_ptr, gradient_ptr, bias_gradient_ptr, norm_ptr, nonfinite_ptr,
    w_ptr, w_meta_ptr, master_ptr, s0_ptr, s0_meta_ptr, s1_ptr, s1_meta_ptr, h_ptr, rng_ptr, tensor_id,
    N, K, T, dy_stride_t, dy_stride_n, x_stride_t, x_stride_k,
    EPILOGUE: tl.constexpr, SLOTS: tl.constexpr, WEIGHT: tl.constexpr, MASTER: tl.constexpr,
    W_CODEC: tl.constexpr, S0_CODEC: tl.constexpr, S1_CODEC: tl.constexpr, STOCHASTIC: tl.constexpr,
    STORE_GRADIENT: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    COUNT: tl.constexpr, OBSERVE: tl.constexpr, TO_FP32: tl.constexpr, PRECISION: tl.constexpr,
    MASK_T: tl.constexpr, MASK_N: tl.constexpr, MASK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_N, BLOCK_K] tile of one weight (or one expert's).

    dy: [T, N], x: [T, K], any strides. Weight, master, states: [N, K] contiguous, or [E, N, K] with offsets
    [E + 1], the first token of each expert. gradient (STORE_GRADIENT): fp32 [N, K] or [E, N, K], instead of
    an update. norm: fp32 [tiles], the sum of squares of each tile. nonfinite: int32 [1], counts tiles left
    unapplied. TO_FP32: cast operands before the dot (mixed dtypes; and the interpreter, whose bf16 products
    are wrong).
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    program = tl.program_id(0)
    if GROUPED:
        expert = program // (tiles_n * tiles_k)
        i, j = tile_of(program % (tiles_n * tiles_k), tiles_n, tiles_k, GROUP)
        first_token = tl.load(offsets_ptr + expert).to(tl.int64)
        tokens = (tl.load(offsets_ptr + expert + 1).to(tl.int64) - first_token).to(tl.int32)
        first_row = expert.to(tl.int64) * N + i * BLOCK_N
        dy_ptr += first_token * dy_stride_t
        x_ptr += first_token * x_stride_t
    else:
        i, j = tile_of(program, tiles_n, tiles_k, GROUP)
        tokens = T
        first_row = i.to(tl.int64) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_inside = (i * BLOCK_N + n) < N
    k_inside = (j * BLOCK_K + k) < K
    base = first_row * K + j * BLOCK_K

    if PREFETCH:
        # The epilogue's reads travel to L2 while the mainloop runs. 64 bf16 or 32 fp32 are a line of 128
        # bytes.
        if WEIGHT:
            if MASTER:
                prefetch_tile(master_ptr, base, K, BLOCK_N, BLOCK_K, 32)
            else:
                prefetch_tile(
                    w_ptr, base, K, BLOCK_N, BLOCK_K, 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
                )
        if SLOTS >= 1:
            prefetch_tile(
                s0_ptr, base, K, BLOCK_N, BLOCK_K, 1024 // s0_ptr.dtype.element_ty.primitive_bitwidth
            )
        if SLOTS >= 2:
            prefetch_tile(
                s1_ptr, base, K, BLOCK_N, BLOCK_K, 1024 // s1_ptr.dtype.element_ty.primitive_bitwidth
            )

    t = tl.arange(0, BLOCK_T)
    dy_tile = (
        dy_ptr
        + i.to(tl.int64) * BLOCK_N * dy_stride_n
        + (t[:, None] * dy_stride_t + n[None, :] * dy_stride_n)
    )
    x_tile = (
        x_ptr + j.to(tl.int64) * BLOCK_K * x_stride_k + (t[:, None] * x_stride_t + k[None, :] * x_stride_k)
    )
    dy_step = tl.cast(dy_stride_t, tl.int64) * BLOCK_T
    x_step = tl.cast(x_stride_t, tl.int64) * BLOCK_T
    g = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if BIAS:
        bias_gradient = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, tokens, BLOCK_T):
        if MASK_T:
            t_inside = t[:, None] < tokens - start
            if MASK_N:
                dy = tl.load(dy_tile, mask=t_inside & n_inside[None, :], other=0.0)
            else:
                dy = tl.load(dy_tile, mask=t_inside, other=0.0)
            if MASK_K:
                x = tl.load(x_tile, mask=t_inside & k_inside[None, :], other=0.0)
            else:
                x = tl.load(x_tile, mask=t_inside, other=0.0)
        else:
            if MASK_N:
                dy = tl.load(dy_tile, mask=n_inside[None, :], other=0.0)
            else:
                dy = tl.load(dy_tile)
            if MASK_K:
                x = tl.load(x_tile, mask=k_inside[None, :], other=0.0)
            else:
                x = tl.load(x_tile)
        if BIAS:
            bias_gradient += tl.sum(dy.to(tl.float32), axis=0)
        if TO_FP32:
            dy = dy.to(tl.float32)
            x = x.to(tl.float32)
        g = tl.dot(tl.trans(dy), x, g, input_precision=PRECISION)
        dy_tile += dy_step
        x_tile += x_step

    if BIAS:
        tl.store(bias_gradient_ptr + first_row + n, bias_gradient, mask=n_inside & (n * 0 + j == 0))
    if NORM:
        tl.store(norm_ptr + program, tl.sum(tl.sum(g * g, axis=1), axis=0))
    if STORE_GRADIENT:
        target = gradient_ptr + base + (n[:, None] * K + k[None, :])
        if MASK_N or MASK_K:
            tl.store(target, g, mask=n_inside[:, None] & k_inside[None, :])
        else:
            tl.store(target, g)
    else:
        bad = count_nonfinite(g)
        if COUNT and not OBSERVE:
            tl.atomic_add(nonfinite_ptr, bad, mask=(bad > 0) & (tl.load(h_ptr) != 0))
        masked: tl.constexpr = MASK_N or MASK_K
        # A tile is taken in SPLIT pieces side by side, so that fewer registers hold states at a time.
        width: tl.constexpr = BLOCK_K // SPLIT
        if SPLIT == 1:
            pieces = (g,)
        elif SPLIT == 2:
            pieces = g.reshape(BLOCK_N, 2, width).permute(0, 2, 1).split()
        else:
            left, right = g.reshape(BLOCK_N, 2, 2 * width).permute(0, 2, 1).split()
            g0, g1 = left.reshape(BLOCK_N, 2, width).permute(0, 2, 1).split()
            g2, g3 = right.reshape(BLOCK_N, 2, width).permute(0, 2, 1).split()
            pieces = (g0, g1, g2, g3)
        blocks = tl.cdiv(K, 64)
        kk = tl.arange(0, width)
        row = first_row + n[:, None]
        for piece in tl.static_range(SPLIT):
            column = j * BLOCK_K + piece * width
            block = tl.arange(0, width // 64)
            update_tile(
                pieces[piece], 1 - bad, base + piece * width, n[:, None] * K + kk[None, :],
                n_inside[:, None] & (column + kk < K)[None, :],
                first_row * blocks + column // 64, n[:, None] * blocks + block[None, :],
                n_inside[:, None] & (column // 64 + block < blocks)[None, :],
                row, column // 8 + tl.arange(0, width // 8)[None, :],
                w_ptr, w_meta_ptr, master_ptr, s0_ptr, s0_meta_ptr, s1_ptr, s1_meta_ptr, h_ptr, rng_ptr,
                tensor_id,
                EPILOGUE, SLOTS, WEIGHT, MASTER, W_CODEC, S0_CODEC, S1_CODEC, STOCHASTIC, masked, OBSERVE,
            )  # fmt: skip
