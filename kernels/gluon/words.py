"""Pieces of rows between global memory and registers, for the cooperative form.

Eight threads hold a row of 64, eight neighbouring columns each. Codes stay in whole words from the load until
they are decoded: what waits in a loop as codes of 8 or 16 bits takes a register each.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false, reportIndexIssue=false
from __future__ import annotations

from titanforge.kernels.codec_arithmetic import (
    BLOCKWISE,
    FORM,
    FORM_UNIT,
    KIND,
    ROOT,
    ROUND_TO_INTEGER,
    TENSORWISE,
    scaled,
)
from titanforge.kernels.gluon._gluon import gl, jit


@jit
def load_words(ptr, base, K, ROWS: gl.constexpr):
    """Codes [ROWS, 64] at element `base` of rows K long, as words [ROWS, 64 / codes in a word]."""
    EACH: gl.constexpr = 32 // ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8 // EACH], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64 // EACH, gl.SliceLayout(0, LAYOUT))
    # The row in elements, the column in words: the compiler sees how addresses are aligned.
    starts = ptr + base + rows[:, None] * K
    if EACH > 1:
        starts = starts.to(gl.pointer_type(gl.int32))
    return gl.load(starts + columns[None, :], eviction_policy="evict_first")


@jit
def _two(words, CODEC: gl.constexpr):
    if (CODEC & FORM) == FORM_UNIT:
        asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        asm: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
    low, high = gl.inline_asm_elementwise(
        asm, "=r,=r,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    return gl.join(low, high)


@jit
def _four(words, CODEC: gl.constexpr):
    if (CODEC & KIND) == TENSORWISE:
        if (CODEC & FORM) == 0:
            asm: gl.constexpr = """{ .reg .b32 t, u; .reg .b16 a, b; mov.b32 {a, b}, $4;
                cvt.rn.f16x2.e4m3x2 t, a; cvt.rn.f16x2.e4m3x2 u, b;
                mov.b32 {a, b}, t; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;
                mov.b32 {a, b}, u; cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }"""
        else:
            asm: gl.constexpr = """{ .reg .b32 t, u; .reg .b16 a, b; mov.b32 {a, b}, $4;
                cvt.rn.f16x2.e5m2x2 t, a; cvt.rn.f16x2.e5m2x2 u, b;
                mov.b32 {a, b}, t; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;
                mov.b32 {a, b}, u; cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }"""
    elif (CODEC & ROOT) != 0:
        asm: gl.constexpr = """prmt.b32 $0, $4, 0x4B000000, 0x7440; prmt.b32 $1, $4, 0x4B000000, 0x7441;
            prmt.b32 $2, $4, 0x4B000000, 0x7442; prmt.b32 $3, $4, 0x4B000000, 0x7443;"""
    elif (CODEC & FORM) != 0:
        asm: gl.constexpr = """dp4a.u32.u32 $0, $4, 1, 0x4B400000; dp4a.u32.u32 $1, $4, 0x100, 0x4B400000;
            dp4a.u32.u32 $2, $4, 0x10000, 0x4B400000; dp4a.u32.u32 $3, $4, 0x1000000, 0x4B400000;"""
    else:
        asm: gl.constexpr = """dp4a.s32.s32 $0, $4, 1, 0x4B400000; dp4a.s32.s32 $1, $4, 0x100, 0x4B400000;
            dp4a.s32.s32 $2, $4, 0x10000, 0x4B400000; dp4a.s32.s32 $3, $4, 0x1000000, 0x4B400000;"""
    a, b, c, d = gl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r", [words], dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(gl.join(a, c), gl.join(b, d))


@jit
def decode_words(words, scale, CODEC: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 [ROWS, 64] of the words, as `slices.decode` has it of codes."""
    ROWS: gl.constexpr = words.shape[0]
    EACH: gl.constexpr = 64 // words.shape[1]
    if EACH == 4:
        x = gl.convert_layout(_four(words, CODEC).reshape((ROWS, 64)), LAYOUT, assert_trivial=True)
        if (CODEC & KIND) == BLOCKWISE and (CODEC & ROOT) == 0:
            x = x - ROUND_TO_INTEGER
        x = scaled(x, scale, CODEC)
    elif EACH == 2:
        x = gl.convert_layout(_two(words, CODEC).reshape((ROWS, 64)), LAYOUT, assert_trivial=True)
    else:
        x = gl.convert_layout(words, LAYOUT, assert_trivial=True)
    return x
