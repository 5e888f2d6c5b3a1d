"""One slice's update in the ping-pong form: what a consumer does with what its slot of the ring holds."""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false, reportIndexIssue=false
from __future__ import annotations

from titanforge.kernels.codec_arithmetic import KIND, RANDOM, TENSORWISE
from titanforge.kernels.gluon._gluon import fence_async_shared, gl, jit, mbarrier
from titanforge.kernels.gluon.pairs import load_slice, store_scales, store_slice
from titanforge.kernels.gluon.row_scales import load_both, own_place, store_both
from titanforge.kernels.gluon.slices import accumulator_lanes, accumulator_words


@jit
def shared_number(numbers, INDEX: gl.constexpr, HYPERS: gl.constexpr):
    """A hyperparameter from shared memory; of one that the rule does not have, another."""
    x = numbers.index(INDEX if INDEX < HYPERS else 0).load(gl.BlockedLayout([1], [32], [4], [0]))
    return gl.max(x, axis=0)


@jit
def shared_numbers(numbers, HYPERS: gl.constexpr):
    """All of them, as epilogues take them, for a gradient that has been multiplied by its scale. What a rule
    does not use, is not loaded.

    Taken before the loop over tiles: read from shared memory, where nothing changes them, they are known to
    be the same in all threads and stay in uniform registers.
    """
    return (
        shared_number(numbers, 0, HYPERS), shared_number(numbers, 1, HYPERS),
        shared_number(numbers, 2, HYPERS), 1.0,
        shared_number(numbers, 4, HYPERS), shared_number(numbers, 5, HYPERS),
        shared_number(numbers, 6, HYPERS), shared_number(numbers, 7, HYPERS),
        shared_number(numbers, 8, HYPERS), shared_number(numbers, 9, HYPERS),
        shared_number(numbers, 10, HYPERS), shared_number(numbers, 11, HYPERS),
    )  # fmt: skip


@jit
def update_slice(
    g, number, write, rescale, s0_scale, s1_scale, s0_next, s1_next, s0_largest, s1_largest, offsets,
    ring, s0_meta_ptr, s1_meta_ptr, numbers, key, tensor_id, first_row, first_column,
    unknown_zero, turns, op, piece, WID: gl.constexpr, EPILOGUE: gl.constexpr,
    SLOTS: gl.constexpr, WEIGHT: gl.constexpr, MASTER: gl.constexpr,
    W_CODEC: gl.constexpr, S0_CODEC: gl.constexpr, S1_CODEC: gl.constexpr,
    RING: gl.constexpr, BY_SLICE: gl.constexpr, JOINT: gl.constexpr,
):  # fmt: skip
    """Epilogue of one slice, on what the ring holds of it. Returns of both states what `store_slice` does.

    g: times its scale, which `numbers` has as 1.
    write: the slice is applied. rescale: it is not, but the scale of whole-tensor codecs moves on.
    offsets: of the scales of the slice's rows, the same in both states. JOINT: both states' scales are found
    at once, and what is the first one's stands for both (see `row_scales`).
    first_row, first_column: of the slice in the whole weight, for random bits; key: of `random_key`;
    unknown_zero: as `philox.lanes`.
    """
    w_buf, master_buf, s0_buf, s1_buf, filled, updated, _free = ring
    layout: gl.constexpr = g.type.layout
    slot = number % RING
    if (W_CODEC | S0_CODEC | S1_CODEC) & RANDOM:
        words = accumulator_words(key, tensor_id, first_row, first_column, layout)
    if BY_SLICE:
        mbarrier.wait(turns.index((1 - WID) * 4 + piece), op)
    mbarrier.wait(filled.index(slot), (number // RING) & 1)
    if BY_SLICE:
        mbarrier.arrive(turns.index(WID * 4 + piece), count=1)
    if write:
        if MASTER:
            w = master_buf.index(slot).load(layout)
        elif WEIGHT:
            w = load_slice(w_buf.index(slot), 0.0, W_CODEC, layout)
        else:
            w = g
        s0 = g
        s1 = g
        if JOINT:
            s0, s1 = load_both(s0_buf.index(slot), s1_buf.index(slot), s0_scale, g, S0_CODEC, S1_CODEC)
        else:
            if SLOTS >= 1:
                s0 = load_slice(s0_buf.index(slot), s0_scale, S0_CODEC, layout)
            if SLOTS >= 2:
                s1 = load_slice(s1_buf.index(slot), s1_scale, S1_CODEC, layout)
        w, s0, s1 = EPILOGUE(g, w, s0, s1, numbers)
        w_lane = 0
        s0_lane = 0
        s1_lane = 0
        if (W_CODEC | S0_CODEC | S1_CODEC) & RANDOM:
            w_lane, s0_lane, s1_lane = accumulator_lanes(words, unknown_zero, layout)
        # Before the weights: their codes then wait for no other's.
        if JOINT:
            s0_largest = store_both(
                s0_buf.index(slot), s1_buf.index(slot), s0, s1, s0_lane, s1_lane, S0_CODEC, S1_CODEC
            )
        if MASTER:
            master_buf.index(slot).store(w)
        if WEIGHT:
            _largest = store_slice(w_buf.index(slot), w, w_lane, 0.0, 0.0, W_CODEC)
        if SLOTS >= 1 and not JOINT:
            s0_largest = store_slice(s0_buf.index(slot), s0, s0_lane, s0_next, s0_largest, S0_CODEC)
        if SLOTS >= 2 and not JOINT:
            s1_largest = store_slice(s1_buf.index(slot), s1, s1_lane, s1_next, s1_largest, S1_CODEC)
    # Two conditions: the first is decided at compile time.
    if (S0_CODEC & KIND) == TENSORWISE or (S1_CODEC & KIND) == TENSORWISE:  # noqa: SIM102
        if rescale:
            if (S0_CODEC & KIND) == TENSORWISE:
                old = load_slice(s0_buf.index(slot), s0_scale, S0_CODEC, layout)
                s0_largest = store_slice(s0_buf.index(slot), old, 0, s0_next, s0_largest, S0_CODEC)
            if (S1_CODEC & KIND) == TENSORWISE:
                old = load_slice(s1_buf.index(slot), s1_scale, S1_CODEC, layout)
                s1_largest = store_slice(s1_buf.index(slot), old, 0, s1_next, s1_largest, S1_CODEC)
    fence_async_shared()
    mbarrier.arrive(updated.index(slot), count=1)
    if JOINT:
        second, _row = own_place()
        gl.store(gl.where(second != 0, s1_meta_ptr, s0_meta_ptr) + offsets, s0_largest, mask=write)
    else:
        store_scales(s0_meta_ptr, offsets, s0_largest, write, S0_CODEC)
        store_scales(s1_meta_ptr, offsets, s1_largest, write, S1_CODEC)
    return s0_largest, s1_largest
