"""Counter-based random bits for stochastic rounding, the same in Triton and in torch.

Philox4x32-10 (Salmon et al. 2011): no generator state, the bits are a function of a counter and a key. Here
the key is the 64-bit seed and the counter is (column pair, row, step, tensor id), with row and column taken
in the matrix view of the whole tensor. So the bits of an element depend neither on tiling nor on the kernel:
a fused and a flat pass round alike, and a resumed run replays what the uninterrupted one would have drawn.

One counter yields four words; the even column of the pair owns the first two and the odd column the others.
The 64 bits of an element are four lanes of 16: weight, first state, second state, spare.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false
from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels._triton import constant, jit, tl

ROUNDS = constant(10)
MULTIPLIER_0 = constant(0xD2511F53)
MULTIPLIER_1 = constant(0xCD9E8D57)
WEYL_0 = constant(0x9E3779B9)
WEYL_1 = constant(0xBB67AE85)

_MASK = 0xFFFFFFFF
_LANES = 4


@jit
def philox_tile(c0, c1, c2, c3, key0, key1):
    """Four uint32 tiles for uint32 counter tiles of one shape and scalar uint32 keys."""
    m0 = tl.full([1], MULTIPLIER_0, tl.uint32)
    m1 = tl.full([1], MULTIPLIER_1, tl.uint32)
    w0 = tl.full([1], WEYL_0, tl.uint32)
    w1 = tl.full([1], WEYL_1, tl.uint32)
    for _ in tl.static_range(ROUNDS):
        n0 = tl.umulhi(m1, c2) ^ c1 ^ key0
        n2 = tl.umulhi(m0, c0) ^ c3 ^ key1
        c1 = m1 * c2
        c3 = m0 * c0
        c0 = n0
        c2 = n2
        key0 = key0 + w0
        key1 = key1 + w1
    return c0, c1, c2, c3


@jit
def random_words(rng_ptr, tensor_id, row, pair):
    """The two uint32 words of every element of a tile.

    rng_ptr: int64 [2], seed and step. row: [R, 1] and pair: [R or 1, C // 2], column // 2, both integers.
    Returns two [R, C] uint32 tiles.
    """
    seed = tl.load(rng_ptr)
    step = tl.load(rng_ptr + 1)
    zero = (row * 0 + pair * 0).to(tl.uint32)
    c0 = zero + pair.to(tl.uint32)
    c1 = zero + row.to(tl.uint32)
    c2 = zero + step.to(tl.uint32)
    c3 = (zero.to(tl.int64) + tensor_id).to(tl.uint32)
    key0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    x0, x1, x2, x3 = philox_tile(c0, c1, c2, c3, key0, key1)
    rows: tl.constexpr = x0.shape[0]
    columns: tl.constexpr = 2 * x0.shape[1]
    first = tl.reshape(tl.join(x0, x2), (rows, columns))
    second = tl.reshape(tl.join(x1, x3), (rows, columns))
    return first, second


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, ...]:
    """Four words (int64 holding 32 bits) for int64 counter tensors that broadcast together."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # int64 products wrap modulo 2^64, and the masked arithmetic shift still yields the true high word.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ key0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ key1,
            p0 & _MASK,
        )
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def rounding_bits(rows: int, columns: int, *, lane: int, seed: int, step: int, tensor_id: int) -> Tensor:
    """The 16 random bits of every element of a [rows, columns] matrix, as int64 on CPU.

    lane: 0 weight, 1 first state, 2 second state.
    """
    if not 0 <= lane < _LANES:
        raise ValueError(f"lane must be in 0..{_LANES - 1}, not {lane}")
    column = torch.arange(columns)
    row = torch.arange(rows).unsqueeze(1) & _MASK
    constants = torch.tensor([step & _MASK, tensor_id & _MASK])
    words = philox4x32((column.unsqueeze(0) >> 1, row, constants[0], constants[1]), seed)
    word = torch.where((column & 1).bool(), words[2 + lane // 2], words[lane // 2])
    return (word >> (16 * (lane % 2))) & 0xFFFF
