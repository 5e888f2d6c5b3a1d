"""The ping-pong form's warps that only move memory, and where each tile of a program lies."""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false, reportIndexIssue=false
from __future__ import annotations

from titanforge.kernels.gluon._gluon import gl, jit, mbarrier, tma_load, tma_store, tma_store_wait
from titanforge.kernels.wgrad_kernel import tile_of


@jit
def tile_of_all(program, tiles_n, tiles_k, group, GROUPED: gl.constexpr):
    """(expert, i, j) of a tile. group: rows of tiles that are walked together."""
    expert = 0
    if GROUPED:
        expert = program // (tiles_n * tiles_k)
        program = program % (tiles_n * tiles_k)
    i, j = tile_of(program, tiles_n, tiles_k, group)
    return expert, i, j


@jit
def place_of(offsets_ptr, program, T, tiles_n, tiles_k, group, GROUPED: gl.constexpr):
    """(expert, i, j, first token, tokens) of a tile."""
    expert, i, j = tile_of_all(program, tiles_n, tiles_k, group, GROUPED)
    first_token = 0
    tokens = T
    if GROUPED:
        first_token = gl.load(offsets_ptr + expert).to(gl.int32)
        tokens = gl.load(offsets_ptr + expert + 1).to(gl.int32) - first_token
    return expert, i, j, first_token, tokens


@jit
def load_operands(dy_desc, x_desc, operands, offsets_ptr, T, tiles, tiles_n, tiles_k, group,
                  GROUPED: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr,
                  STAGES: gl.constexpr):  # fmt: skip
    """One warp: dy and x of every step of every tile of this program."""
    dy_buf, x_buf, filled, free = operands
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    stage = 0
    phase = 1
    for t in range(tiles):
        _expert, i, j, first_token, tokens = place_of(
            offsets_ptr, first + t * programs, T, tiles_n, tiles_k, group, GROUPED
        )
        for step in range(gl.cdiv(tokens, BLOCK_T)):
            token = first_token + step * BLOCK_T
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(filled.index(stage), dy_desc.block_type.nbytes + x_desc.block_type.nbytes)
            tma_load(dy_desc, [token, i * BLOCK_N], filled.index(stage), dy_buf.index(stage))
            tma_load(x_desc, [token, j * BLOCK_K], filled.index(stage), x_buf.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@jit
def load_part(desc, buf, filled, slot, row, column, PAIRED: gl.constexpr):
    """One part of a slice, or of two that lie side by side."""
    tma_load(desc, [row, column], filled.index(slot), buf.index(slot))
    if PAIRED:
        tma_load(desc, [row, column + 64], filled.index(slot + 1), buf.index(slot + 1))


@jit
def store_part(desc, buf, slot, row, column, PAIRED: gl.constexpr):
    """The way back."""
    tma_store(desc, [row, column], buf.index(slot))
    if PAIRED:
        tma_store(desc, [row, column + 64], buf.index(slot + 1))


@jit
def load_slots(parts, ring, tiles, tiles_n, tiles_k, group, BYTES: gl.constexpr,
               GROUPED: gl.constexpr, WEIGHT: gl.constexpr, MASTER: gl.constexpr, SLOTS: gl.constexpr,
               BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, RING: gl.constexpr,
               PAIRED: gl.constexpr):  # fmt: skip
    """One warp: all parts of the four slices of every tile.

    PAIRED: two slices of the same rows at a time, part by part: memory is asked for twice as many bytes that
    are neighbours at once.
    """
    w_desc, master_desc, s0_desc, s1_desc = parts
    w_buf, master_buf, s0_buf, s1_buf, filled, _updated, free = ring
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    slot = 0
    phase = 1
    for t in range(tiles):
        expert, i, j = tile_of_all(first + t * programs, tiles_n, tiles_k, group, GROUPED)
        for piece in range(0, 4, 2 if PAIRED else 1):
            row = (expert * tiles_n + i) * BLOCK_N + (piece // 2) * 64
            column = j * BLOCK_K + (piece % 2) * 64
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(filled.index(slot), BYTES)
            if PAIRED:
                mbarrier.wait(free.index(slot + 1), phase)
                mbarrier.expect(filled.index(slot + 1), BYTES)
            if WEIGHT:
                load_part(w_desc, w_buf, filled, slot, row, column, PAIRED)
            if MASTER:
                load_part(master_desc, master_buf, filled, slot, row, column, PAIRED)
            if SLOTS >= 1:
                load_part(s0_desc, s0_buf, filled, slot, row, column, PAIRED)
            if SLOTS >= 2:
                load_part(s1_desc, s1_buf, filled, slot, row, column, PAIRED)
            slot += 2 if PAIRED else 1
            if slot == RING:
                slot = 0
                phase ^= 1


@jit
def store_slots(parts, ring, tiles, tiles_n, tiles_k, group, GROUPED: gl.constexpr,
                WEIGHT: gl.constexpr, MASTER: gl.constexpr, SLOTS: gl.constexpr,
                BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, RING: gl.constexpr,
                PAIRED: gl.constexpr):  # fmt: skip
    """One warp: send the slots back as they are updated, and free them. PAIRED: as of `load_slots`."""
    w_desc, master_desc, s0_desc, s1_desc = parts
    w_buf, master_buf, s0_buf, s1_buf, _filled, updated, free = ring
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    slot = 0
    phase = 0
    for t in range(tiles):
        expert, i, j = tile_of_all(first + t * programs, tiles_n, tiles_k, group, GROUPED)
        for piece in range(0, 4, 2 if PAIRED else 1):
            row = (expert * tiles_n + i) * BLOCK_N + (piece // 2) * 64
            column = j * BLOCK_K + (piece % 2) * 64
            mbarrier.wait(updated.index(slot), phase)
            if PAIRED:
                mbarrier.wait(updated.index(slot + 1), phase)
            if WEIGHT:
                store_part(w_desc, w_buf, slot, row, column, PAIRED)
            if MASTER:
                store_part(master_desc, master_buf, slot, row, column, PAIRED)
            if SLOTS >= 1:
                store_part(s0_desc, s0_buf, slot, row, column, PAIRED)
            if SLOTS >= 2:
                store_part(s1_desc, s1_buf, slot, row, column, PAIRED)
            tma_store_wait(0)
            mbarrier.arrive(free.index(slot), count=1)
            if PAIRED:
                mbarrier.arrive(free.index(slot + 1), count=1)
            slot += 2 if PAIRED else 1
            if slot == RING:
                slot = 0
                phase ^= 1
