"""pp2: two consumer warpgroups in turns, fed and emptied by three warps that only move memory.

A persistent program walks over its tiles of 128 x 128. Warpgroup t % 2 multiplies tile t while the other one
updates tile t - 1. Weights and states pass through a ring of [64, 64] slots in shared memory, one slot for
all parts of a slice: a warp loads them with TMA, the consumer changes them where they lie, another warp
stores them. A slot whose slice is not to be applied is stored as it came.

Experts are taken one after the other, each with tiles and a number of steps of its own, which may be none. A
step that ends within an expert also loads tokens of the next one: their rows are cleared before it is taken.

Both consumers share both rings, and a wait on an mbarrier only tells odd phases from even ones, so that a
consumer may wait for a slot only after the other one has taken the slot's previous content: the `turns`
barriers see to that, one pair for the mainloop and one for the update (of a tile, or of each slice).
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false, reportIndexIssue=false
from __future__ import annotations

from titanforge.kernels.codec_arithmetic import BLOCKWISE, KIND, RANDOM
from titanforge.kernels.gluon._gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    partition_barrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from titanforge.kernels.gluon.movers import load_operands, load_slots, place_of, store_slots
from titanforge.kernels.gluon.pairs import nothing_met
from titanforge.kernels.gluon.row_scales import own_place
from titanforge.kernels.gluon.slice_update import shared_number, shared_numbers, update_slice
from titanforge.kernels.gluon.slices import keep_largest, next_scale_of, random_key, scale_at
from titanforge.kernels.tiles import count_nonfinite


@jit
def clear_rows(buf, first, BLOCK_T: gl.constexpr, COLUMNS: gl.constexpr):
    """Zero the rows of [BLOCK_T, COLUMNS] operands of 2 bytes from `first` on, two columns at a time."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    pairs = reinterpret(buf, gl.int32, [BLOCK_T, COLUMNS // 2], SHARED)
    row = gl.arange(0, BLOCK_T, gl.SliceLayout(1, LAYOUT))[:, None]
    pairs.store(gl.where(row < first, pairs.load(LAYOUT), 0))


@jit
def multiply(
    dy_buf, x_buf, filled, free, stage, phase, tokens, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, GROUPED: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """(accumulator with its last product in flight, stage after the last): one tile's mainloop."""
    steps = gl.cdiv(tokens, BLOCK_T)
    # Never `previous = stage` here: a variable that takes another's value before and inside of a loop is not
    # seen as carried by the loop.
    g = gl.zeros((BLOCK_N, BLOCK_K), gl.float32, MMA)
    for step in range(steps):
        mbarrier.wait(filled.index(stage), phase)
        if GROUPED:
            left = tokens - step * BLOCK_T
            if left < BLOCK_T:
                clear_rows(dy_buf.index(stage), left, BLOCK_T, BLOCK_N)
                clear_rows(x_buf.index(stage), left, BLOCK_T, BLOCK_K)
                fence_async_shared()
                partition_barrier()
        g = warpgroup_mma(
            dy_buf.index(stage).permute((1, 0)), x_buf.index(stage), g, use_acc=step > 0, is_async=True
        )
        g = warpgroup_mma_wait(1, (g,))
        mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1, pred=step > 0)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return g, stage


@jit
def times(x, scale, PIECE: gl.constexpr):
    # Each unlike the others, or the compiler would merge their branches: of `where` it makes two selects.
    asm: gl.constexpr = f"mul.rn.f32 $0, $1, $2; // {PIECE}"
    return gl.inline_asm_elementwise(asm, "=f,f,f", [x, scale], dtype=gl.float32, is_pure=True, pack=1)


@jit
def moved(x, PIECE: gl.constexpr):
    asm: gl.constexpr = f"mov.b32 $0, $1; // {PIECE}"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def pick_next(piece, scale, x01, x10, x11):
    """Of the slices after the first one the one that follows, times the scale: the product that every rule
    begins with takes the place of a move. Slices go by rows of two.
    """
    if piece == 0:
        x = times(x01, scale, 1)
    elif piece == 1:
        x = times(x10, scale, 2)
    else:
        x = times(x11, scale, 3)
    return x


@jit
def pick_next_both(piece, scale, x01, x10, x11, own01, own10, own11):
    """`pick_next`, and with it the next slice's own of what has no scale."""
    if piece == 0:
        x = times(x01, scale, 1)
        own = moved(own01, 1)
    elif piece == 1:
        x = times(x10, scale, 2)
        own = moved(own10, 2)
    else:
        x = times(x11, scale, 3)
        own = moved(own11, 3)
    return x, own


