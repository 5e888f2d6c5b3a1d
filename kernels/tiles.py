"""What all kernels do with one tile of gradient in registers: decode, apply the epilogue, encode, store.

A tile is R rows by C columns (C a multiple of 64) of a tensor's matrix view. Kernels describe it by the
element offset of its origin (`base`, int64 scalar) and the offsets inside it (`off`, [R, C]), the same for
its block scales (`scale_base`, `scale_off` [R, C // 64]), masks, and the coordinates for random bits (`row`
[R, 1], `call` [R or 1, C // 8]: the first column / 8 and counting). Codecs are compile-time bit fields
(`Codec.code`).
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false
from __future__ import annotations

from titanforge.kernels._triton import constant, jit, tl
from titanforge.kernels.codec_arithmetic import (
    BLOCKWISE,
    INTERPRETED,
    KIND,
    RANDOM,
    ROOT,
    TENSORWISE,
    block_codes,
    block_scales,
    decode_codes,
    fp8_codes,
    largest_of,
    plain_codes,
    root,
    scaled,
)
from titanforge.kernels.philox import lanes, random_words

LARGEST = constant(3.4028234663852886e38)


@jit
def load(pointers, mask, MASKED: tl.constexpr):
    # Weights and states are read once per step: keep the operands in L2 instead.
    if MASKED:
        return tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    else:
        return tl.load(pointers, eviction_policy="evict_first")


@jit
def decode_tile(
    ptr,
    meta_ptr,
    base,
    off,
    mask,
    scale_base,
    scale_off,
    scale_mask,
    CODEC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """fp32 [R, C] of a stored tile; masked-out elements are 0."""
    x = decode_codes(load(ptr + base + off, mask, MASKED), CODEC)
    if (CODEC & KIND) == BLOCKWISE:
        scale = load(meta_ptr + scale_base + scale_off, scale_mask, MASKED)
        rows: tl.constexpr = x.shape[0]
        columns: tl.constexpr = x.shape[1]
        blocks = scaled(tl.reshape(x, (rows, columns // 64, 64)), scale[:, :, None], CODEC)
        x = tl.reshape(blocks, (rows, columns))
    elif (CODEC & KIND) == TENSORWISE:
        x = scaled(x, tl.load(meta_ptr), CODEC)
    return x


@jit
def store(pointers, value, mask):
    tl.store(pointers, value, mask=mask, eviction_policy="evict_first")


@jit
def encode_tile(
    x, lane, ptr, meta_ptr, base, off, mask, write, scale_base, scale_off, scale_mask,
    CODEC: tl.constexpr, MASKED: tl.constexpr, OBSERVE: tl.constexpr,
):  # fmt: skip
    """Store fp32 [R, C] if `write` (an int32 scalar) is not 0. lane: one of `philox.lanes`, where it rounds
    at random.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    if CODEC & ROOT:
        x = root(x)
    # As a tile of one element: the interpreter cannot combine a scalar truth value with a mask.
    stored = tl.full([1, 1], write, tl.int32) != 0
    stored_scale = stored
    if MASKED:
        stored = mask & stored
        stored_scale = scale_mask & stored_scale
    if (CODEC & KIND) == BLOCKWISE:
        if not OBSERVE:
            if MASKED:
                x = tl.where(mask, x, 0.0)
            blocks = tl.reshape(x, (rows, columns // 64, 64))
            factor, scale = block_scales(largest_of(blocks, 2, CODEC), CODEC)
            if CODEC & RANDOM:
                lane = tl.reshape(lane, (rows, columns // 64, 64))
            codes = block_codes(blocks, factor[:, :, None], lane, CODEC)
            store(ptr + base + off, tl.reshape(codes, (rows, columns)), stored)
            store(meta_ptr + scale_base + scale_off, scale, stored_scale)
    elif (CODEC & KIND) == TENSORWISE:
        if MASKED:
            x = tl.where(mask, x, 0.0)
        largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
        tl.atomic_max(meta_ptr + 2, largest, mask=write != 0)
        if not OBSERVE:
            store(ptr + base + off, fp8_codes(x, tl.load(meta_ptr + 1), CODEC), stored)
    elif not OBSERVE:
        store(ptr + base + off, plain_codes(x, lane, CODEC), stored)


@jit
def larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def count_nonfinite(g):
    """1 if any element of the tile is infinite or NaN, else 0."""
    if INTERPRETED:
        bad = tl.where(tl.abs(g) <= LARGEST, 0, 1)
        return tl.max(tl.max(bad, axis=1), axis=0)
    else:
        # One comparison a number, where a test and a choice of each would be three instructions.
        largest = tl.reduce(tl.reduce(tl.abs(g), 1, larger_or_nan), 0, larger_or_nan)
        return tl.where(largest <= LARGEST, 0, 1)


@jit
def update_tile(
    g, good, base, off, mask, scale_base, scale_off, scale_mask, row, call,
    w_ptr, w_meta_ptr, master_ptr, s0_ptr, s0_meta_ptr, s1_ptr, s1_meta_ptr, h_ptr, rng_ptr, tensor_id,
    EPILOGUE: tl.constexpr, SLOTS: tl.constexpr, WEIGHT: tl.constexpr, MASTER: tl.constexpr,
    W_CODEC: tl.constexpr, S0_CODEC: tl.constexpr, S1_CODEC: tl.constexpr,
    STOCHASTIC: tl.constexpr, MASKED: tl.constexpr, OBSERVE: tl.constexpr,
):  # fmt: skip
    """One tile of one step. good: int32 scalar, 1 if the gradient that this tile comes from is finite.

    MASTER: the epilogue reads and writes the fp32 master, and the weight gets an encoded copy of it.
    OBSERVE: nothing is stored, only the magnitudes of fp8 tensors are collected.
    """
    apply = (tl.load(h_ptr) != 0).to(tl.int32)
    write = apply * good
    is_good = tl.full([1, 1], good, tl.int32) != 0
    if WEIGHT:
        if MASTER:
            w = load(master_ptr + base + off, mask, MASKED)
        else:
            w = decode_tile(
                w_ptr, w_meta_ptr, base, off, mask, scale_base, scale_off, scale_mask, W_CODEC, MASKED
            )
    else:
        w = g
    if SLOTS >= 1:
        s0 = decode_tile(
            s0_ptr, s0_meta_ptr, base, off, mask, scale_base, scale_off, scale_mask, S0_CODEC, MASKED
        )
    else:
        s0 = g
    if SLOTS >= 2:
        s1 = decode_tile(
            s1_ptr, s1_meta_ptr, base, off, mask, scale_base, scale_off, scale_mask, S1_CODEC, MASKED
        )
    else:
        s1 = g
    w_new, s0_new, s1_new = EPILOGUE(g, w, s0, s1, h_ptr)

    if STOCHASTIC:
        w_lane, s0_lane, s1_lane = lanes(random_words(rng_ptr, tensor_id, row, call), 0)
    else:
        w_lane = 0
        s0_lane = 0
        s1_lane = 0
    if WEIGHT:
        if MASTER and not OBSERVE:
            stored = tl.full([1, 1], write, tl.int32) != 0
            if MASKED:
                stored = mask & stored
            store(master_ptr + base + off, w_new, stored)
        w_write = write
        if (W_CODEC & KIND) == TENSORWISE:
            # The scale of the whole tensor moves, so an unapplied tile must be written again under the new
            # one.
            w_new = tl.where(is_good, w_new, w)
            w_write = apply
        encode_tile(
            w_new, w_lane, w_ptr, w_meta_ptr, base, off, mask, w_write, scale_base, scale_off, scale_mask,
            W_CODEC, MASKED, OBSERVE,
        )  # fmt: skip
    if SLOTS >= 1:
        s0_write = write
        if (S0_CODEC & KIND) == TENSORWISE:
            s0_new = tl.where(is_good, s0_new, s0)
            s0_write = apply
        encode_tile(
            s0_new, s0_lane, s0_ptr, s0_meta_ptr, base, off, mask, s0_write, scale_base, scale_off,
            scale_mask,
            S0_CODEC, MASKED, OBSERVE,
        )  # fmt: skip
    if SLOTS >= 2:
        s1_write = write
        if (S1_CODEC & KIND) == TENSORWISE:
            s1_new = tl.where(is_good, s1_new, s1)
            s1_write = apply
        encode_tile(
            s1_new, s1_lane, s1_ptr, s1_meta_ptr, base, off, mask, s1_write, scale_base, scale_off,
            scale_mask,
            S1_CODEC, MASKED, OBSERVE,
        )  # fmt: skip
