"""Compile every epilogue with every storage form for Hopper (sm_90), on a machine without a GPU.

Reports registers, spills and shared memory of each kernel as ptxas states them, and exits 1 if one does not
compile, or hands shared memory over before all warps are done with it (`hand_overs.py`). Of all jobs,
chosen or not, it checks first that they name each argument of their kernel: one that is missing is a failure.

    python scripts/bench/compile_kernels.py [--quick] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
from gluon_sources import gluon_jobs, source_class
from hand_overs import early_arrivals
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from titanforge.kernels._triton import LAUNCH_OPTIONS
from titanforge.kernels.apply_update import apply_update_kernel
from titanforge.kernels.block_basis import SignConfig, rebuild_update_kernel, sign_coefficients_kernel
from titanforge.kernels.block_basis_kernel import narrow_step_kernel, wide_step_kernel
from titanforge.kernels.cholesky_factor_kernel import advance_kernel, invert_kernel, scale_kernel
from titanforge.kernels.cholesky_qr import PRECISION, CholeskyConfig
from titanforge.kernels.cholesky_qr_kernel import (
    correct_kernel,
    gram_kernel,
    orthonormal_kernel,
    product_kernel,
    restore_kernel,
    split_kernel,
)
from titanforge.kernels.codecs import CODECS
from titanforge.kernels.config import _FEW_TOKENS, _FP32, _MANY_TOKENS, _MANY_TOKENS_HEAVY, _SMALL, TileConfig
from titanforge.kernels.embedding import embedding_kernel
from titanforge.kernels.epilogues import EPILOGUES, Epilogue
from titanforge.kernels.exchange_codes import EXCHANGE_CODES, kernel_constants
from titanforge.kernels.exchange_codes_kernel import decode_kernel, encode_kernel, sum_kernel
from titanforge.kernels.flat import BLOCKS, flat_kernel
from titanforge.kernels.inverse_factor import factor_warps, inverse_factor_kernel
from titanforge.kernels.outer_products import add_parts_kernel, outer_products_kernel
from titanforge.kernels.row_norm_update import row_norm_update_kernel
from titanforge.kernels.second_moments import take_sums_kernel
from titanforge.kernels.squares import sum_squares_kernel
from titanforge.kernels.symmetric_config import candidates
from titanforge.kernels.symmetric_kernel import symmetric_product_kernel
from titanforge.kernels.vector import vector_kernel
from titanforge.kernels.wgrad_kernel import wgrad_kernel

POINTER = {
    "fp32": "*fp32",
    "bf16": "*bf16",
    "bf16_sr": "*bf16",
    "fp16": "*fp16",
    "int8": "*i8",
    "int8_sr": "*i8",
}
RECIPES: dict[str, tuple[str, dict[str, str], bool]] = {
    # name: weight codec, state codec by slot kind, fp32 master
    "fp32": ("fp32", dict.fromkeys(("signed", "square", "magnitude"), "fp32"), False),
    "bf16": ("bf16", dict.fromkeys(("signed", "square", "magnitude"), "bf16"), False),
    "bf16_master": ("bf16", dict.fromkeys(("signed", "square", "magnitude"), "fp32"), True),
    "bf16_sr": ("bf16_sr", dict.fromkeys(("signed", "square", "magnitude"), "bf16_sr"), False),
    "int8": ("bf16", {"signed": "int8", "square": "uint8_root", "magnitude": "uint8"}, False),
    "int8_sr": ("bf16_sr", {"signed": "int8_sr", "square": "uint8_root_sr", "magnitude": "uint8_sr"}, False),
    "fp8": ("fp8_e4m3", {"signed": "fp8_e5m2", "square": "fp8_root", "magnitude": "fp8_magnitude"}, False),
}

GLUON_RECIPES = RECIPES | {
    "fp32_states": ("bf16", dict.fromkeys(("signed", "square", "magnitude"), "fp32"), False),
    "fp8_states": ("bf16", {"signed": "fp8_e4m3", "square": "fp8_root", "magnitude": "fp8_magnitude"}, False),
    "fp8_states_sr": (
        "bf16_sr",
        {"signed": "fp8_e4m3", "square": "fp8_root", "magnitude": "fp8_magnitude"},
        False,
    ),
}


def _codecs(recipe: str, epilogue: Epilogue) -> tuple[list[str], bool]:
    weight, by_kind, master = RECIPES[recipe]
    states = [by_kind[kind] for kind in epilogue.slot_kinds]
    return [weight if epilogue.updates_weight else "fp32", *states, *["fp32"] * (2 - len(states))], master


def _epilogue_constants(epilogue: Epilogue, recipe: str) -> dict[str, Any]:
    names, master = _codecs(recipe, epilogue)
    return {
        "EPILOGUE": epilogue.jit, "SLOTS": len(epilogue.slots), "WEIGHT": epilogue.updates_weight,
        "MASTER": master and epilogue.updates_weight,
        **{key: CODECS[name].code for key, name in zip(("W_CODEC", "S0_CODEC", "S1_CODEC"), names)},
        "STOCHASTIC": any(CODECS[name].stochastic for name in names), "OBSERVE": False,
    }  # fmt: skip


def _pointer(name: str) -> str:
    return POINTER.get(name, "*u8")


def _part_pointers(epilogue: Epilogue, recipe: str) -> dict[str, str | None]:
    names, master = _codecs(recipe, epilogue)
    has = (epilogue.updates_weight, len(epilogue.slots) >= 1, len(epilogue.slots) >= 2)
    return {
        **{f"{key}_ptr": _pointer(name) if there else None for key, name, there in zip(("w", "s0", "s1"),
        names, has)},
        **{f"{key}_meta_ptr": "*fp32" if there else None for key, there in zip(("w", "s0", "s1"), has)},
        "master_ptr": "*fp32" if master and epilogue.updates_weight else None,
        "h_ptr": "*fp32", "rng_ptr": "*i64",
    }  # fmt: skip


def wgrad_source(
    epilogue: Epilogue, recipe: str, config: TileConfig, *, masked: bool, grouped: bool, operand: str =
    "*bf16",
    store: bool = False,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:  # fmt: skip
    """(argument types, constants, launch options) of one specialisation of the weight-gradient kernel."""
    types: dict[str, Any] = {
        "dy_ptr": operand, "x_ptr": operand, "offsets_ptr": "*i32" if grouped else None,
        "gradient_ptr": "*fp32" if store else None, "bias_gradient_ptr": None, "norm_ptr": "*fp32",
        "nonfinite_ptr": "*i32", **_part_pointers(epilogue, recipe), "tensor_id": "i32",
        **dict.fromkeys(("N", "K", "T", "dy_stride_t", "x_stride_t"), "i32"),
        "dy_stride_n": None, "x_stride_k": None,
    }  # fmt: skip
    constants = {
        **_epilogue_constants(epilogue, recipe), "STORE_GRADIENT": store, "GROUPED": grouped, "BIAS": False,
        "NORM": True, "COUNT": True, "TO_FP32": False, "PRECISION": "ieee", "MASK_T": masked or grouped,
        "MASK_N": masked, "MASK_K": masked, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "BLOCK_T": config.block_t, "GROUP": config.group, "SPLIT": config.split,
        "PREFETCH": config.prefetch and not masked, "dy_stride_n": 1, "x_stride_k": 1,
    }  # fmt: skip
    return types, constants, {"num_warps": config.warps, "num_stages": config.stages}


def flat_source(
    epilogue: Epilogue, recipe: str, *, aligned: bool, squares: bool = False
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """The same of the flat kernel."""
    import triton.language as tl

    names, _ = _codecs(recipe, epilogue)
    element = {
        "*fp32": tl.float32,
        "*bf16": tl.bfloat16,
        "*fp16": tl.float16,
        "*i8": tl.int8,
        "*u8": tl.uint8,
    }
    types = {
        "table_ptr": "*i64", "chunk_ptr": "*i32", "h_ptr": "*fp32", "rng_ptr": "*i64",
        "nonfinite_ptr": "*i32", "squares_ptr": "*fp32" if squares else None, "hyper_length": "i32",
    }  # fmt: skip
    constants = {
        **_epilogue_constants(epilogue, recipe), "G_TYPE": tl.float32, "COUNT": True,
        "SQUARES": squares,
        **{f"{key}_TYPE": element[_pointer(name)] for key, name in zip(("W", "S0", "S1"), names)},
        "BLOCKS": BLOCKS, "ALIGNED": aligned, "MASKED": not aligned,
    }  # fmt: skip
    return types, constants, {"num_warps": 4, "num_stages": 1}


def embedding_source(
    epilogue: Epilogue, recipe: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """The same of the embedding kernel."""
    types = {
        "dy_ptr": "*bf16", "order_ptr": "*i64", "bounds_ptr": "*i64", "gradient_ptr": None, "norm_ptr": None,
        "nonfinite_ptr": "*i32", **_part_pointers(epilogue, recipe), "tensor_id": "i32", "D": "i32",
        "dy_stride_t": "i32",
    }  # fmt: skip
    constants = {
        **_epilogue_constants(epilogue, recipe), "STORE_GRADIENT": False, "NORM": False, "COUNT": True,
        "MASKED": False,
        "BLOCK_D": 1024, "BLOCK_T": 4,
    }  # fmt: skip
    return types, constants, {"num_warps": 2, "num_stages": 1}


def vector_source(epilogue: Epilogue, recipe: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """The same of the kernel of vectors."""
    types = {
        "gradient_ptr": "*bf16", "norm_ptr": "*fp32", "nonfinite_ptr": "*i32",
        **_part_pointers(epilogue, recipe), "tensor_id": "i32", "D": "i32",
    }  # fmt: skip
    constants = {
        **_epilogue_constants(epilogue, recipe), "NORM": True, "COUNT": True, "MASKED": False,
        "BLOCK_D": 1024,
    }  # fmt: skip
    return types, constants, {"num_warps": 4, "num_stages": 1}


Specialisation = tuple[dict[str, Any], dict[str, Any], dict[str, int]]


def outer_product_jobs() -> list[tuple[str, Any, Specialisation]]:
    """The kernels of Dobb's capture: blocks of one tile in several parts, and of several tiles in one."""
    types = {
        "x_ptr": "*bf16", "out_ptr": "*fp32", "count_ptr": "*fp32",
        **dict.fromkeys(("rows", "stride", "span"), "i32"),
    }  # fmt: skip
    shared = {"TILE": 128, "BLOCK_T": 64, "MASK_W": True, "TO_FP32": False}
    narrow = (types, {**shared, "w": 100, "TILES": 1, "SPLIT": True}, {"num_warps": 4, "num_stages": 3})
    wide = (types, {**shared, "w": 400, "TILES": 4, "SPLIT": False}, {"num_warps": 8, "num_stages": 3})
    adding = {"parts_ptr": "*fp32", "total_ptr": "*fp32", "count_ptr": "*fp32"}
    adding |= dict.fromkeys(("rows", "elements", "parts"), "i32")
    return [
        ("outer_products/narrow", outer_products_kernel, narrow),
        ("outer_products/wide", outer_products_kernel, wide),
        ("outer_products/add", add_parts_kernel, (adding, {"BLOCK": 1024}, {"num_warps": 4})),
    ]


