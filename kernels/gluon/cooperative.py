"""coop: eight warps multiply tiles of 128 x 256, four others update what was finished before.

The multiplying warps issue their own TMA loads and never touch weights or states. They hand each finished
tile over in fp32, as four chunks of 64 columns through a ring in shared memory, and go on. The updating warps
read and write weights and states straight in global memory, two pieces of rows ahead.

With each chunk goes a flag: whether its tile is finite. The updating warps pass over one that is not.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false, reportIndexIssue=false
from __future__ import annotations

from titanforge.kernels.codec_arithmetic import BLOCKWISE, KIND, RANDOM, TENSORWISE
from titanforge.kernels.gluon._gluon import (
    gl,
    jit,
    mbarrier,
    partition_barrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from titanforge.kernels.gluon.slices import encode, keep_largest, largest_of_eight, next_scale_of, row_lanes
from titanforge.kernels.gluon.words import decode_words, load_words
from titanforge.kernels.tiles import count_nonfinite
from titanforge.kernels.wgrad_kernel import tile_of


@jit
def issue(dy_desc, x_desc, dy_buf, x_buf, filled, stage, i, j, step, wanted,
          BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr):  # fmt: skip
    """Ask for one step's operands."""
    bar = filled.index(stage)
    mbarrier.expect(bar, dy_desc.block_type.nbytes + x_desc.block_type.nbytes, pred=wanted)
    tma_load(dy_desc, [step * BLOCK_T, i * BLOCK_N], bar, dy_buf.index(stage), pred=wanted)
    tma_load(x_desc, [step * BLOCK_T, j * BLOCK_K], bar, x_buf.index(stage), pred=wanted)


