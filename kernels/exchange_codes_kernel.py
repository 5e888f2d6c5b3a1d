"""Triton kernels of `exchange_codes`: encode, decode, and the sum of what ranks have sent, encoded again.

A program has ROWS blocks of BLOCK values. Buffers of codes come twice, as bytes and as int16: scales, and
bf16 values, are read and written as these.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from titanforge.kernels._triton import jit, tl


@jit
def _rows(blocks, ROWS: tl.constexpr):
    """Blocks of this program, int64 [ROWS, 1], and which there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return row, row < blocks


@jit
def _store_codes(
    x, byte_ptr, short_ptr, row, there, blocks,
    BITS: tl.constexpr, INVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and scales of fp32 x [ROWS, BLOCK], at rows of the piece that the pointers are at; returns the
    values that they stand for.
    """
    column = tl.arange(0, BLOCK)[None, :]
    bits = x.to(tl.int32, bitcast=True)
    if BITS == 16:
        magnitude = bits & 0x7FFFFFFF
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(magnitude > 0x7F800000, 0x7FC0, rounded)
        tl.store(short_ptr + row * BLOCK + column, rounded.to(tl.int16), mask=there)
        return (rounded << 16).to(tl.float32, bitcast=True)
    else:
        largest = tl.max(bits & 0x7FFFFFFF, axis=1, keep_dims=True)
        finite = largest < 0x7F800000
        scale = (largest.to(tl.float32, bitcast=True) * INVERSE).to(tl.int32, bitcast=True)
        scale = (scale + 0xFFFF) >> 16
        scale = tl.where(scale < 0x0080, 0, scale)
        s = (scale << 16).to(tl.float32, bitcast=True)
        reciprocal = tl.where(finite & (scale > 0), tl.div_rn(1.0, tl.where(scale > 0, s, 1.0)), 0.0)
        scale = tl.where(finite, scale, 0x7FC0)
        # 1.5 * 2^23 more has no bits behind the point: round half to even. Its low bits are the code's.
        y = tl.where(finite, x, 0.0) * reciprocal + 12582912.0
        q = y.to(tl.int32, bitcast=True) - 0x4B400000
        first = blocks.to(tl.int64) * (BLOCK * BITS // 16)
        tl.store(short_ptr + first + row, scale.to(tl.int16), mask=there)
        if BITS == 4:
            low, high = tl.split(tl.reshape(q + 8, (q.shape[0], BLOCK // 2, 2)))
            column = tl.arange(0, BLOCK // 2)[None, :]
            code = low | (high << 4)
            tl.store(byte_ptr + row * (BLOCK // 2) + column, code.to(tl.uint8), mask=there)
        else:
            tl.store(byte_ptr + row * BLOCK + column, (q & 0xFF).to(tl.uint8), mask=there)
        return q.to(tl.float32) * (scale << 16).to(tl.float32, bitcast=True)


@jit
def _load_values(byte_ptr, short_ptr, row, there, blocks, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 [ROWS, BLOCK] of the codes at rows of the piece that the pointers are at."""
    column = tl.arange(0, BLOCK)[None, :]
    if BITS == 16:
        code = tl.load(short_ptr + row * BLOCK + column, mask=there, other=0)
        return (code.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        first = blocks.to(tl.int64) * (BLOCK * BITS // 16)
        scale = tl.load(short_ptr + first + row, mask=there, other=0)
        if BITS == 4:
            half = tl.arange(0, BLOCK // 2)[None, :]
            code = tl.load(byte_ptr + row * (BLOCK // 2) + half, mask=there, other=0).to(tl.int32)
            both = tl.join((code & 15) - 8, (code >> 4) - 8)
            q = tl.reshape(both, (both.shape[0], BLOCK))
        else:
            code = tl.load(byte_ptr + row * BLOCK + column, mask=there, other=0)
            q = code.to(tl.int8, bitcast=True).to(tl.int32)
        return q.to(tl.float32) * (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
def _sent(sent_ptr, told_ptr, at, there):
    """What was sent before and what was told of it, both 0 where that is NaN."""
    told = tl.load(told_ptr + at, mask=there, other=0.0)
    known = told == told
    return tl.where(known, tl.load(sent_ptr, mask=there, other=0.0), 0.0), tl.where(known, told, 0.0)


@jit(unspecialized=("blocks",))
def encode_kernel(
    x_ptr, own_ptr, told_ptr, byte_ptr, short_ptr, blocks, piece_bytes, factor,
    BITS: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of a piece / ROWS, pieces). x, own, told: fp32 [pieces, blocks * BLOCK], the last two as
    of `Sent`, or None.
    """
    row, there = _rows(blocks, ROWS)
    piece = tl.program_id(1).to(tl.int64)
    at = (piece * blocks + row) * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at, mask=there, other=0.0) * factor
    byte_ptr += piece * piece_bytes
    short_ptr += piece * (piece_bytes // 2)
    if own_ptr is None:
        _store_codes(x, byte_ptr, short_ptr, row, there, blocks, BITS, INVERSE, BLOCK)
    else:
        before, _ = _sent(own_ptr + at, told_ptr, at, there)
        new = _store_codes(x - before, byte_ptr, short_ptr, row, there, blocks, BITS, INVERSE, BLOCK)
        tl.store(own_ptr + at, before + new, mask=there)


@jit(unspecialized=("blocks",))
def decode_kernel(
    byte_ptr, short_ptr, out_ptr, told_ptr, blocks, piece_bytes,
    BITS: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of a piece / ROWS, pieces). out, told: fp32 [pieces, blocks * BLOCK]; told as of `Sent`,
    or None.
    """
    row, there = _rows(blocks, ROWS)
    piece = tl.program_id(1).to(tl.int64)
    at = (piece * blocks + row) * BLOCK + tl.arange(0, BLOCK)[None, :]
    byte_ptr += piece * piece_bytes
    short_ptr += piece * (piece_bytes // 2)
    x = _load_values(byte_ptr, short_ptr, row, there, blocks, BITS, BLOCK)
    if told_ptr is not None:
        told = tl.load(told_ptr + at, mask=there, other=0.0)
        x += tl.where(told == told, told, 0.0)
        tl.store(told_ptr + at, x, mask=there)
    tl.store(out_ptr + at, x, mask=there)


@jit(unspecialized=("blocks",))
def sum_kernel(
    byte_ptr, short_ptr, sum_ptr, told_ptr, out_byte_ptr, out_short_ptr, ranks, blocks, piece_bytes,
    BITS: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of a piece / ROWS,). Codes of the fp32 sum, by rank, of `ranks` pieces.

    sum, told: of this piece, fp32 [blocks * BLOCK], as of `Sent`, or None.
    """
    row, there = _rows(blocks, ROWS)
    at = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    told = total
    if sum_ptr is not None:
        total, told = _sent(sum_ptr + at, told_ptr, at, there)
    for rank in range(ranks):
        offset = tl.cast(rank, tl.int64) * piece_bytes
        total += _load_values(byte_ptr + offset, short_ptr + offset // 2, row, there, blocks, BITS, BLOCK)
    if sum_ptr is not None:
        tl.store(sum_ptr + at, total, mask=there)
        total -= told
    _store_codes(total, out_byte_ptr, out_short_ptr, row, there, blocks, BITS, INVERSE, BLOCK)