def matrix_jobs() -> list[tuple[str, Any, Specialisation]]:
    """The kernels of the matrix rules: Cholesky QR, symmetric products, updates of many weights."""
    tiles = CholeskyConfig()
    pointers = {
        "c_ptr": "*fp32", "u_ptr": "*bf16", "largest_ptr": "*fp32", "q_ptr": "*bf16", "gram_ptr": "*fp32",
        "l_ptr": "*bf16", "d_ptr": "*bf16", "failed_ptr": "*i32", "out_ptr": "*bf16",
    }  # fmt: skip
    pointers |= dict.fromkeys(("a_ptr", "x_ptr", "old_ptr"), "*bf16")
    numbers = dict.fromkeys(("plane", "d_low", "P", "panel", "panels", "numel", "filled"), "i32")
    constants = {
        "TILE": tiles.tile, "BLOCK_K": tiles.block_k, "TO_FP32": False, "PRECISION": PRECISION,
        "LAST": True, "INVERT": True, "ROWS": 16, "WIDTH": tiles.tile, "BLOCK": 4096,
    }  # fmt: skip
    # Of a wide block; of a narrow one, whose C is split where it is read, and of fp32 bases.
    wide = {"w": 768, "MASKED": False, "C_PLANES": True, "U_SPLIT": False, "SPLIT": True, "NEAR": False,
            "EDGE": tiles.tile}  # fmt: skip
    ragged = {**wide, "w": 400, "MASKED": True, "EDGE": tiles.edge(400)}
    narrow = {**wide, "w": 100, "MASKED": True, "C_PLANES": False, "INVERT": False}
    near = {**wide, "SPLIT": False, "NEAR": True}
    exact = {**narrow, "U_SPLIT": True, "NEAR": True, "LAST": False}
    forms = {
        split_kernel: (wide, narrow), product_kernel: (wide, narrow, exact, ragged),
        gram_kernel: (wide, near, exact, ragged, {**ragged, "SPLIT": False, "NEAR": True}),
        advance_kernel: (wide, narrow), scale_kernel: (wide,), invert_kernel: (wide,),
        orthonormal_kernel: (near, wide, {**ragged, "SPLIT": False}),
        correct_kernel: (near, narrow, exact, {**ragged, "SPLIT": False}), restore_kernel: (wide,),
    }  # fmt: skip
    warps = {advance_kernel: tiles.factor_warps, scale_kernel: tiles.factor_warps, invert_kernel: 2}

    def types_of(kernel: Any, chosen: dict[str, Any]) -> dict[str, str]:
        own = {"c_ptr": "*bf16"} if chosen["C_PLANES"] and kernel is product_kernel else {}
        if kernel is gram_kernel and not chosen["NEAR"]:
            own = {"out_ptr": "*fp32"}
        u = {"u_ptr": "*fp32"} if chosen["U_SPLIT"] else {}
        return {**pointers, **numbers, "omega": "fp32", **own, **u}

    listed: list[tuple[str, Any, Specialisation]] = [
        (f"cholesky_qr/{kernel.fn.__name__}/{number}", kernel, (types_of(kernel, chosen),
        {**constants, **chosen}, {"num_warps": warps.get(kernel, tiles.warps), "num_stages": tiles.stages}))
        for kernel, several in forms.items()
        for number, chosen in enumerate(several)
    ]  # fmt: skip
    for config in candidates():
        types = {
            **dict.fromkeys(("x_ptr", "add_ptr", "out_ptr"), "*bf16"), "order_ptr": "*i32", "m": "i32",
            "k": "i32", **dict.fromkeys(("alpha", "beta", "diagonal"), "fp32"),
        }  # fmt: skip
        for tall in (False, True):
            own = {"TALL": tall, "ADD": not tall, "MASK_M": True, "MASK_K": False, "BLOCK": config.block,
                   "BLOCK_K": config.block_k, "TO_FP32": False}  # fmt: skip
            name = f"symmetric/{'tall' if tall else 'wide'}/{config.block}x{config.block_k}"
            stages = {"num_warps": config.warps, "num_stages": config.stages}
            listed.append((f"{name}/w{config.warps}s{config.stages}", symmetric_product_kernel, (types, own,
            stages)))  # fmt: skip
    import triton.language as tl

    types = {"table_ptr": "*i64", "update_ptr": "*bf16", "h_ptr": "*fp32", "scale": "fp32", "numel": "i32"}
    own = {"W_TYPE": tl.float32, "COPY_TYPE": tl.bfloat16, "COPY": True, "ALIGNED": True, "CHUNK": 4096}
    applied = {**own, "RATE": 1, "DECAY": True}
    listed.append(("apply_update/bf16_master", apply_update_kernel, (types, applied, {"num_warps": 8})))
    types |= {"sign_ptr": "*bf16", "n": "i32", "m": "i32"}
    rows = {**own, "M_TYPE": tl.bfloat16, "CHUNK": 2048}
    listed.append(("row_norm_update/bf16_master", row_norm_update_kernel, (types, rows, {"num_warps": 4})))
    own |= {"ROWS": 128, "COLUMNS": 128, "BLOCK_K": 64, "TO_FP32": False, "w": 400, "WIDTH": 128}
    for name, split in (("bf16", False), ("fp32", True)):
        own |= {"M_TYPE": tl.float32 if split else tl.bfloat16, "M_SPLIT": split}
        source = (types, dict(own), {"num_warps": 8, "num_stages": 3})
        listed.append((f"block_basis/sign/{name}", sign_coefficients_kernel, source))
    listed += _block_steps(types, own)
    listed.append(("block_basis/rebuild", rebuild_update_kernel, (types, own, {"num_warps": 8, "num_stages":
    3})))  # fmt: skip
    types = {**dict.fromkeys(("sums_ptr", "count_ptr", "factor_ptr", "old_ptr"), "*fp32"), "decay": "fp32",
             "largest_ptr": "*i32"}  # fmt: skip
    for w, width in ((100, 128), (400, 512)):
        constants = {"w": w, "FACTOR": False, "ROWS": 16, "WIDTH": width}
        listed.append((f"take_sums/{w}", take_sums_kernel, (types, constants, {"num_warps": 4})))
    types = {**dict.fromkeys(("gram_ptr", "out_ptr"), "*fp64"), "failed_ptr": "*i32"}
    types |= dict.fromkeys(("gram_stride", "gram_row"), "i32")
    for r, size in ((100, 128), (50, 64), (8, 16)):
        source = (types, {"SIZE": size, "R": r}, {"num_warps": factor_warps(size)})
        listed.append((f"inverse_factor/{r}", inverse_factor_kernel, source))
    return listed


