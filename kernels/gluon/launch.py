"""Launching the Gluon forms: which launches they take, shared memory, tensor maps."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import LAUNCH_OPTIONS, cdiv
from titanforge.kernels.codecs import CODECS
from titanforge.kernels.config import TileConfig
from titanforge.kernels.epilogues import Epilogue
from titanforge.kernels.forms import COOPERATIVE, PINGPONG, unavailable
from titanforge.kernels.gluon._gluon import TensorDescriptor, gl
from titanforge.kernels.gluon.cooperative import cooperative_kernel
from titanforge.kernels.gluon.pingpong import pingpong_kernel
from titanforge.kernels.step import Target, kernel_parts

TAKE_EXPERTS = (PINGPONG,)
SHARED_BYTES = 227 * 1024
_OTHER_BYTES = 2048  # barriers, what partitions capture, scratch of reductions
_SLICE = 64 * 64
_MOST_SLOTS = 8
_CHUNK_BYTES = 4 * 128 * 64
# Three groups of 4 warps are launched with 168 registers a thread; then the consumers take from the movers.
PINGPONG_REGISTERS = {"maxnreg": 168, "CONSUMER_REGISTERS": 240, "MOVER_REGISTERS": 24}

# Eight warps keep 160 registers for their accumulators, four take 184.
COOPERATIVE_REGISTERS = {"maxnreg": 168, "UPDATE_REGISTERS": 184}


def refusal(
    dy: Tensor, x: Tensor, target: Target, config: TileConfig, *, observe: bool = False, bias: bool = False
) -> str:
    """Why a launch cannot run in the form of `config`; empty if it can. dy: [T, N], x: [T, K]."""
    if reason := unavailable(dy.device):
        return reason
    if len(target.shape) != 2 and config.form not in TAKE_EXPERTS:
        return "experts"
    if observe:
        return "a pass that only observes"
    if bias:
        return "a bias gradient"
    if dy.dtype != x.dtype or dy.dtype not in (torch.bfloat16, torch.float16):
        return f"operands in {dy.dtype} and {x.dtype}"
    n, k = target.shape[-2:]
    if n % config.block_n or k % config.block_k or target.shape.numel() == 0:
        return f"{n} x {k} is not whole tiles of {config.block_n} x {config.block_k}"
    if dy.shape[0] == 0:
        return "no tokens"
    if target.weight is not None and target.weight.codec.kind != "plain":
        return f"weights stored as {target.weight.codec.name}"
    for operand in (dy, x):
        if (
            operand.stride(1) != 1
            or operand.stride(0) * operand.element_size() % 16
            or operand.data_ptr() % 16
        ):
            return "operands whose rows are not contiguous and aligned to 16 bytes"
    weight, _, master, s0, _, s1, _ = kernel_parts(target)  # scales are loaded one by one
    if any(part is not None and part.data_ptr() % 16 for part in (weight, master, s0, s1)):
        return "weights or states that are not aligned to 16 bytes"
    return ""


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Address:
    """Stands for a tensor in a descriptor: one that is cached must not keep the tensor alive."""

    __slots__ = ("dtype", "pointer")

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


@cache
def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """How a block lies in shared memory."""
    layout: Any = gl.NVMMASharedLayout
    return layout.get_default_for([rows, columns], getattr(gl, str(dtype).removeprefix("torch.")))


@lru_cache(maxsize=16384)
def _descriptor(
    pointer: int, dtype: torch.dtype, rows: int, columns: int, stride: int, block: tuple[int, int]
) -> Any:
    layout = shared_layout(*block, dtype)
    return TensorDescriptor(_Address(pointer, dtype), [rows, columns], [stride, 1], list(block), layout)


def descriptor(matrix: Tensor | None, block: tuple[int, int]) -> Any:
    """How TMA sees a matrix, or experts' matrices one below the other, cut into blocks. Cached by address:
    making one takes 35 us of host time.
    """
    if matrix is None:
        return None
    columns = matrix.shape[-1]
    rows = matrix.numel() // columns
    return _descriptor(matrix.data_ptr(), matrix.dtype, rows, columns, matrix.stride(-2), block)


def pingpong_memory(stages: int, slot_bytes: int, stage_bytes: int) -> tuple[int, int]:
    """(stages of operands, slots of the ring) that fit; stages are given up until there are two slots."""
    for count in range(stages, 1, -1):
        slots = (SHARED_BYTES - _OTHER_BYTES - count * stage_bytes) // slot_bytes
        if slots >= 2:
            return count, min(slots, _MOST_SLOTS)
    raise ValueError(f"{slot_bytes} bytes of states per slice leave no room for operands")


def cooperative_chunks(stages: int, stage_bytes: int) -> int:
    """Chunks of fp32 gradient [128, 64] that fit beside the operands, at most the four of a tile."""
    chunks = (SHARED_BYTES - _OTHER_BYTES - stages * stage_bytes) // _CHUNK_BYTES
    if chunks < 1:
        raise ValueError(f"{stages} stages of operands leave no room for the gradient")
    return min(chunks, 4)


def cooperative_rows(part_bytes: int, *, scaled_blocks: bool) -> int:
    """Rows that coop's updating warps take at a time: what their registers hold, three pieces in flight."""
    return 32 if part_bytes <= 6 and not scaled_blocks else 16


