"""Counter-based random bits for stochastic rounding, the same in Triton and in torch.

Philox4x32 (Salmon et al. 2011): no generator state, the bits are a function of a counter and a key. Here
the key is the 64-bit seed and the counter is (call, row, step, tensor id), with row and column taken in the
matrix view of the whole tensor. So the bits of an element depend neither on tiling nor on the kernel: a fused
and a flat pass round alike, and a resumed run replays what the uninterrupted one would have drawn.

Instructions per weight bound the fused kernel, so one call serves eight elements of a row and all of their
parts. It yields four words, one for each pair of neighbouring columns:

    call  4 (column // 32) + (column % 8) // 2      word  (column % 32) // 8

which are the columns that one thread holds of a wgmma accumulator, so that nothing is exchanged between
threads there. A pair's word, bytes b0 (lowest) to b3, gives lanes of 16 bits: its windows, as on a ring:

                    even column   odd column
    weight          b1 b0         b3 b2
    first state     b0 b3         b2 b1
    second state    b2 b1         b0 b3

Each lane is uniform, and the bytes that lead the three lanes of an element are independent of one another; an
element's first state shares its lane with its neighbour's second. Seven rounds: the fewest that pass BigCrush
(their table 2); what is rounded here needs no margin beyond it.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false
from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels._triton import INTERPRET, constant, jit, tl

INTERPRETED = constant(INTERPRET)
ROUNDS = constant(7)
MULTIPLIER_0 = constant(0xD2511F53)
MULTIPLIER_1 = constant(0xCD9E8D57)
WEYL_0 = constant(0x9E3779B9)
WEYL_1 = constant(0xBB67AE85)
LANE_EXPONENT = constant(0x43000000)

_ROUNDS = 7
_MASK = 0xFFFFFFFF
_LANES = 3


@jit
def philox(c0, c1, c2, c3, key0, key1):
    """Four uint32 words for uint32 counters that broadcast together, scalars among them, and scalar keys.

    What depends on the row or on the call alone is computed once for it: most of the first three rounds.
    """
    for _ in tl.static_range(ROUNDS):
        p0 = c0.to(tl.uint64) * MULTIPLIER_0
        p1 = c2.to(tl.uint64) * MULTIPLIER_1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        key0 = key0 + WEYL_0
        key1 = key1 + WEYL_1
    return c0, c1, c2, c3


@jit
def random_words(rng_ptr, tensor_id, row, call):
    """Words of the pairs of columns [R, C // 2] of a tile.

    rng_ptr: int64 [2], seed and step. row: [R, 1] and call: [R or 1, C // 8], integers; the tile begins at a
    multiple of 32 columns. (Gluon: both [R, C // 8], of one layout.)
    """
    seed = tl.load(rng_ptr)
    step = tl.load(rng_ptr + 1)
    x0, x1, x2, x3 = philox(
        call.to(tl.uint32), row.to(tl.uint32), step.to(tl.uint32), tl.cast(tensor_id, tl.uint32),
        (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )  # fmt: skip
    words = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    rows: tl.constexpr = x0.shape[0]
    calls: tl.constexpr = x0.shape[1]
    words = tl.permute(tl.reshape(words, (rows, calls // 4, 4, 4)), (0, 1, 3, 2))
    return tl.reshape(words, (rows, calls * 4))


@jit
def _window(word, above, ASSEMBLY: tl.constexpr, SHIFT: tl.constexpr):
    """16 bits of a word turned to the right by SHIFT, under the upper half of `above`."""
    if INTERPRETED:
        return (((word >> SHIFT) | (word << (32 - SHIFT))) & 0xFFFF) | above
    else:
        return tl.inline_asm_elementwise(
            ASSEMBLY, "=r,r,r", [word, above], dtype=tl.uint32, is_pure=True, pack=1
        )


@jit
def _by_column(even, odd):
    """[R, C // 2] of even and of odd columns to [R, C]."""
    both = tl.join(even, odd)
    return tl.reshape(both, (both.shape[0], both.shape[1] * 2))


@jit
def lanes(words, unknown_zero):
    """The uint32 lanes [R, C] of weight, first and second state, for the words of pairs [R, C // 2].

    The weight's are 16 bits. The states' have 0x4300 above their 16 bits, so that they are at the same time
    the fp32 numbers 128 + bits / 65536. unknown_zero: 0, or a uint32 scalar that is 0 where the compiler
    cannot know: with two constants it spends a move on each of these permutations.
    """
    above = tl.cast(unknown_zero, tl.uint32) + LANE_EXPONENT
    first = _window(words, above, "prmt.b32 $0, $1, $2, 0x7603;", 24)
    second = _window(words, above, "prmt.b32 $0, $1, $2, 0x7621;", 8)
    return _by_column(words & 0xFFFF, words >> 16), _by_column(first, second), _by_column(second, first)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, rounds: int = _ROUNDS
) -> tuple[Tensor, ...]:
    """Four words (int64 holding 32 bits) for int64 counter tensors that broadcast together."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(rounds):
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
    column = torch.arange(columns).unsqueeze(0)
    row = torch.arange(rows).unsqueeze(1) & _MASK
    constants = torch.tensor([step & _MASK, tensor_id & _MASK])
    # All four words for each column; a call is made once for the columns that share it.
    calls = torch.arange(-(-columns // 32) * 4).unsqueeze(0)
    words = torch.stack(philox4x32((calls, row, constants[0], constants[1]), seed), -1)
    word = words[:, column[0] // 32 * 4 + column[0] % 8 // 2, column[0] % 32 // 8]
    odd = column & 1
    turn = (16 * odd, 24 - 16 * odd, 8 + 16 * odd)[lane]
    return ((word >> turn) | (word << (32 - turn))) & 0xFFFF