def _block_steps(types: dict[str, str], constants: dict[str, Any]) -> list[tuple[str, Any, Specialisation]]:
    """Dobb's steps, with a gradient and without, of bf16 and fp32 states, as `SignUpdates` launches them."""
    import triton.language as tl

    types = {**types, "nonfinite_ptr": "*i32", "weights": "i32"}
    config, listed = SignConfig(), []
    for name, gradient, element, copy in (
        ("bf16", True, tl.bfloat16, False), ("bf16_alone", False, tl.bfloat16, False),
        ("fp32_master", True, tl.float32, True),
    ):  # fmt: skip
        own = {
            **constants, "GRADIENT": gradient, "G_TYPE": element, "M_TYPE": element, "W_TYPE": element,
            "M_SPLIT": element == tl.float32, "COPY": copy,
        }  # fmt: skip
        split = element == tl.float32
        narrow = {**own, "w": 100, "MASK_ROWS": False, "ROWS": config.rows, "TILES": config.tiles,
                  "WIDTH": 128, "KEPT": 8 if split else 4}  # fmt: skip
        wide = {**own, "w": 400, "MASK_ROWS": True, "ROWS": config.wide_rows,
                "COLUMNS": 128 if split else config.wide_columns, "CHUNK": 32 if split else 64,
                "KEPT": 64 if split else 32}  # fmt: skip
        for form, kernel, chosen, warps, stages in (
            ("narrow", narrow_step_kernel, narrow, 8 if split else config.warps, config.stages),
            ("wide", wide_step_kernel, wide, config.wide_warps, config.wide_stages),
        ):
            source = (types, chosen, {"num_warps": warps, "num_stages": stages})
            listed.append((f"block_basis/{form}_step/{name}", kernel, source))
    return listed


