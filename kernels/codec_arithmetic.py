"""What stored numbers stand for, and which code a number gets, element by element in registers: `codecs` on a
GPU. All forms of a kernel share these, so that they agree bit for bit.

Codecs are compile-time bit fields (`Codec.code`).
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false
from __future__ import annotations

from titanforge.kernels import codecs
from titanforge.kernels._triton import INTERPRET, constant, converts_fp8, jit, tl

INTERPRETED = constant(INTERPRET)
ABSMAX_FLOOR = constant(codecs.SMALLEST_ABSMAX)
ROUND_TO_INTEGER = constant(12582912.0)  # 1.5 * 2^23
ROUND_DOUBLE_TO_INTEGER = constant(6755399441055744.0)  # 1.5 * 2^52
LIFT = constant(8388608.0)  # 2^23
INVERSE_127, INVERSE_255 = constant(codecs.inverse(127.0)), constant(codecs.inverse(255.0))
BELOW_127, BELOW_255 = constant(codecs.below(127.0)), constant(codecs.below(255.0))

KIND, BLOCKWISE, TENSORWISE = constant(codecs.KIND), constant(codecs.BLOCKWISE), constant(codecs.TENSORWISE)
FORM, FORM_UNIT = constant(codecs.FORM), constant(codecs.FORM_UNIT)
ROOT, FLOORED, RANDOM = constant(codecs.ROOT), constant(codecs.FLOORED), constant(codecs.STOCHASTIC)


@jit
def decode_fp8(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """uint8 fp8 codes to fp32. Shifted into place, a code is the value times 2^(BIAS - 127), subnormals
    included.
    """
    bits = code.to(tl.uint32)
    magnitude = ((bits & 0x7F) << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    if BIAS == 7:
        x = magnitude * 1.329227995784916e36  # 2^120
    else:
        x = magnitude * 5.192296858534828e33  # 2^112, of the bias 15
    # The sign is set as a bit: some versions of Triton negate as 0 - x, which loses that of zero.
    return (x.to(tl.uint32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@jit
def encode_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """fp32 within the finite range to uint8 fp8 codes, round to nearest even."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - MANTISSA
    half: tl.constexpr = (1 << (22 - MANTISSA)) - 1
    # Normal codes: round the fp32 mantissa, then move the exponent's bias.
    normal = ((magnitude + half + ((magnitude >> shift) & 1)) >> shift) - ((127 - BIAS) << MANTISSA)
    # Subnormal codes are the multiples of 2^(1 - BIAS - MANTISSA); the first normal code follows seamlessly.
    steps = magnitude.to(tl.float32, bitcast=True) * (1 << (BIAS + MANTISSA - 1))
    small = ((tl.minimum(steps, 512.0) + ROUND_TO_INTEGER) - ROUND_TO_INTEGER).to(tl.uint32)
    first_normal: tl.constexpr = (128 - BIAS) << 23
    code = tl.where(magnitude < first_normal, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def convert_fp8(codes, FORM5: tl.constexpr):
    """uint8 fp8 codes to fp32, two by two in hardware. FORM5: e5m2, not e4m3."""
    if FORM5:
        asm: tl.constexpr = """{ .reg .b16 a, b; mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e5m2x2 $0, a; cvt.rn.f16x2.e5m2x2 $1, b; }"""
    else:
        asm: tl.constexpr = """{ .reg .b16 a, b; mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"""
    half = tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    return half.to(tl.float32)


@jit
def decode_codes(codes, CODEC: tl.constexpr):
    """Stored codes as fp32 that `scaled` takes: of a square's root lifted by 2^23, else the codes' values."""
    if (CODEC & KIND) == BLOCKWISE:
        # An integer below 2^22 added to the bits of 1.5 * 2^23 is added to its value: full rate, where a
        # conversion of integers is not.
        if CODEC & ROOT:
            x = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        else:
            if INTERPRETED or (CODEC & FORM) != 0:
                bits = codes.to(tl.int32) + 0x4B400000
            else:
                # A product of bytes with one that is 1 takes a signed byte out and adds at once.
                bits = tl.inline_asm_elementwise(
                    """dp4a.s32.s32 $0, $4, 1, 0x4B400000; dp4a.s32.s32 $1, $4, 0x100, 0x4B400000;
                    dp4a.s32.s32 $2, $4, 0x10000, 0x4B400000; dp4a.s32.s32 $3, $4, 0x1000000, 0x4B400000;""",
                    "=r,=r,=r,=r,r", [codes], dtype=tl.int32, is_pure=True, pack=4,
                )  # fmt: skip
            x = bits.to(tl.float32, bitcast=True) - ROUND_TO_INTEGER
    elif (CODEC & KIND) == TENSORWISE:
        if INTERPRETED or not converts_fp8():
            if (CODEC & FORM) == 0:
                x = decode_fp8(codes, 3, 7)
            else:
                x = decode_fp8(codes, 2, 15)
        else:
            x = convert_fp8(codes, (CODEC & FORM) != 0)
    elif (CODEC & FORM) == FORM_UNIT and not INTERPRETED:
        # Left to itself the compiler takes two instructions for the upper one of two.
        x = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [codes], dtype=tl.int32,
            is_pure=True, pack=2,
        ).to(tl.float32, bitcast=True)  # fmt: skip
    else:
        x = codes.to(tl.float32)
    return x