@jit
def hand_over(g, bad, number, chunks, flags, chunk_filled, chunk_free, CHUNKS: gl.constexpr):
    """Chunk `number` of this program to the updating warps. bad: whether its tile is not finite."""
    slot = number % CHUNKS
    mbarrier.wait(chunk_free.index(slot), ((number // CHUNKS) & 1) ^ 1)
    chunks.index(slot).store(g)
    flags.index(slot).store(gl.full([1], bad, gl.int32, gl.BlockedLayout([1], [32], [8], [0])))
    mbarrier.arrive(chunk_filled.index(slot), count=1)


@jit
def multiply_tiles(
    dy_desc, x_desc, dy_buf, x_buf, chunks, flags, filled, chunk_filled, chunk_free, h_ptr, norm_ptr,
    nonfinite_ptr, tiles, steps, tiles_n, tiles_k, group, NORM: gl.constexpr, COUNT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """Eight warps: the mainloop of every tile of this program."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, BLOCK_K, 16]
    )
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    last = tiles_n * tiles_k - 1
    apply = gl.load(h_ptr) != 0
    stage = 0
    phase = 0
    next_step = 0
    next_tile = 0
    next_i, next_j = tile_of(first, tiles_n, tiles_k, group)
    for ahead in gl.static_range(STAGES - 1):
        issue(
            dy_desc, x_desc, dy_buf, x_buf, filled, ahead, next_i, next_j, next_step, next_tile < tiles,
            BLOCK_N, BLOCK_K, BLOCK_T,
        )  # fmt: skip
        next_step += 1
        if next_step == steps:
            next_step = 0
            next_tile += 1
            next_i, next_j = tile_of(gl.minimum(first + next_tile * programs, last), tiles_n, tiles_k, group)
    for t in range(tiles):
        g = gl.zeros((BLOCK_N, BLOCK_K), gl.float32, MMA)
        for step in range(steps):
            mbarrier.wait(filled.index(stage), phase)
            g = warpgroup_mma(
                dy_buf.index(stage).permute((1, 0)), x_buf.index(stage), g, use_acc=step > 0, is_async=True
            )
            g = warpgroup_mma_wait(1, (g,))
            # The product before has read its stage, as far as this warp sees; after the barrier, for all
            # warps.
            partition_barrier()
            issue(
                dy_desc, x_desc, dy_buf, x_buf, filled, gl.where(stage == 0, STAGES - 1, stage - 1), next_i,
                next_j, next_step, next_tile < tiles, BLOCK_N, BLOCK_K, BLOCK_T,
            )  # fmt: skip
            next_step += 1
            if next_step == steps:
                next_step = 0
                next_tile += 1
                next_i, next_j = tile_of(
                    gl.minimum(first + next_tile * programs, last), tiles_n, tiles_k, group
                )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        g = warpgroup_mma_wait(0, (g,))
        bad = count_nonfinite(g)
        if COUNT:
            gl.atomic_add(nonfinite_ptr, bad, mask=(bad > 0) & apply, sem="relaxed")
        if NORM:
            gl.store(norm_ptr + first + t * programs, gl.sum(gl.sum(g * g, axis=1), axis=0))
        # In registers only: [128, 256] to four chunks of [128, 64].
        even, odd = g.reshape((BLOCK_N, 2, 2, BLOCK_K // 4)).permute((0, 3, 1, 2)).split()
        g0, g2 = even.split()
        g1, g3 = odd.split()
        hand_over(g0, bad, t * 4, chunks, flags, chunk_filled, chunk_free, CHUNKS)
        hand_over(g1, bad, t * 4 + 1, chunks, flags, chunk_filled, chunk_free, CHUNKS)
        hand_over(g2, bad, t * 4 + 2, chunks, flags, chunk_filled, chunk_free, CHUNKS)
        hand_over(g3, bad, t * 4 + 3, chunks, flags, chunk_filled, chunk_free, CHUNKS)


@jit
def fetch(
    w_ptr, master_ptr, s0_ptr, s1_ptr, s0_meta_ptr, s1_meta_ptr, base, K, rows, scale_offsets,
    SLOTS: gl.constexpr, WEIGHT: gl.constexpr, MASTER: gl.constexpr, S0_CODEC: gl.constexpr,
    S1_CODEC: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Words of stored codes of one piece: master or weight, states, and the states' block scales.

    What there is not is stood for by something that there is.
    """
    if SLOTS >= 1:
        s0 = load_words(s0_ptr, base, K, ROWS)
    if SLOTS >= 2:
        s1 = load_words(s1_ptr, base, K, ROWS)
    if MASTER:
        w = load_words(master_ptr, base, K, ROWS)
    elif WEIGHT:
        w = load_words(w_ptr, base, K, ROWS)
    else:
        w = s0
    if SLOTS < 1:
        s0 = w
    if SLOTS < 2:
        s1 = s0
    a = rows
    if SLOTS >= 1 and (S0_CODEC & KIND) == BLOCKWISE:
        a = gl.load(s0_meta_ptr + scale_offsets)
    b = rows
    if SLOTS >= 2 and (S1_CODEC & KIND) == BLOCKWISE:
        b = gl.load(s1_meta_ptr + scale_offsets)
    return w, s0, s1, a, b


@jit
def scale_of(row_scale, tensor_scale, CODEC: gl.constexpr):
    """What decoding multiplies by: the block scales that were fetched, or the tensor's."""
    if (CODEC & KIND) == BLOCKWISE:
        return row_scale[:, None]
    else:
        return tensor_scale


@jit
def tensor_scale_of(meta_ptr, CODEC: gl.constexpr):
    if (CODEC & KIND) == TENSORWISE:
        return gl.load(meta_ptr)
    else:
        return 0.0


@jit
def put(ptr, meta_ptr, new, lane, write, next_scale, largest, off, scale_offsets, CODEC: gl.constexpr):
    """Encode and store fp32 [R, 64] if `write`. Returns the magnitudes met (fp8)."""
    codes, largest = encode(new, lane, meta_ptr, scale_offsets, write, next_scale, largest, CODEC)
    gl.store(ptr + off, codes, mask=write, cache_modifier=".cs")
    return largest


@jit
def rescale_chunk(ptr, meta_ptr, scale, next_scale, largest, base, off, K, CODEC: gl.constexpr,
                  LAYOUT: gl.constexpr, ROWS: gl.constexpr, PER_CHUNK: gl.constexpr):  # fmt: skip
    """What an unapplied chunk holds, written again: the scale of the whole tensor moves."""
    if (CODEC & KIND) == TENSORWISE:
        for piece in range(PER_CHUNK):
            here = base + piece * ROWS * K
            old = decode_words(load_words(ptr, here, K, ROWS), scale, CODEC, LAYOUT)
            largest = put(ptr, meta_ptr, old, 0, True, next_scale, largest, here + off, 0, CODEC)
    return largest


@jit
def update_tiles(
    w_ptr, master_ptr, s0_ptr, s1_ptr, s0_meta_ptr, s1_meta_ptr, h_ptr, rng_ptr, tensor_id, chunks,
    flags, chunk_filled, chunk_free, tiles, tiles_n, tiles_k, group, K,
    EPILOGUE: gl.constexpr, SLOTS: gl.constexpr, WEIGHT: gl.constexpr, MASTER: gl.constexpr,
    W_CODEC: gl.constexpr, S0_CODEC: gl.constexpr, S1_CODEC: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Four warps: the update of every tile, chunk by chunk, in pieces of ROWS rows."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PER_CHUNK: gl.constexpr = BLOCK_N // ROWS
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    last = tiles_n * tiles_k - 1
    apply = gl.load(h_ptr) != 0
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    off = rows[:, None] * K + columns[None, :]
    blocks = K // 64
    nothing = gl.zeros([ROWS, 64], gl.float32, LAYOUT)
    s0_largest = largest_of_eight(nothing)
    s1_largest = largest_of_eight(nothing)
    s0_scale = tensor_scale_of(s0_meta_ptr, S0_CODEC)
    s1_scale = tensor_scale_of(s1_meta_ptr, S1_CODEC)
    s0_next = next_scale_of(s0_meta_ptr, S0_CODEC)
    s1_next = next_scale_of(s1_meta_ptr, S1_CODEC)
    # Loaded once: a few weights are little to load twelve numbers for. What a rule does not use, is not.
    hyper = (
        gl.load(h_ptr), gl.load(h_ptr + 1), gl.load(h_ptr + 2), gl.load(h_ptr + 3), gl.load(h_ptr + 4),
        gl.load(h_ptr + 5), gl.load(h_ptr + 6), gl.load(h_ptr + 7), gl.load(h_ptr + 8), gl.load(h_ptr + 9),
        gl.load(h_ptr + 10), gl.load(h_ptr + 11),
    )  # fmt: skip

    i, j = tile_of(first, tiles_n, tiles_k, group)
    base = (i * BLOCK_N).to(gl.int64) * K + j * BLOCK_K
    scale_base = (i * BLOCK_N + rows) * blocks + j * (BLOCK_K // 64)
    w0, m0, v0, a0, b0 = fetch(
        w_ptr, master_ptr, s0_ptr, s1_ptr, s0_meta_ptr, s1_meta_ptr, base, K, rows, scale_base,
        SLOTS, WEIGHT, MASTER, S0_CODEC, S1_CODEC, ROWS,
    )  # fmt: skip
    w1, m1, v1, a1, b1 = fetch(
        w_ptr, master_ptr, s0_ptr, s1_ptr, s0_meta_ptr, s1_meta_ptr, base + ROWS * K, K, rows,
        scale_base + ROWS * blocks, SLOTS, WEIGHT, MASTER, S0_CODEC, S1_CODEC, ROWS,
    )  # fmt: skip
    gl.static_assert(PER_CHUNK >= 2)
    for t in range(tiles):
        next_i, next_j = tile_of(gl.minimum(first + (t + 1) * programs, last), tiles_n, tiles_k, group)
        next_base = (next_i * BLOCK_N).to(gl.int64) * K + next_j * BLOCK_K
        next_scale_base = (next_i * BLOCK_N + rows) * blocks + next_j * (BLOCK_K // 64)
        # Not unrolled over the chunks: see `pingpong.consume` on the instruction cache.
        for chunk in range(4):
            number = t * 4 + chunk
            slot = number % CHUNKS
            mbarrier.wait(chunk_filled.index(slot), (number // CHUNKS) & 1)
            flag = flags.index(slot).load(gl.BlockedLayout([1], [32], [4], [0]))
            good = gl.max(flag, axis=0) == 0
            write = good & apply
            s0_before = s0_largest
            s1_before = s1_largest
            after = gl.where(chunk == 3, next_base, base + (chunk + 1) * 64)
            scales_after = gl.where(chunk == 3, next_scale_base, scale_base + (chunk + 1))
            for piece in gl.static_range(PER_CHUNK):
                here = base + chunk * 64 + piece * ROWS * K
                scales_here = scale_base + chunk + piece * ROWS * blocks
                if piece + 2 < PER_CHUNK:
                    there = here + 2 * ROWS * K
                    scales_there = scales_here + 2 * ROWS * blocks
                else:
                    there = after + (piece + 2 - PER_CHUNK) * ROWS * K
                    scales_there = scales_after + (piece + 2 - PER_CHUNK) * ROWS * blocks
                w2, m2, v2, a2, b2 = fetch(
                    w_ptr, master_ptr, s0_ptr, s1_ptr, s0_meta_ptr, s1_meta_ptr, there, K, rows,
                    scales_there, SLOTS, WEIGHT, MASTER, S0_CODEC, S1_CODEC, ROWS,
                )  # fmt: skip
                g = chunks.index(slot).slice(piece * ROWS, ROWS, 0).load(LAYOUT)
                if MASTER:
                    w = decode_words(w0, 0.0, 0, LAYOUT)
                elif WEIGHT:
                    w = decode_words(w0, 0.0, W_CODEC, LAYOUT)
                else:
                    w = g
                if SLOTS >= 1:
                    s0 = decode_words(m0, scale_of(a0, s0_scale, S0_CODEC), S0_CODEC, LAYOUT)
                else:
                    s0 = g
                if SLOTS >= 2:
                    s1 = decode_words(v0, scale_of(b0, s1_scale, S1_CODEC), S1_CODEC, LAYOUT)
                else:
                    s1 = g
                w_new, s0_new, s1_new = EPILOGUE(g, w, s0, s1, hyper)
                w_lane = 0
                s0_lane = 0
                s1_lane = 0
                if (W_CODEC | S0_CODEC | S1_CODEC) & RANDOM:
                    w_lane, s0_lane, s1_lane = row_lanes(
                        rng_ptr, tensor_id, i * BLOCK_N + piece * ROWS, j * BLOCK_K + chunk * 64, ROWS, LAYOUT
                    )
                if MASTER:
                    gl.store(master_ptr + here + off, w_new, mask=write, cache_modifier=".cs")
                if WEIGHT:
                    _largest = put(
                        w_ptr, None, w_new, w_lane, write, 0.0, 0.0, here + off, scales_here, W_CODEC
                    )
                if SLOTS >= 1:
                    s0_largest = put(
                        s0_ptr, s0_meta_ptr, s0_new, s0_lane, write, s0_next, s0_largest, here + off,
                        scales_here, S0_CODEC,
                    )  # fmt: skip
                if SLOTS >= 2:
                    s1_largest = put(
                        s1_ptr, s1_meta_ptr, s1_new, s1_lane, write, s1_next, s1_largest, here + off,
                        scales_here, S1_CODEC,
                    )  # fmt: skip
                w0 = w1
                m0 = m1
                v0 = v1
                a0 = a1
                b0 = b1
                w1 = w2
                m1 = m2
                v1 = v2
                a1 = a2
                b1 = b2
            mbarrier.arrive(chunk_free.index(slot), count=1)
            # Two conditions: the first is decided at compile time.
            if (S0_CODEC & KIND) == TENSORWISE or (S1_CODEC & KIND) == TENSORWISE:  # noqa: SIM102
                if good == 0:
                    s0_largest = s0_before
                    s1_largest = s1_before
                    if apply:
                        s0_largest = rescale_chunk(
                            s0_ptr, s0_meta_ptr, s0_scale, s0_next, s0_before, base + chunk * 64, off, K,
                            S0_CODEC, LAYOUT, ROWS, PER_CHUNK,
                        )  # fmt: skip
                        s1_largest = rescale_chunk(
                            s1_ptr, s1_meta_ptr, s1_scale, s1_next, s1_before, base + chunk * 64, off, K,
                            S1_CODEC, LAYOUT, ROWS, PER_CHUNK,
                        )  # fmt: skip
        i, j = next_i, next_j
        base = next_base
        scale_base = next_scale_base
    keep_largest(s0_meta_ptr, s0_largest, apply, S0_CODEC)
    keep_largest(s1_meta_ptr, s1_largest, apply, S1_CODEC)


@jit(unspecialized=("h_ptr", "rng_ptr", "tensor_id", "norm_ptr", "nonfinite_ptr", "T", "group"))
def cooperative_kernel(
    dy_desc, x_desc, w_ptr, master_ptr, s0_ptr, s1_ptr, s0_meta_ptr, s1_meta_ptr, h_ptr, rng_ptr,
    tensor_id, norm_ptr, nonfinite_ptr, N, K, T, group,
    EPILOGUE: gl.constexpr, SLOTS: gl.constexpr, WEIGHT: gl.constexpr, MASTER: gl.constexpr,
    W_CODEC: gl.constexpr, S0_CODEC: gl.constexpr, S1_CODEC: gl.constexpr,
    NORM: gl.constexpr, COUNT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr, CHUNKS: gl.constexpr, CHUNK_LAYOUT: gl.constexpr, ROWS: gl.constexpr,
    UPDATE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """All tiles of one weight [N, K], N and K multiples of the tile. dy: [T, N], x: [T, K], T at least 1.

    Arguments as `wgrad_kernel`. CHUNKS: slots of the ring through which G passes. ROWS: of a piece. Launch
    with 8 warps.
    """
    dy_buf = gl.allocate_shared_memory(dy_desc.dtype, [STAGES, BLOCK_T, BLOCK_N], dy_desc.layout)
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_T, BLOCK_K], x_desc.layout)
    chunks = gl.allocate_shared_memory(gl.float32, [CHUNKS, BLOCK_N, BLOCK_K // 4], CHUNK_LAYOUT)
    flags = gl.allocate_shared_memory(gl.int32, [CHUNKS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    chunk_filled = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    chunk_free = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(filled.index(index), count=1)
    for index in gl.static_range(CHUNKS):
        mbarrier.init(chunk_filled.index(index), count=1)
        mbarrier.init(chunk_free.index(index), count=1)
    tiles_n = N // BLOCK_N
    tiles_k = K // BLOCK_K
    steps = gl.cdiv(T, BLOCK_T)  # what lies beyond the last token is loaded as zeros
    tiles = gl.cdiv(tiles_n * tiles_k - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize([
        (multiply_tiles, (dy_desc, x_desc, dy_buf, x_buf, chunks, flags, filled, chunk_filled, chunk_free,
                          h_ptr, norm_ptr, nonfinite_ptr, tiles, steps, tiles_n, tiles_k, group, NORM, COUNT,
                          BLOCK_N, BLOCK_K, BLOCK_T, STAGES, CHUNKS)),
        (update_tiles, (w_ptr, master_ptr, s0_ptr, s1_ptr, s0_meta_ptr, s1_meta_ptr, h_ptr, rng_ptr,
                        tensor_id, chunks, flags, chunk_filled, chunk_free, tiles, tiles_n, tiles_k, group, K,
                        EPILOGUE, SLOTS, WEIGHT, MASTER, W_CODEC, S0_CODEC, S1_CODEC, BLOCK_N, BLOCK_K, ROWS,
                        CHUNKS)),
    ], [4], [UPDATE_REGISTERS])  # fmt: skip