def exchange_jobs() -> list[tuple[str, Any, Specialisation]]:
    """What replicas send in few bits: every code, in and out, and differences from what was sent."""
    types = {
        **dict.fromkeys(("x_ptr", "out_ptr"), "*fp32"), **dict.fromkeys(("byte_ptr", "out_byte_ptr"), "*u8"),
        **dict.fromkeys(("short_ptr", "out_short_ptr"), "*i16"), "factor": "fp32",
        **dict.fromkeys(("blocks", "piece_bytes", "ranks"), "i32"),
    }  # fmt: skip
    none: dict[str, Any] = dict.fromkeys(("own_ptr", "sum_ptr", "told_ptr"))
    sent = dict.fromkeys(none, "*fp32")
    return [
        (f"exchange_codes/{kernel.fn.__name__}/{code.name}{name}", kernel,
        ({**types, **more}, kernel_constants(code), {}))
        for kernel in (encode_kernel, decode_kernel, sum_kernel)
        for code in EXCHANGE_CODES.values()
        for name, more in (("", none), ("/differences", sent))
    ]  # fmt: skip


def compile_one(
    function: Any, types: dict[str, Any], constants: dict[str, Any], options: dict[str, int]
) -> dict[str, Any]:
    """Compile one specialisation and return what ptxas says of it."""
    names = function.arg_names
    signature = {name: types.get(name) or "constexpr" for name in names}
    values = {(names.index(name),): constants.get(name) for name in names if signature[name] == "constexpr"}
    undivided = (
        "tensor_id", "E", "T", "group", "hyper_length", "panel", "panels", "alpha", "beta", "diagonal",
        "omega", "scale", "decay", "factor", "blocks", "piece_bytes", "ranks", "gram_stride", "gram_row",
    )  # fmt: skip
    divisible = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in names
        if not signature[name].startswith(("constexpr", "tensordesc")) and name not in undivided
    }
    make = source_class() if function.is_gluon() else ASTSource
    source = make(function, signature, values, divisible)
    started = time.perf_counter()
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**options, **LAUNCH_OPTIONS})
    report = {"seconds": round(time.perf_counter() - started, 2), "shared_bytes": kernel.metadata.shared}
    return {**report, **_ptxas_report(kernel.asm["ptx"]), "ptx": kernel.asm["ptx"]}


