"""Products in kernels, of bf16 values and of fp32 ones as the sum of two bf16 *planes*, high and low.

Three bf16 products, accumulated in fp32, then stand for an fp32 one (the fourth is below the rounding), at
the tensor cores' full rate and in the bytes of fp32.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from titanforge.kernels._triton import jit, tl


@jit
def dot(a, b, total, TO_FP32: tl.constexpr):
    """total + a b, of bf16. TO_FP32: for the interpreter, whose bf16 products are wrong."""
    if TO_FP32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@jit
def split(x):
    """The high and the low plane of fp32 values."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@jit
def store_split(out, low, value):
    """Both planes of fp32 values; the low one `low` elements on."""
    high, rest = split(value)
    tl.store(out, high)
    tl.store(out + low, rest)


@jit
def dot2(a_high, a_low, b, total, TO_FP32: tl.constexpr):
    """total + a b of a in planes and b in bf16."""
    total = dot(a_low, b, total, TO_FP32)
    return dot(a_high, b, total, TO_FP32)


@jit
def dot3(a_high, a_low, b_high, b_low, total, TO_FP32: tl.constexpr):
    """total + a b, both in planes."""
    total = dot(a_low, b_high, total, TO_FP32)
    total = dot(a_high, b_low, total, TO_FP32)
    return dot(a_high, b_high, total, TO_FP32)