def launch(
    dy: Tensor,
    x: Tensor,
    target: Target,
    rule: Epilogue,
    hyper: Tensor,
    config: TileConfig,
    *,
    offsets: Tensor | None = None,
    rng: Tensor | None = None,
    norm: Tensor | None = None,
    nonfinite: Tensor | None = None,
) -> None:
    """Update the target by dyᵀ x in the form of `config`, for a launch that `refusal` has nothing against."""
    (tokens, n), k = dy.shape, x.shape[1]
    w, _, master, s0, s0_meta, s1, s1_meta = kernel_parts(target)
    names = target.codec_names
    rng = rng if target.stochastic else None  # another one of these would be another compilation
    constants = {
        "EPILOGUE": rule.jit, "SLOTS": len(rule.slots), "WEIGHT": w is not None, "MASTER": master is not None,
        "NORM": norm is not None, "COUNT": nonfinite is not None,
        **{key: CODECS[name].code for key, name in zip(("W_CODEC", "S0_CODEC", "S1_CODEC"), names)},
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "BLOCK_T": config.block_t,
        **LAUNCH_OPTIONS,
    }  # fmt: skip
    experts = 1 if offsets is None else offsets.shape[0] - 1
    tiles = experts * cdiv(n, config.block_n) * cdiv(k, config.block_k)
    grid = (min(processors(dy.device), tiles),)
    operands = (
        descriptor(dy, (config.block_t, config.block_n)),
        descriptor(x, (config.block_t, config.block_k)),
    )
    part_bytes = sum(part.element_size() for part in (w, master, s0, s1) if part is not None)
    stage_bytes = config.block_t * (config.block_n + config.block_k) * dy.element_size()
    if config.form == COOPERATIVE:
        blocks = any(part.codec.kind == "block" for part in target.parts)
        cooperative_kernel[grid](
            *operands, w, master, s0, s1, s0_meta, s1_meta, hyper, rng, target.tensor_id, norm, nonfinite,
            n, k, tokens, config.group, STAGES=config.stages,
            CHUNKS=cooperative_chunks(config.stages, stage_bytes),
            CHUNK_LAYOUT=shared_layout(config.block_n, config.block_k // 4, torch.float32),
            ROWS=cooperative_rows(part_bytes, scaled_blocks=blocks), num_warps=8, **COOPERATIVE_REGISTERS,
            **constants,
        )  # fmt: skip
        return
    slot_bytes = _SLICE * part_bytes
    stages, slots = pingpong_memory(config.stages, slot_bytes, stage_bytes)
    pingpong_kernel[grid](
        *operands, *(descriptor(part, (64, 64)) for part in (w, master, s0, s1)), s0_meta, s1_meta, hyper,
        rng, target.tensor_id, norm, nonfinite, offsets, experts, n, k, tokens, config.group,
        HYPERS=rule.hyper_length, GROUPED=offsets is not None, SLOT_BYTES=slot_bytes, STAGES=stages,
        RING=slots, BY_SLICE=config.overlap and slots >= 4, PAIRED=config.paired and slots % 2 == 0,
        num_warps=4, **PINGPONG_REGISTERS, **constants,
    )  # fmt: skip
