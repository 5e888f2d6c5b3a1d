"""Scales of a slice's rows for two states of block codecs at once, for the ping-pong form.

In the layout of an accumulator, four threads share two rows of a slice [64, 64]: with two states, that is
four scales. Each of these threads takes one as its own: it loads the old scale, finds the new one, stores it,
and hands both out to the other threads. Were all four found by every thread, one row would wait for another.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false, reportIndexIssue=false
from __future__ import annotations

from titanforge.kernels.codec_arithmetic import (
    ABSMAX_FLOOR,
    BELOW_127,
    BELOW_255,
    FORM,
    INVERSE_127,
    INVERSE_255,
    RANDOM,
    ROOT,
    block_rounded,
    quotient,
    root,
    scaled,
)
from titanforge.kernels.gluon._gluon import gl, jit
from titanforge.kernels.gluon.pairs import encode_pairs, largest_so_far, load_pairs, pair_view


@jit
def own_place():
    """(state, row in the slice) of the scale that is each thread's own, [128]: one of every thread."""
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    return (thread >> 1) & 1, (thread >> 5) * 16 + (thread & 1) * 8 + ((thread >> 2) & 7)


@jit
def hand_out(own, LIKE: gl.constexpr):
    """What the four threads have as their own [128], for the rows of either state: [64, 4], of all threads.

    LIKE: the layout of `pairs.largest_so_far`.
    """
    asm: gl.constexpr = """{ .reg .b32 l, n; mov.u32 l, %laneid; and.b32 l, l, 28;
        shfl.sync.idx.b32 $0, $4, l, 31, -1; or.b32 n, l, 1; shfl.sync.idx.b32 $1, $4, n, 31, -1;
        or.b32 n, l, 2; shfl.sync.idx.b32 $2, $4, n, 31, -1;
        or.b32 n, l, 3; shfl.sync.idx.b32 $3, $4, n, 31, -1; }"""
    rows = gl.join(own, own).reshape((4, 8, 4, 2)).permute((0, 3, 1, 2)).reshape((64, 4))
    rows = gl.convert_layout(rows, LIKE, assert_trivial=True)
    return gl.inline_asm_elementwise(
        asm, "=&f,=&f,=&f,=&f,f,f", [rows], dtype=(gl.float32, gl.float32), is_pure=True, pack=2
    )


@jit
def own_largest(first, second):
    """[128]: the largest magnitude of each thread's own row, of what all threads met of both states, [64, 4]
    each. Threads first part the states between them, then the rows.
    """
    asm: gl.constexpr = """{ .reg .pred p, q; .reg .b32 l, n; .reg .f32 x, y, z, w;
        mov.u32 l, %laneid; and.b32 n, l, 1; setp.ne.u32 p, n, 0; and.b32 n, l, 2; setp.ne.u32 q, n, 0;
        selp.f32 x, $4, $2, q; selp.f32 y, $2, $4, q; selp.f32 z, $5, $3, q; selp.f32 w, $3, $5, q;
        shfl.sync.bfly.b32 y, y, 2, 31, -1; shfl.sync.bfly.b32 w, w, 2, 31, -1;
        max.f32 x, x, y; max.f32 z, z, w;
        selp.f32 y, x, z, p; selp.f32 x, z, x, p; shfl.sync.bfly.b32 y, y, 1, 31, -1;
        max.f32 x, x, y; mov.f32 $0, x; mov.f32 $1, x; }"""
    largest = gl.inline_asm_elementwise(
        asm, "=f,=f,f,f,f,f", [first, second], dtype=gl.float32, is_pure=True, pack=2
    )
    largest, _ = largest.reshape((4, 2, 8, 4)).permute((0, 2, 3, 1)).split()  # one for both rows
    OWN: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.convert_layout(largest.reshape((128,)), OWN, assert_trivial=True)


@jit
def levels_of(CODEC: gl.constexpr):
    """(levels, the scale's share of the largest magnitude), as `codec_arithmetic.block_scales` has them."""
    if (CODEC & FORM) == 0:
        levels: gl.constexpr = BELOW_127 if (CODEC & RANDOM) != 0 else 127.0
        share: gl.constexpr = INVERSE_127
    else:
        levels: gl.constexpr = BELOW_255 if (CODEC & RANDOM) != 0 else 255.0
        share: gl.constexpr = INVERSE_255
    return levels, share


@jit
def own_scales(largest, S0_CODEC: gl.constexpr, S1_CODEC: gl.constexpr):
    """(factor, scale) of each thread's own row, [128] each, as `block_scales`: by the thread's state."""
    second, _row = own_place()
    levels0, share0 = levels_of(S0_CODEC)
    levels1, share1 = levels_of(S1_CODEC)
    largest = gl.maximum(largest, ABSMAX_FLOOR)
    scale = largest * gl.where(second != 0, share1, share0)
    return quotient(gl.where(second != 0, levels1, levels0), largest), scale


@jit
def spread(of_rows, x):
    """[64, 4], one for each row of every thread, in the layout of fp32 [64, 64]."""
    y = x.reshape((64, 8, 4, 2))
    of_rows = gl.convert_layout(of_rows.reshape((64, 1, 4, 1)), y.type.layout, assert_trivial=True)
    of_rows, _ = gl.broadcast(of_rows, y)
    return gl.convert_layout(of_rows.reshape((64, 64)), x.type.layout, assert_trivial=True)


@jit
def load_both(s0_buf, s1_buf, own, g, S0_CODEC: gl.constexpr, S1_CODEC: gl.constexpr):
    """fp32 [64, 64] of both states, in the layout of g. own: the scales that they were stored with."""
    like = largest_so_far(g, 0)
    LIKE: gl.constexpr = like.type.layout
    SLICE: gl.constexpr = g.type.layout
    scale0, scale1 = hand_out(own, LIKE)
    s0 = load_pairs(s0_buf, S0_CODEC, SLICE)
    s1 = load_pairs(s1_buf, S1_CODEC, SLICE)
    return scaled(s0, spread(scale0, s0), S0_CODEC), scaled(s1, spread(scale1, s1), S1_CODEC)


@jit
def store_both(s0_buf, s1_buf, s0, s1, s0_lane, s1_lane, S0_CODEC: gl.constexpr, S1_CODEC: gl.constexpr):
    """Encode both states into shared memory. Returns each thread's own scale, [128]."""
    if S0_CODEC & ROOT:
        s0 = root(s0)
    if S1_CODEC & ROOT:
        s1 = root(s1)
    met = largest_so_far(s0, S0_CODEC)
    LIKE: gl.constexpr = met.type.layout
    factor, scale = own_scales(own_largest(met, largest_so_far(s1, S1_CODEC)), S0_CODEC, S1_CODEC)
    factor0, factor1 = hand_out(factor, LIKE)
    s0 = block_rounded(s0, spread(factor0, s0), s0_lane, S0_CODEC)
    pair_view(s0_buf).store(encode_pairs(s0, S0_CODEC))
    s1 = block_rounded(s1, spread(factor1, s1), s1_lane, S1_CODEC)
    pair_view(s1_buf).store(encode_pairs(s1, S1_CODEC))
    return scale
