"""What a warpgroup does with a slice of gradient in registers, with the functions of the portable form.

A slice is 64 columns wide, one block of the block codecs. A part is a stored tensor: weight, fp32 master,
first or second state; parts that a launch does not have are None.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false
from __future__ import annotations

from titanforge.kernels.gluon._gluon import gl, jit
from titanforge.kernels.tiles import (
    BLOCKWISE,
    KIND,
    ROOT,
    TENSORWISE,
    block_codes,
    block_scales,
    decode_codes,
    fp8_codes,
    plain_codes,
    root,
    scaled,
)


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
def decode(codes, scale, CODEC: gl.constexpr):
    """fp32 [R, 64] of stored codes."""
    x = decode_codes(codes, CODEC)
    return scaled(x, scale, CODEC) if (CODEC & KIND) != 0 else x


@jit
def encode(x, meta_ptr, offsets, mask, largest, CODEC: gl.constexpr):
    """(codes, largest): what to store of fp32 [R, 64].

    Block codecs write their scales here, under `mask` [R] or None. largest [R]: of fp8, the magnitudes of
    each row so far.
    """
    if CODEC & ROOT:
        x = root(x)
    if (CODEC & KIND) == BLOCKWISE:
        factor, scale = block_scales(gl.max(gl.abs(x), axis=1), CODEC)
        codes = block_codes(x, factor[:, None], 0, CODEC)
        gl.store(meta_ptr + offsets, scale, mask=mask)
    elif (CODEC & KIND) == TENSORWISE:
        largest = gl.maximum(largest, gl.max(gl.abs(x), axis=1))
        codes = fp8_codes(x, gl.load(meta_ptr + 1), CODEC)
    else:
        codes = plain_codes(x, 0, CODEC)
    return codes, largest


@jit
def keep_largest(meta_ptr, largest, apply, CODEC: gl.constexpr):
    """Hand the magnitudes that a warpgroup met to the next step's scale (fp8)."""
    if (CODEC & KIND) == TENSORWISE:
        gl.atomic_max(meta_ptr + 2, gl.max(largest, axis=0), mask=apply, sem="relaxed")
