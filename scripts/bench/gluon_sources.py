"""Specialisations of the Gluon forms of the weight-gradient kernel, for `compile_kernels.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from triton.compiler import ASTSource

from titanforge.kernels.codecs import CODECS
from titanforge.kernels.config import _COOPERATIVE, _PINGPONG, TileConfig
from titanforge.kernels.epilogues import Epilogue
from titanforge.kernels.gluon._gluon import HAS_GLUON
from titanforge.kernels.gluon.cooperative import cooperative_kernel
from titanforge.kernels.gluon.launch import (
    COOPERATIVE_REGISTERS,
    PINGPONG_REGISTERS,
    cooperative_chunks,
    cooperative_rows,
    pingpong_memory,
    shared_layout,
)
from titanforge.kernels.gluon.pingpong import pingpong_kernel

Source = tuple[dict[str, Any], dict[str, Any], dict[str, int]]
_NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip


def source_class() -> Callable[..., ASTSource]:
    """What wraps a Gluon kernel for `triton.compile`."""
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _stored(codec: str) -> torch.dtype:
    dtype = CODECS[codec].dtype
    return torch.uint8 if dtype.itemsize == 1 and dtype.is_floating_point else dtype


def _descriptor(dtype: torch.dtype, rows: int, columns: int) -> str:
    return f"tensordesc<{_NAMES[dtype]}[{rows}, {columns}],{shared_layout(rows, columns, dtype)!r}>"


def gluon_source(
    epilogue: Epilogue,
    codecs: Sequence[str],
    config: TileConfig,
    *,
    master: bool,
    norm: bool = True,
    grouped: bool = False,
) -> Source:
    """(argument types, constants, launch options) of one specialisation, as `launch` would make it.

    codecs: of weight, first and second state.
    """
    slots, weight = len(epilogue.slots), epilogue.updates_weight
    present = (weight, master and weight, slots >= 1, slots >= 2)
    dtypes = (_stored(codecs[0]), torch.float32, _stored(codecs[1]), _stored(codecs[2]))
    part_bytes = sum(dtype.itemsize for dtype, there in zip(dtypes, present) if there)
    scaled = [CODECS[name].kind != "plain" and there for name, there in zip(codecs[1:], present[2:])]
    blocks = any(CODECS[name].kind == "block" for name, there in zip(codecs[1:], present[2:]) if there)
    random = any(CODECS[name].stochastic for name, there in zip(codecs, (weight, *present[2:])) if there)
    types: dict[str, Any] = {
        "dy_desc": _descriptor(torch.bfloat16, config.block_t, config.block_n),
        "x_desc": _descriptor(torch.bfloat16, config.block_t, config.block_k),
        "s0_meta_ptr": "*fp32" if scaled[0] else None, "s1_meta_ptr": "*fp32" if scaled[1] else None,
        "h_ptr": "*fp32", "rng_ptr": "*i64" if random else None, "tensor_id": "i32",
        "norm_ptr": "*fp32" if norm else None, "nonfinite_ptr": "*i32",
        "offsets_ptr": "*i32" if grouped else None, **dict.fromkeys(("E", "N", "K", "T", "group"), "i32"),
    }  # fmt: skip
    constants = {
        "EPILOGUE": epilogue.jit, "SLOTS": slots, "WEIGHT": weight, "MASTER": present[1],
        **{
            key: CODECS[name].code if there else 0
            for key, name, there in zip(("W_CODEC", "S0_CODEC", "S1_CODEC"), codecs, (weight, *present[2:]))
        },
        "NORM": norm, "COUNT": True, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "BLOCK_T": config.block_t,
    }  # fmt: skip
    stage_bytes = 2 * config.block_t * (config.block_n + config.block_k)
    names = ("w", "master", "s0", "s1")
    if config.form == _PINGPONG.form:
        types |= {
            f"{name}_desc": _descriptor(dtype, 64, 64) if there else None
            for name, dtype, there in zip(names, dtypes, present)
        }
        slot_bytes = 64 * 64 * part_bytes
        stages, ring = pingpong_memory(config.stages, slot_bytes, stage_bytes)
        constants |= {
            "HYPERS": epilogue.hyper_length, "GROUPED": grouped, "SLOT_BYTES": slot_bytes,
            "STAGES": stages, "RING": ring, "BY_SLICE": config.overlap and ring >= 4,
            "PAIRED": config.paired and ring % 2 == 0, **PINGPONG_REGISTERS,
        }  # fmt: skip
        return types, constants, {"num_warps": 4, "maxnreg": constants.pop("maxnreg")}
    types |= {
        f"{name}_ptr": f"*{_NAMES[dtype]}" if there else None
        for name, dtype, there in zip(names, dtypes, present)
    }
    constants |= {
        "STAGES": config.stages, "CHUNKS": cooperative_chunks(config.stages, stage_bytes),
        "CHUNK_LAYOUT": shared_layout(config.block_n, config.block_k // 4, torch.float32),
        "ROWS": cooperative_rows(part_bytes, scaled_blocks=blocks), **COOPERATIVE_REGISTERS,
    }  # fmt: skip
    return types, constants, {"num_warps": 8, "maxnreg": constants.pop("maxnreg")}


def gluon_jobs(
    rules: Sequence[Epilogue], recipes: dict[str, tuple[str, dict[str, str], bool]]
) -> list[tuple[str, Any, Source]]:
    """(name, kernel, specialisation) of all forms with all rules and recipes that they take."""
    if not HAS_GLUON:
        return []
    listed = []
    for recipe, (weight, by_kind, master) in recipes.items():
        for rule in rules:
            states = [by_kind[kind] for kind in rule.slot_kinds]
            codecs = [weight, *states, *["fp32"] * (2 - len(states))]
            if "fp8" in weight:
                continue
            for kernel, config in ((pingpong_kernel, _PINGPONG), (cooperative_kernel, _COOPERATIVE)):
                source = gluon_source(rule, codecs, config, master=master)
                listed.append((f"{config.form}/{rule.name}/{recipe}", kernel, source))
    adamw = next(rule for rule in rules if rule.name == "adamw")
    for recipe in ("bf16", "int8_sr"):
        weight, by_kind, master = recipes[recipe]
        codecs = [weight, *(by_kind[kind] for kind in adamw.slot_kinds)]
        source = gluon_source(adamw, codecs, _PINGPONG, master=master, grouped=True)
        listed.append((f"pp2/adamw/{recipe}/experts", pingpong_kernel, source))
    return listed