def _ptxas_report(ptx: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        arch = "sm_90a" if "sm_90a" in ptx else "sm_90"
        done = subprocess.run(
            [get_ptxas(90).path, "-v", f"-arch={arch}", "--fmad=false", str(path), "-o",
            str(path.with_suffix(".cubin"))],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"ptxas: {done.stderr}")

    def number(pattern: str) -> int:
        return int(m.group(1)) if (m := re.search(pattern, done.stderr)) else 0

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_store_bytes": number(r"(\d+) bytes spill stores"),
        "spill_load_bytes": number(r"(\d+) bytes spill loads"),
    }


def jobs(quick: bool) -> list[tuple[str, Any, tuple[dict[str, Any], dict[str, Any], dict[str, int]]]]:
    """(name, kernel, specialisation) of everything to compile."""
    adamw = EPILOGUES["adamw"]
    listed: list[tuple[str, Any, Any]] = []
    for recipe in RECIPES:
        for epilogue in [adamw] if quick else EPILOGUES.values():
            source = wgrad_source(epilogue, recipe, _FEW_TOKENS, masked=False, grouped=False)
            listed.append((f"wgrad/few_tokens/{epilogue.name}/{recipe}", wgrad_kernel, source))
            listed.append(
                (f"flat/{epilogue.name}/{recipe}", flat_kernel, flat_source(epilogue, recipe, aligned=True))
            )
        heavy = recipe not in ("bf16", "int8")
        config = _MANY_TOKENS_HEAVY if heavy else _MANY_TOKENS
        wide = wgrad_source(adamw, recipe, config, masked=False, grouped=False)
        listed.append((f"wgrad/many_tokens/adamw/{recipe}", wgrad_kernel, wide))
        grouped = wgrad_source(adamw, recipe, _SMALL, masked=True, grouped=True)
        listed.append((f"wgrad/grouped_ragged/adamw/{recipe}", wgrad_kernel, grouped))
        listed.append((f"embedding/adamw/{recipe}", embedding_kernel, embedding_source(adamw, recipe)))
        if not quick:
            ragged = flat_source(adamw, recipe, aligned=False)
            listed.append((f"flat_ragged/adamw/{recipe}", flat_kernel, ragged))
    for recipe in ("fp32", "bf16"):
        listed.append((f"vector/adamw/{recipe}", vector_kernel, vector_source(adamw, recipe)))
        for aligned in (True, False):
            source = flat_source(EPILOGUES["momentum_state"], recipe, aligned=aligned, squares=True)
            listed.append((f"flat_squares{'' if aligned else '_ragged'}/{recipe}", flat_kernel, source))
    listed += outer_product_jobs()
    types = {"span_ptr": "*i64", "partial_ptr": "*fp32"}
    listed.append(("sum_squares", sum_squares_kernel, (types, {"CHUNK": 1024}, {"num_warps": 4})))
    listed += matrix_jobs()
    listed += exchange_jobs()
    listed += gluon_jobs([adamw] if quick else list(EPILOGUES.values()), GLUON_RECIPES)
    stored = wgrad_source(adamw, "bf16", _FEW_TOKENS, masked=False, grouped=False, store=True)
    listed.append(("wgrad/store_gradient", wgrad_kernel, stored))
    full = wgrad_source(adamw, "fp32", _FP32, masked=False, grouped=False, operand="*fp32")
    listed.append(("wgrad/fp32_operands/adamw/fp32", wgrad_kernel, full))
    return listed


