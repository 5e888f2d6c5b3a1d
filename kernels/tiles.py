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

from titanforge.kernels import codecs
from titanforge.kernels._triton import INTERPRET, constant, converts_fp8, jit, tl
from titanforge.kernels.philox import lanes, random_words

INTERPRETED = constant(INTERPRET)
ABSMAX_FLOOR = constant(codecs.SMALLEST_ABSMAX)
ROUND_TO_INTEGER = constant(12582912.0)  # 1.5 * 2^23
ROUND_DOUBLE_TO_INTEGER = constant(6755399441055744.0)  # 1.5 * 2^52
LIFT = constant(8388608.0)  # 2^23
INVERSE_127, INVERSE_255 = constant(codecs.inverse(127.0)), constant(codecs.inverse(255.0))
BELOW_127, BELOW_255 = constant(codecs.below(127.0)), constant(codecs.below(255.0))
LARGEST = constant(3.4028234663852886e38)

KIND, BLOCKWISE, TENSORWISE = constant(codecs.KIND), constant(codecs.BLOCKWISE), constant(codecs.TENSORWISE)
FORM, FORM_UNIT = constant(codecs.FORM), constant(codecs.FORM_UNIT)
ROOT, FLOORED, RANDOM = constant(codecs.ROOT), constant(codecs.FLOORED), constant(codecs.STOCHASTIC)


@jit
def load(pointers, mask, MASKED: tl.constexpr):
    # Weights and states are read once per step: keep the operands in L2 instead.
    if MASKED:
        return tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    else:
        return tl.load(pointers, eviction_policy="evict_first")


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
def store(pointers, value, mask):
    tl.store(pointers, value, mask=mask, eviction_policy="evict_first")


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
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def count_nonfinite(g):
    """1 if any element of the tile is infinite or NaN, else 0."""
    if INTERPRETED:
        bad = tl.where(tl.abs(g) <= LARGEST, 0, 1)
        return tl.max(tl.max(bad, axis=1), axis=0)
    else:
        # One comparison a number, where a test and a choice of each would be three instructions.
        largest = tl.reduce(tl.reduce(tl.abs(g), 1, _larger_or_nan), 0, _larger_or_nan)
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
