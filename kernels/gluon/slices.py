"""What a warpgroup does with a slice of gradient in registers, with the functions of the portable form.

A slice is 64 columns wide, one block of the block codecs. A part is a stored tensor: weight, fp32 master,
first or second state; parts that a launch does not have are None.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false
from __future__ import annotations

from titanforge.kernels.codec_arithmetic import (
    BLOCKWISE,
    KIND,
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
from titanforge.kernels.gluon._gluon import gl, jit
from titanforge.kernels.philox import lanes, philox, random_words


@jit
def scale_at(meta_ptr, offsets, CODEC: gl.constexpr):
    """What `decode` multiplies by: of each row [R, 1] (block codecs), of the tensor, or nothing."""
    if (CODEC & KIND) == BLOCKWISE:
        return gl.load(meta_ptr + offsets)[:, None]
    elif (CODEC & KIND) == TENSORWISE:
        return gl.load(meta_ptr)
    else:
        return 0.0


@jit
def next_scale_of(meta_ptr, CODEC: gl.constexpr):
    """The scale of what is stored (fp8)."""
    if (CODEC & KIND) == TENSORWISE:
        return gl.load(meta_ptr + 1)
    else:
        return 0.0


@jit
def decode(codes, scale, CODEC: gl.constexpr):
    """fp32 [R, 64] of stored codes."""
    x = decode_codes(codes, CODEC)
    return scaled(x, scale, CODEC) if (CODEC & KIND) != 0 else x


@jit
def random_key(rng_ptr, RANDOM_CODEC: gl.constexpr):
    """(step, low half of the seed, high half), uint32, loaded once: not by every slice."""
    if RANDOM_CODEC:
        seed = gl.load(rng_ptr)
        step = gl.load(rng_ptr + 1).to(gl.uint32)
        return step, (seed & 0xFFFFFFFF).to(gl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(gl.uint32)
    else:
        return 0, 0, 0


@jit
def accumulator_words(key, tensor_id, first_row, first_column, LAYOUT: gl.constexpr):
    """`philox.random_words` of a slice [64, 64] in the layout of a wgmma accumulator, where the eight
    elements of each call are one thread's. key: of `random_key`.
    """
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None] + first_row
    columns = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :] + first_column
    row = _of_calls(rows + columns * 0)
    call = _of_calls(columns // 32 * 4 + columns % 8 // 2 + rows * 0)
    step, low, high = key
    x0, x1, x2, x3 = philox(
        call.to(gl.uint32), row.to(gl.uint32), step, gl.cast(tensor_id, gl.uint32), low, high
    )
    words = gl.join(gl.join(x0, x2), gl.join(x1, x3))
    return words.reshape((64, 2, 4, 4)).permute((0, 1, 3, 2)).reshape((64, 32))


@jit
def accumulator_lanes(words, unknown_zero, LAYOUT: gl.constexpr):
    """`philox.lanes` of those words, in the layout of the slice."""
    weight, first, second = lanes(words, unknown_zero)
    return (
        gl.convert_layout(weight, LAYOUT, assert_trivial=True),
        gl.convert_layout(first, LAYOUT, assert_trivial=True),
        gl.convert_layout(second, LAYOUT, assert_trivial=True),
    )


@jit
def row_lanes(rng_ptr, tensor_id, first_row, first_column, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """`philox.lanes` of a piece [ROWS, 64] where eight threads hold a row, eight neighbouring columns each:
    a thread makes one call of its row, and the threads of 32 columns exchange their words.
    """
    CALLS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, CALLS))[:, None] + first_row
    calls = gl.arange(0, 8, gl.SliceLayout(0, CALLS))[None, :] + first_column // 8
    words = random_words(rng_ptr, tensor_id, rows + calls * 0, calls + rows * 0)
    weight, first, second = lanes(gl.convert_layout(words, PAIRS), 0)
    return (
        gl.convert_layout(weight, LAYOUT, assert_trivial=True),
        gl.convert_layout(first, LAYOUT, assert_trivial=True),
        gl.convert_layout(second, LAYOUT, assert_trivial=True),
    )


@jit
def _of_calls(x):
    """[64, 64] to [64, 8]: one element of each eight that share a call."""
    parts, _ = x.reshape((64, 2, 4, 4, 2)).permute((0, 1, 3, 2, 4)).split()
    parts, _ = parts.reshape((64, 2, 4, 2, 2)).split()
    parts, _ = parts.split()
    return parts.reshape((64, 8))


@jit
def largest_of_eight(x):
    """Magnitudes [R, 8] of fp32 [R, 64], where eight columns are one thread's."""
    return gl.max(gl.abs(x).reshape((x.shape[0], 8, 8)), axis=2)


@jit
def encode(x, lane, meta_ptr, offsets, mask, next_scale, largest, CODEC: gl.constexpr):
    """(codes, largest): what to store of fp32 [R, 64]. lane: as `tiles.encode_tile`.

    Block codecs write their scales here, under `mask`, a scalar or None. next_scale: of fp8, `next_scale_of`.
    largest [R, 8]: of fp8, the magnitudes met so far in each eight columns.
    """
    if CODEC & ROOT:
        x = root(x)
    if (CODEC & KIND) == BLOCKWISE:
        factor, scale = block_scales(largest_of(x, 1, CODEC), CODEC)
        codes = block_codes(x, factor[:, None], lane, CODEC)
        gl.store(meta_ptr + offsets, scale, mask=mask)
    elif (CODEC & KIND) == TENSORWISE:
        largest = gl.maximum(largest, largest_of_eight(x))
        codes = fp8_codes(x, next_scale, CODEC)
    else:
        codes = plain_codes(x, lane, CODEC)
    return codes, largest


@jit
def keep_largest(meta_ptr, largest, apply, CODEC: gl.constexpr):
    """Hand the magnitudes that a warpgroup met to the next step's scale (fp8)."""
    if (CODEC & KIND) == TENSORWISE:
        gl.atomic_max(meta_ptr + 2, gl.max(gl.max(largest, axis=1), axis=0), mask=apply, sem="relaxed")