@jit
def consume(
    WID: gl.constexpr, operands, ring, numbers, multiply_turns, update_turns, s0_meta_ptr, s1_meta_ptr, h_ptr,
    rng_ptr, tensor_id, norm_ptr, nonfinite_ptr, offsets_ptr, T, tiles, tiles_n, tiles_k, scale_stride, group,
    EPILOGUE: gl.constexpr, HYPERS: gl.constexpr, SLOTS: gl.constexpr, WEIGHT: gl.constexpr,
    MASTER: gl.constexpr,
    W_CODEC: gl.constexpr, S0_CODEC: gl.constexpr, S1_CODEC: gl.constexpr,
    NORM: gl.constexpr, COUNT: gl.constexpr, GROUPED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr, RING: gl.constexpr, BY_SLICE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: every other tile, mainloop and update."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    SLICE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, SLICE)
    dy_buf, x_buf, filled, free = operands
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    rows = gl.arange(0, 64, ROWS)
    apply = gl.load(h_ptr) != 0
    scale = shared_number(numbers, 3, HYPERS)  # of gradients
    numbers = shared_numbers(numbers, HYPERS)
    key = random_key(rng_ptr, (W_CODEC | S0_CODEC | S1_CODEC) & RANDOM)
    s0_next = next_scale_of(s0_meta_ptr, S0_CODEC)
    s1_next = next_scale_of(s1_meta_ptr, S1_CODEC)
    # Two states of block codecs: what is the first one's stands for both, see `row_scales`.
    JOINT: gl.constexpr = (S0_CODEC & KIND) == BLOCKWISE and (S1_CODEC & KIND) == BLOCKWISE
    if JOINT:
        second, rows = own_place()
        scales = gl.where(second != 0, s1_meta_ptr, s0_meta_ptr)
        OWN: gl.constexpr = rows.type.layout
        s0_largest = gl.zeros([128], gl.float32, OWN)
        s1_largest = 0.0
    else:
        s0_largest = nothing_met(SLICE, S0_CODEC)
        s1_largest = nothing_met(SLICE, S1_CODEC)
    op = 1 - WID  # a fresh barrier lets the first consumer pass; the second waits for the first
    # Steps of all tiles before this one, which say where the ring of operands stands.
    position = 0
    if GROUPED and WID == 1:
        position += gl.cdiv(place_of(offsets_ptr, first, T, tiles_n, tiles_k, group, GROUPED)[4], BLOCK_T)
    for t in range(WID, tiles, 2):
        program = first + t * programs
        expert, i, j, _first_token, tokens = place_of(
            offsets_ptr, program, T, tiles_n, tiles_k, group, GROUPED
        )
        first_row = (expert * tiles_n + i) * BLOCK_N
        # Where a thread has but one scale of a slice, all come before the mainloop: loads of so many lines
        # hold up those from shared memory. Else the first slice's do, and the others' come a slice ahead.
        offsets = (first_row + rows) * scale_stride + j * (BLOCK_K // 64)
        if JOINT:
            below = scales + 64 * scale_stride
            s0_scale = gl.load(scales + offsets)
            s1_scale = 0.0
            scale01 = gl.load(scales + offsets + 1)
            scale10 = gl.load(below + offsets)
            scale11 = gl.load(below + offsets + 1)
        else:
            s0_scale = scale_at(s0_meta_ptr, offsets, S0_CODEC)
            s1_scale = scale_at(s1_meta_ptr, offsets, S1_CODEC)

        if GROUPED:
            step = position
            other = gl.minimum(t + 1, tiles - 1) * programs + first
            next_tokens = place_of(offsets_ptr, other, T, tiles_n, tiles_k, group, GROUPED)[4]
            position += gl.cdiv(tokens, BLOCK_T) + gl.cdiv(next_tokens, BLOCK_T)
        else:
            step = t * gl.cdiv(tokens, BLOCK_T)
        mbarrier.wait(multiply_turns.index(1 - WID), op)
        g, stage = multiply(
            dy_buf, x_buf, filled, free, step % STAGES, (step // STAGES) & 1, tokens, BLOCK_N, BLOCK_K,
            BLOCK_T, STAGES, GROUPED, MMA,
        )  # fmt: skip
        mbarrier.arrive(multiply_turns.index(WID), count=1)
        g = warpgroup_mma_wait(0, (g,))
        last_stage = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(free.index(last_stage), count=1, pred=tokens > 0)

        bad = count_nonfinite(g)
        if COUNT:
            gl.atomic_add(nonfinite_ptr, bad, mask=(bad > 0) & apply, sem="relaxed")
        if NORM:
            gl.store(norm_ptr + program, gl.sum(gl.sum(g * g, axis=1), axis=0))
        write = apply & (bad == 0)
        rescale = apply & (bad != 0)
        # In registers only: [128, 128] to four slices of [64, 64].
        left, right = g.reshape((2, 64, 2, 64)).permute((1, 3, 0, 2)).split()
        g00, g10 = left.split()
        g01, g11 = right.split()
        g00 = gl.convert_layout(g00, SLICE, assert_trivial=True)
        g01 = gl.convert_layout(g01, SLICE, assert_trivial=True)
        g10 = gl.convert_layout(g10, SLICE, assert_trivial=True)
        g11 = gl.convert_layout(g11, SLICE, assert_trivial=True)
        g00 = g00 * scale
        if not BY_SLICE:
            mbarrier.wait(update_turns.index(1 - WID), op)
        # A loop that selects its slice, not four copies of the update: code of both consumers that outgrows
        # the instruction cache (some 128 KB) is fetched anew for every tile. A slice's registers are given up
        # to its update, and the next slice takes them over.
        for piece in range(4):
            after = offsets + gl.where(piece % 2 == 0, 1, gl.where(piece == 1, 64 * scale_stride - 1, 0))
            if not JOINT:
                next_s0_scale = scale_at(s0_meta_ptr, after, S0_CODEC)
                next_s1_scale = scale_at(s1_meta_ptr, after, S1_CODEC)
            s0_largest, s1_largest = update_slice(
                g00, t * 4 + piece, write, rescale, s0_scale, s1_scale, s0_next, s1_next, s0_largest,
                s1_largest, offsets, ring, s0_meta_ptr, s1_meta_ptr, numbers, key, tensor_id,
                first_row + piece // 2 * 64, j * BLOCK_K + piece % 2 * 64, group >> 24, update_turns, op,
                piece, WID, EPILOGUE, SLOTS, WEIGHT, MASTER, W_CODEC, S0_CODEC, S1_CODEC, RING, BY_SLICE,
                JOINT,
            )  # fmt: skip
            offsets = after
            if JOINT:
                g00, s0_scale = pick_next_both(piece, scale, g01, g10, g11, scale01, scale10, scale11)
            else:
                g00 = pick_next(piece, scale, g01, g10, g11)
                s0_scale = next_s0_scale
                s1_scale = next_s1_scale
        if not BY_SLICE:
            mbarrier.arrive(update_turns.index(WID), count=1)
        op ^= 1
    keep_largest(s0_meta_ptr, s0_largest, apply, S0_CODEC)
    keep_largest(s1_meta_ptr, s1_largest, apply, S1_CODEC)


@jit(
    unspecialized=(
        "h_ptr",
        "rng_ptr",
        "tensor_id",
        "norm_ptr",
        "nonfinite_ptr",
        "offsets_ptr",
        "E",
        "T",
        "group",
    )
)
def pingpong_kernel(
    dy_desc, x_desc, w_desc, master_desc, s0_desc, s1_desc, s0_meta_ptr, s1_meta_ptr, h_ptr, rng_ptr,
    tensor_id, norm_ptr, nonfinite_ptr, offsets_ptr, E, N, K, T, group,
    EPILOGUE: gl.constexpr, HYPERS: gl.constexpr, SLOTS: gl.constexpr, WEIGHT: gl.constexpr,
    MASTER: gl.constexpr,
    W_CODEC: gl.constexpr, S0_CODEC: gl.constexpr, S1_CODEC: gl.constexpr, SLOT_BYTES: gl.constexpr,
    NORM: gl.constexpr, COUNT: gl.constexpr, GROUPED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr, RING: gl.constexpr, BY_SLICE: gl.constexpr, PAIRED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, MOVER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """All tiles of one weight [N, K], N and K multiples of the tile. dy: [T, N], x: [T, K], T at least 1.

    Arguments as `wgrad_kernel`; descriptors of weight, master and states have blocks of [64, 64] and see
    [E * N, K]. GROUPED: E experts, with offsets [E + 1]; else E is 1. SLOT_BYTES:
    of one slot of the ring. RING: its slots, at least 4 if BY_SLICE, even if PAIRED. Launch with 4 warps.
    """
    gl.static_assert(RING >= 4 or not BY_SLICE)
    gl.static_assert(RING % 2 == 0 or not PAIRED)
    dy_buf = gl.allocate_shared_memory(dy_desc.dtype, [STAGES, BLOCK_T, BLOCK_N], dy_desc.layout)
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_T, BLOCK_K], x_desc.layout)
    w_buf = dy_buf  # stands where there is no such part
    master_buf = dy_buf
    s0_buf = dy_buf
    s1_buf = dy_buf
    if WEIGHT:
        w_buf = gl.allocate_shared_memory(w_desc.dtype, [RING, 64, 64], w_desc.layout)
    if MASTER:
        master_buf = gl.allocate_shared_memory(master_desc.dtype, [RING, 64, 64], master_desc.layout)
    if SLOTS >= 1:
        s0_buf = gl.allocate_shared_memory(s0_desc.dtype, [RING, 64, 64], s0_desc.layout)
    if SLOTS >= 2:
        s1_buf = gl.allocate_shared_memory(s1_desc.dtype, [RING, 64, 64], s1_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    slot_filled = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    slot_updated = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    slot_free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    multiply_turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    update_turns = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    numbers = gl.allocate_shared_memory(gl.float32, [HYPERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for index in gl.static_range(HYPERS):
        one = gl.full([1], gl.load(h_ptr + index), gl.float32, gl.BlockedLayout([1], [32], [4], [0]))
        numbers.index(index).store(one)
    for index in gl.static_range(2):
        mbarrier.init(multiply_turns.index(index), count=1)
    for index in gl.static_range(8):
        mbarrier.init(update_turns.index(index), count=1)
    for index in gl.static_range(STAGES):
        mbarrier.init(filled.index(index), count=1)
        mbarrier.init(free.index(index), count=1)
    for index in gl.static_range(RING):
        mbarrier.init(slot_filled.index(index), count=1)
        mbarrier.init(slot_updated.index(index), count=1)
        mbarrier.init(slot_free.index(index), count=1)

    tiles_n = N // BLOCK_N
    tiles_k = K // BLOCK_K
    # What lies beyond the last token of all is loaded as zeros.
    tiles = gl.cdiv(E * tiles_n * tiles_k - gl.program_id(0), gl.num_programs(0))
    scale_stride = K // 64
    operands = (dy_buf, x_buf, filled, free)
    ring = (w_buf, master_buf, s0_buf, s1_buf, slot_filled, slot_updated, slot_free)
    parts = (w_desc, master_desc, s0_desc, s1_desc)
    gl.warp_specialize([
        (consume, (0, operands, ring, numbers, multiply_turns, update_turns, s0_meta_ptr, s1_meta_ptr,
                   h_ptr, rng_ptr, tensor_id, norm_ptr, nonfinite_ptr, offsets_ptr, T, tiles, tiles_n,
                   tiles_k, scale_stride, group, EPILOGUE, HYPERS, SLOTS, WEIGHT, MASTER, W_CODEC, S0_CODEC,
                   S1_CODEC, NORM, COUNT, GROUPED, BLOCK_N, BLOCK_K, BLOCK_T, STAGES, RING, BY_SLICE)),
        (consume, (1, operands, ring, numbers, multiply_turns, update_turns, s0_meta_ptr, s1_meta_ptr,
                   h_ptr, rng_ptr, tensor_id, norm_ptr, nonfinite_ptr, offsets_ptr, T, tiles, tiles_n,
                   tiles_k, scale_stride, group, EPILOGUE, HYPERS, SLOTS, WEIGHT, MASTER, W_CODEC, S0_CODEC,
                   S1_CODEC, NORM, COUNT, GROUPED, BLOCK_N, BLOCK_K, BLOCK_T, STAGES, RING, BY_SLICE)),
        (load_operands, (dy_desc, x_desc, operands, offsets_ptr, T, tiles, tiles_n, tiles_k, group, GROUPED,
                         BLOCK_N, BLOCK_K, BLOCK_T, STAGES)),
        (load_slots, (parts, ring, tiles, tiles_n, tiles_k, group, SLOT_BYTES, GROUPED, WEIGHT, MASTER, SLOTS,
                      BLOCK_N, BLOCK_K, RING, PAIRED)),
        (store_slots, (parts, ring, tiles, tiles_n, tiles_k, group, GROUPED, WEIGHT, MASTER, SLOTS, BLOCK_N,
                       BLOCK_K, RING, PAIRED)),
    ], [4, 1, 1, 1], [CONSUMER_REGISTERS, MOVER_REGISTERS, MOVER_REGISTERS, MOVER_REGISTERS])  # fmt: skip