def not_named(function: Any, types: dict[str, Any], constants: dict[str, Any]) -> list[str]:
    """Arguments of a kernel that a job gives neither a type (None: absent) nor, of constants, a value."""
    return [
        parameter.name
        for parameter in function.params
        if parameter.name not in (constants if parameter.is_constexpr else {**types, **constants})
    ]


def main() -> int:
    """Compile, print one line each, write compile.json."""
    parser = argparse.ArgumentParser(description="Compile every kernel for Hopper.")
    parser.add_argument("--quick", action="store_true", help="AdamW only")
    parser.add_argument("--out", type=Path, help="folder for compile.json")
    parser.add_argument("--only", default="", help="regular expression that names to compile must match")
    arguments = parser.parse_args()
    reports, failures = [], 0
    for name, function, (types, constants, _) in jobs(quick=False):
        if missing := not_named(function, types, constants):
            failures += 1
            print(f"{name:48s} HAS NO {', '.join(missing)}", flush=True)
    for name, function, source in jobs(arguments.quick):
        if not re.search(arguments.only, name):
            continue
        try:
            report = compile_one(function, *source)
        except Exception as error:
            failures += 1
            print(f"{name:48s} FAILED {type(error).__name__}: {str(error)[-400:]}", flush=True)
            continue
        ptx = report.pop("ptx")
        if early := early_arrivals(ptx):
            failures += 1
            print(f"{name:48s} HANDS OVER EARLY {'; '.join(early)}", flush=True)
        wgmma = len(re.findall("wgmma.mma_async", ptx))
        reports.append({"kernel": name, **report, "wgmma": wgmma})
        print(
            f"{name:48s} registers {report['registers']:4d}  spills {report['spill_store_bytes']:5d} B  "
            f"shared {report['shared_bytes']:6d} B  wgmma {wgmma}  {report['seconds']:.1f} s",
            flush=True,
        )
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        configs = {
            "few_tokens": asdict(_FEW_TOKENS),
            "many_tokens": asdict(_MANY_TOKENS),
            "small": asdict(_SMALL),
        }
        result = {"triton": triton.__version__, "configs": configs, "failures": failures, "kernels": reports}
        (arguments.out / "compile.json").write_text(json.dumps(result, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