@jit
def scaled(x, scale, CODEC: tl.constexpr):
    """What a scaled codec stands for: `decode_codes` times the scale, squared for a root."""
    if (CODEC & KIND) == BLOCKWISE and (CODEC & ROOT) != 0:
        if INTERPRETED:
            x = (x - LIFT) * scale
        else:
            # Exact before its one rounding, for 2^23 times the scale is a number: (2^23 + q) s - 2^23 s.
            x = tl.fma(x, scale, -(scale * LIFT))
    else:
        x = x * scale
    if CODEC & ROOT:
        x = x * x
    return x


@jit
def to_bf16(x):
    """Round to nearest even. Triton's interpreter truncates this cast, so it is done in integers there."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        # A NaN must not carry into the sign; infinities have no low bits and pass.
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits & 0xFFFF0000) | 0x400000, rounded)
        return rounded.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return x.to(tl.bfloat16)


@jit
def to_bf16_stochastic(x, lane):
    """Add 16 random bits, the uint32 `lane`, below the last kept one and cut: the mean is x."""
    bits = x.to(tl.int32, bitcast=True)
    # An infinity has no low bits to carry. The one NaN of the GPU's arithmetic, 0x7FFFFFFF, would carry into
    # the sign: the larger of two signed integers is then the NaN. (One instruction, with the sum.)
    rounded = tl.maximum(bits + lane.to(tl.int32, bitcast=True), bits)
    return (rounded.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def plain_codes(x, lane, CODEC: tl.constexpr):
    """fp32 to the storage of a plain codec. lane: 16 random bits per element, where it rounds at random."""
    if (CODEC & FORM) == 0:
        return x
    elif (CODEC & FORM) == 2 * FORM_UNIT:
        return x.to(tl.float16)
    elif CODEC & RANDOM:
        return to_bf16_stochastic(x, lane & 0xFFFF)
    else:
        return to_bf16(x)


@jit
def root(x):
    """The root of fp32 x >= 0, approximate where compiled, the same in every form of a kernel. Epilogues take
    it of a second moment themselves, so that it comes free.
    """
    if INTERPRETED:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@jit
def quotient(a, b):
    """a / b correctly rounded, for constant a and b from 2^-100 to 2^127, without `div_rn`'s call for other
    ranges: the approximate reciprocal, a step of Newton's, and the remainder.
    """
    if INTERPRETED:
        return tl.div_rn(a, b)
    else:
        # By a quarter, or the reciprocal of the largest b would be no normal number.
        b = b * 0.25
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.fma(tl.fma(-b, inverse, 1.0), inverse, inverse)
        q = a * 0.25 * inverse
        return tl.fma(tl.fma(-b, q, a * 0.25), inverse, q)


@jit
def largest_of(x, AXIS: tl.constexpr, CODEC: tl.constexpr):
    """The largest magnitudes along an axis. What is never negative is compared as integers, three at a
    time.
    """
    if CODEC & FLOORED:
        return tl.cast(tl.max(x.to(tl.int32, bitcast=True), axis=AXIS), tl.float32, bitcast=True)
    else:
        return tl.max(tl.abs(x), axis=AXIS)


@jit
def block_scales(absmax, CODEC: tl.constexpr):
    """(factor, scale) of blocks with these largest magnitudes: x * factor is what is rounded, scale is
    kept.
    """
    absmax = tl.maximum(absmax, ABSMAX_FLOOR)
    if (CODEC & FORM) == 0:
        levels: tl.constexpr = BELOW_127 if (CODEC & RANDOM) != 0 else 127.0
        scale = absmax * INVERSE_127
    else:
        levels: tl.constexpr = BELOW_255 if (CODEC & RANDOM) != 0 else 255.0
        scale = absmax * INVERSE_255
    return quotient(tl.where(absmax > 0, levels, levels), absmax), scale


@jit
def round_down(y):
    """1.5 * 2^23 + floor(y) - 128."""
    if INTERPRETED:
        return tl.floor(y) + (ROUND_TO_INTEGER - 128.0)
    else:
        return tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B3FFF80;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )


@jit
def block_rounded(x, factor, lane, CODEC: tl.constexpr):
    """fp32 whose low bytes are the codes of a block codec, for fp32 x under the factor of its block:
    |x * factor| is at most the levels. lane: as `philox.lanes` has it for states.
    """
    # The low byte of 1.5 * 2^23 + q is q in two's complement.
    if CODEC & RANDOM:
        # floor(y + u), u uniform in [0, 1): the lane is 128 + u, and 128 is taken off in the rounding.
        u = lane.to(tl.float32, bitcast=True)
        if INTERPRETED:
            y = (x.to(tl.float64) * factor.to(tl.float64) + u.to(tl.float64)).to(tl.float32)
        else:
            y = tl.fma(x, factor, u)
        q = round_down(y)
    else:
        # The largest x * factor is the levels up to a rounding: nearest needs no clamp there.
        if INTERPRETED:
            # In float64 the product is exact, as it is inside of a fused multiply-add.
            y = x.to(tl.float64) * factor.to(tl.float64)
            y = (y + ROUND_DOUBLE_TO_INTEGER) - ROUND_DOUBLE_TO_INTEGER
            q = y.to(tl.float32) + ROUND_TO_INTEGER
        else:
            q = tl.fma(x, factor, ROUND_TO_INTEGER)
    if (CODEC & FORM) != 0:
        q = tl.maximum(q, ROUND_TO_INTEGER + 1.0)
    return q


@jit
def block_codes(x, factor, lane, CODEC: tl.constexpr):
    """Codes of a block codec, as stored."""
    code = block_rounded(x, factor, lane, CODEC).to(tl.int32, bitcast=True)
    if (CODEC & FORM) == 0:
        return code.to(tl.int8)
    else:
        return (code & 0xFF).to(tl.uint8)


@jit
def fp8_scaled(x, scale, CODEC: tl.constexpr):
    """fp32 to be cast to fp8, under the scale of this store, a power of two."""
    # The scale is a power of two, so its reciprocal is exact: mirror the exponent.
    y = x * (0x7F000000 - scale.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
    if CODEC & FLOORED:
        y = tl.maximum(y, 0.001953125)  # the smallest positive code
    return y


@jit
def fp8_codes(x, scale, CODEC: tl.constexpr):
    """Codes of an fp8 codec under the scale of this store."""
    y = fp8_scaled(x, scale, CODEC)
    if INTERPRETED or not converts_fp8():
        if (CODEC & FORM) == 0:
            code = encode_fp8(tl.minimum(tl.maximum(y, -448.0), 448.0), 3, 7)
        else:
            code = encode_fp8(tl.minimum(tl.maximum(y, -57344.0), 57344.0), 2, 15)
    else:
        if (CODEC & FORM) == 0:
            asm: tl.constexpr = """{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
                cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"""
        else:
            asm: tl.constexpr = """{ .reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $2, $1;
                cvt.rn.satfinite.e5m2x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"""
        code = tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
    return code
