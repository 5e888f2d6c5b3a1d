"""Slices between shared memory and registers in the layout of an accumulator, for the ping-pong form.

In that layout a thread has pairs of neighbouring columns. Byte codes are loaded, decoded, encoded and stored
pair by pair: one by one, the compiler spends an instruction on each to part them, and another to join them
again.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false, reportIndexIssue=false
from __future__ import annotations

from titanforge.kernels.codec_arithmetic import (
    BLOCKWISE,
    FLOORED,
    FORM,
    KIND,
    RANDOM,
    ROOT,
    ROUND_TO_INTEGER,
    TENSORWISE,
    block_rounded,
    block_scales,
    fp8_scaled,
    root,
    scaled,
)
from titanforge.kernels.gluon._gluon import gl, jit, reinterpret
from titanforge.kernels.gluon.slices import decode, encode


@jit
def pair_view(buf):
    """Codes of a byte in shared memory, [64, 64], as [64, 32] pairs of neighbours."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    return reinterpret(buf, gl.int16, [64, 32], SHARED)


@jit
def decode_pairs(pairs, CODEC: gl.constexpr):
    """fp32 of the lower and of the upper codes, as `codec_arithmetic.decode_codes` has them."""
    if (CODEC & KIND) == TENSORWISE:
        if (CODEC & FORM) == 0:
            asm: gl.constexpr = """{ .reg .b32 t; .reg .b16 a, b; cvt.rn.f16x2.e4m3x2 t, $2;
                mov.b32 {a, b}, t; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"""
        else:
            asm: gl.constexpr = """{ .reg .b32 t; .reg .b16 a, b; cvt.rn.f16x2.e5m2x2 t, $2;
                mov.b32 {a, b}, t; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"""
    elif (CODEC & ROOT) != 0:
        asm: gl.constexpr = """{ .reg .b32 t; cvt.u32.u16 t, $2; prmt.b32 $0, t, 0x4B000000, 0x7440;
            prmt.b32 $1, t, 0x4B000000, 0x7441; }"""
    elif (CODEC & FORM) != 0:
        asm: gl.constexpr = """{ .reg .b32 t; cvt.u32.u16 t, $2; dp4a.u32.u32 $0, t, 1, 0x4B400000;
            dp4a.u32.u32 $1, t, 0x100, 0x4B400000; }"""
    elif (CODEC & RANDOM) == 0:
        asm: gl.constexpr = """{ .reg .b32 t; cvt.u32.u16 t, $2; dp4a.s32.s32 $0, t, 1, 0x4B400000;
            dp4a.s32.s32 $1, t, 0x100, 0x4B400000; }"""
    else:  # needs fewer registers, of which random rounding leaves too few
        asm: gl.constexpr = """{ .reg .b32 t, u; cvt.u32.u16 t, $2; cvt.s32.s8 u, t; cvt.rn.f32.s32 $0, u;
            bfe.s32 u, t, 8, 8; cvt.rn.f32.s32 $1, u; }"""
    low, high = gl.inline_asm_elementwise(
        asm, "=r,=r,h", [pairs], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    if (CODEC & KIND) == BLOCKWISE and (CODEC & ROOT) == 0 and ((CODEC & FORM) != 0 or (CODEC & RANDOM) == 0):
        low = low - ROUND_TO_INTEGER
        high = high - ROUND_TO_INTEGER
    return low, high


@jit
def encode_pairs(y, CODEC: gl.constexpr):
    """Pairs of codes of fp32 [64, 64] that `block_rounded` or `fp8_scaled` of `codec_arithmetic` gave."""
    if (CODEC & KIND) == BLOCKWISE:
        asm: gl.constexpr = "{ .reg .b32 t; prmt.b32 t, $1, $2, 0x0040; cvt.u16.u32 $0, t; }"
    elif (CODEC & FORM) == 0:
        asm: gl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
    else:
        asm: gl.constexpr = "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;"
    low, high = y.reshape((64, 32, 2)).split()
    return gl.inline_asm_elementwise(asm, "=h,r,r", [low, high], dtype=gl.int16, is_pure=True, pack=1)


@jit
def largest_so_far(x, CODEC: gl.constexpr):
    """Magnitudes of fp32 [64, 64] that each thread met: [64, 4], without a word between threads.

    As a tree: one after the other, each comparison waits for the one before.
    """
    y = x.to(gl.int32, bitcast=True) if CODEC & FLOORED else gl.abs(x)
    low, high = y.reshape((64, 32, 2)).split()
    low, high = gl.maximum(low, high).reshape((64, 2, 4, 4)).permute((0, 2, 3, 1)).split()
    low, high = gl.maximum(low, high).reshape((64, 2, 2, 4)).permute((0, 2, 3, 1)).split()
    return gl.cast(gl.max(gl.maximum(low, high), axis=1), gl.float32, bitcast=True)


@jit
def row_largest(x, CODEC: gl.constexpr):
    """`codec_arithmetic.largest_of` each row of fp32 [64, 64]."""
    largest = gl.max(largest_so_far(x, CODEC), axis=1)
    return gl.convert_layout(largest, gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@jit
def load_pairs(buf, CODEC: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 [64, 64] of the codes of a byte that lie in shared memory, without their scale."""
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]],
        [], [64, 32],
    )  # fmt: skip
    low, high = decode_pairs(pair_view(buf).load(PAIRS), CODEC)
    return gl.convert_layout(gl.join(low, high).reshape((64, 64)), LAYOUT, assert_trivial=True)


@jit
def load_slice(buf, scale, CODEC: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 [64, 64] of what lies in shared memory."""
    if (CODEC & KIND) == 0:
        x = decode(buf.load(LAYOUT), scale, CODEC)
    else:
        x = load_pairs(buf, CODEC, LAYOUT)
        x = scaled(x, scale, CODEC)
    return x


@jit
def nothing_met(LAYOUT: gl.constexpr, CODEC: gl.constexpr):
    """What `store_slice` takes as `largest` before there is one."""
    if (CODEC & KIND) == BLOCKWISE:
        return gl.zeros([64], gl.float32, gl.SliceLayout(1, LAYOUT))
    else:
        return largest_so_far(gl.zeros([64, 64], gl.float32, LAYOUT), 0)


@jit
def store_scales(meta_ptr, offsets, scales, write, CODEC: gl.constexpr):
    """The scales that `store_slice` returned, of block codecs. To come after the fence that hands the slice
    on: it waits for every store before it, and one to global memory takes long.
    """
    if (CODEC & KIND) == BLOCKWISE:
        gl.store(meta_ptr + offsets, scales, mask=write)


@jit
def store_slice(buf, x, lane, next_scale, largest, CODEC: gl.constexpr):
    """Encode fp32 [64, 64] into shared memory. Returns what of it goes to `meta`: of block codecs the scales
    [64], of fp8 the largest magnitudes so far.
    """
    if (CODEC & KIND) == 0:
        codes, largest = encode(x, lane, None, 0, None, next_scale, largest, CODEC)
        buf.store(codes)
    else:
        if CODEC & ROOT:
            x = root(x)
        if (CODEC & KIND) == BLOCKWISE:
            factor, scale = block_scales(row_largest(x, CODEC), CODEC)
            y = block_rounded(x, factor[:, None], lane, CODEC)
            largest = gl.convert_layout(scale, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
        else:
            largest = gl.maximum(largest, largest_so_far(x, CODEC))
            y = fp8_scaled(x, next_scale, CODEC)
        pair_view(buf).store(encode_pairs(y, CODEC))
    return largest
