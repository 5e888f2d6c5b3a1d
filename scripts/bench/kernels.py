"""Measure the fused update kernels on a GPU: right, then fast, beside the standard path in the same run.

For every cell (shape, tokens, storage recipe, rule): error of weight and states against fp64; gate T0 (fused
equals store-G and flat pass, bit for bit); median time over CUDA-graph replays on rotating buffers; its ratio
to the floor max(bytes / 4.25 TB/s, FLOPs / 730 TF/s) and to cuBLAS G + torch fused AdamW. Writes kernels.json
(also the form and tile that each cell chose, versions, the card's clocks), kernels.md and kernels.png.

    python scripts/bench/kernels.py --out FOLDER [--set default|quick|full|random] [--budget SECONDS]
    python scripts/bench/kernels.py --out FOLDER --tune Llama-8B [--recipes bf16 int8_sr] [--tokens 512 4096]
    python scripts/bench/kernels.py --out FOLDER --forms portable pp2 coop [--budget SECONDS] [--processes N]
        [--set default|random|experts|bytes]

The second finds the fastest form and tile for a model's launches of AdamW and notes them for training to read
(`kernels/config.py`), before the cells of `--set`. The third compares the forms of the kernel
(`kernel_forms.py`), each in processes of its own, and writes kernel_forms.json, .md and .png. The set
`random` is of stochastic rounding, `experts` of Qwen3-30B-A3B's, `bytes` of int8 states in every geometry and
order of tiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from kernel_cells import (
    ATTENTION,
    BANDWIDTH,
    FLOPS,
    GATE_UP,
    LAYER,
    LAYERS,
    MERGED,
    RECIPES,
    Cell,
    Operands,
    Set,
    buffer_count,
    codec_names,
    floor_ms,
    hyper_vector,
    prepare,
    rms_error,
    time_standard,
    torch_adamw,
    tuned_shapes,
)
from kernels_report import markdown, plot, totals

from scripts.bench.harness import machine_facts
from titanforge.kernels.autotune import autotune
from titanforge.kernels.codecs import decode
from titanforge.kernels.config import TileConfig
from titanforge.kernels.embedding import embedding_update
from titanforge.kernels.epilogues import EPILOGUES, get_epilogue
from titanforge.kernels.flat import flat_update
from titanforge.kernels.forms import FORMS
from titanforge.kernels.step import make_target
from titanforge.kernels.timing import replay_time
from titanforge.kernels.wgrad import config_for, fused_wgrad_update, wgrad


def cells(name: str) -> list[Cell]:
    """The cells of a set, the most wanted first: a run out of time leaves the last ones out."""
    shapes = [shape for shape, _ in LAYER]
    if name == "quick":
        return [Cell("adamw", recipe, ATTENTION, 512) for recipe in ("bf16", "int8")]
    if name == "random":
        return [Cell("adamw", recipe, shape, 512) for recipe in ("int8_sr", "bf16_sr") for shape in shapes]
    listed = [Cell("adamw", "bf16", shape, tokens) for tokens in (512, 4096, 2048) for shape in shapes]
    listed += [Cell("adamw", "int8", shape, 512) for shape in shapes]
    listed += [Cell("momentum_state", "bf16", GATE_UP, tokens) for tokens in (512, 4096)]
    others = [recipe for recipe in RECIPES if recipe not in ("bf16", "int8")]
    listed += [Cell("adamw", recipe, GATE_UP, 512) for recipe in others]
    listed += [Cell("adamw", recipe, GATE_UP, 4096) for recipe in ("int8", *others)]
    listed += [
        Cell(rule, "bf16", ATTENTION, 512) for rule in EPILOGUES if rule not in ("adamw", "momentum_state")
    ]
    if name == "full":
        listed += [
            Cell("adamw", recipe, shape, t) for recipe in others for shape in shapes for t in (512, 4096)
        ]
        listed += [Cell("adamw", "bf16", shape, 8192) for shape in shapes]
        listed += [Cell(rule, recipe, ATTENTION, 512) for rule in EPILOGUES for recipe in RECIPES]
    return list(dict.fromkeys(listed))


def check(cell: Cell, operands: Operands, device: torch.device, config: TileConfig) -> dict[str, Any]:
    """Error against fp64 after one step, the same of the standard path, and gate T0."""
    rule, hyper = get_epilogue(cell.rule), hyper_vector(get_epilogue(cell.rule), device)
    rng = torch.tensor([1, 2], device=device)
    start = prepare(cell, device, 0)
    old = [decode(part).double() for part in start.parts()]
    weight = start.master.double() if start.master is not None else old[0]
    exact_gradient = operands.exact_gradient()
    before = [weight, *old[1 if rule.updates_weight else 0 :]]
    exact = rule.reference(exact_gradient, *before, hyper.double())
    kept = exact if rule.updates_weight else exact[1:]

    fused, unfused = start.clone(), start.clone()
    fused_wgrad_update(
        operands.dy, operands.x, fused.weight, fused.states, rule, hyper, master=fused.master, rng=rng,
        tensor_id=3,
        config=config,
    )  # fmt: skip
    gradient = wgrad(operands.dy, operands.x, config=config)
    flat_update(
        rule, [unfused.weight] if unfused.weight is not None else None, [gradient], [unfused.states], hyper,
        masters=[unfused.master], rng=rng, tensor_ids=[3],
    )  # fmt: skip
    different = [int((a != b).sum()) for a, b in zip(fused.tensors(), unfused.tensors())]
    result: dict[str, Any] = {
        "gradient_error": rms_error(gradient, exact_gradient),
        "errors": [rms_error(decode(part), value) for part, value in zip(fused.parts(), kept)],
        "t0": not any(different),
        "t0_bytes_different": different,
    }
    rounded = torch.mm(operands.dy.t(), operands.x).double()
    standard = rule.reference(rounded, *before, hyper.double())
    standard = standard if rule.updates_weight else standard[1:]
    result["standard_errors"] = [
        rms_error(value.to(torch.bfloat16), wanted) for value, wanted in zip(standard, kept)
    ]
    return result


def time_fused(cell: Cell, operands: Operands, device: torch.device, config: TileConfig) -> float:
    """Milliseconds of the fused kernel."""
    rule, hyper = get_epilogue(cell.rule), hyper_vector(get_epilogue(cell.rule), device)
    rng = torch.tensor([1, 2], device=device)

    def call(target: Set) -> None:
        fused_wgrad_update(
            operands.dy, operands.x, target.weight, target.states, rule, hyper, master=target.master, rng=rng,
            config=config,
        )  # fmt: skip

    sets = [prepare(cell, device, seed) for seed in range(buffer_count(cell))]
    return replay_time([lambda target=target: call(target) for target in sets])


def time_flat(device: torch.device) -> dict[str, Any]:
    """One Llama-8B layer's seven weights in one flat launch (bf16 gradients), beside torch's fused AdamW."""
    shapes = [shape for shape, count in LAYER for _ in range(count)]
    rule, hyper = get_epilogue("adamw"), hyper_vector(get_epilogue("adamw"), device)
    sets = [prepare(Cell("adamw", "bf16", shape, 0), device, i) for i, shape in enumerate(shapes)]
    grads = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    weights = [part.weight.values for part in sets if part.weight is not None]
    states = [[state.values for state in part.states] for part in sets]
    steps = [torch.tensor(5.0, device=device) for _ in shapes]

    def standard() -> None:
        torch_adamw(weights, grads, [s[0] for s in states], [s[1] for s in states], steps)

    ours = replay_time([lambda: flat_update(rule, weights, grads, states, hyper)])
    count = sum(weight.numel() for weight in weights)
    return {"ms": ours, "standard_ms": replay_time([standard]), "floor_ms": 14 * count / BANDWIDTH * 1e3}


def time_embedding(device: torch.device) -> dict[str, Any]:
    """Llama-8B's embedding, 512 tokens, every row stepped."""
    rows, columns, tokens = 128256, 4096, 512
    rule, hyper = get_epilogue("adamw"), hyper_vector(get_epilogue("adamw"), device)
    target = prepare(Cell("adamw", "bf16", (rows, columns), tokens), device, 0)
    ids = torch.randint(0, 2000, (tokens,), device=device)
    dy = torch.randn(tokens, columns, device=device).bfloat16()
    ms = replay_time([lambda: embedding_update(dy, ids, target.weight, target.states, rule, hyper)])
    return {"ms": ms, "floor_ms": 12 * rows * columns / BANDWIDTH * 1e3}


def time_grouped(device: torch.device) -> dict[str, Any]:
    """64 experts of 1408 x 2048, 4096 tokens of uneven shares, one expert without any."""
    experts, n, k, tokens = 64, 1408, 2048, 4096
    rule, hyper = get_epilogue("adamw"), hyper_vector(get_epilogue("adamw"), device)
    shares = torch.rand(experts)
    shares[5] = 0
    bounds = torch.cat((torch.zeros(1), (shares / shares.sum()).cumsum(0))).mul(tokens).round()
    offsets = bounds.to(torch.int32).to(device)
    dy = torch.randn(tokens, n, device=device).mul_(0.01).bfloat16()
    x = torch.randn(tokens, k, device=device).bfloat16()
    weight = torch.randn(experts, n, k, device=device).mul_(0.02).bfloat16()
    states = [torch.rand_like(weight), torch.rand_like(weight)]
    ms = replay_time([lambda: fused_wgrad_update(dy, x, weight, states, rule, hyper, offsets=offsets)])
    floor = max(12 * weight.numel() / BANDWIDTH, 2 * tokens * n * k / FLOPS) * 1e3
    return {"ms": ms, "floor_ms": floor}


def tune(
    model: str, recipes: Sequence[str], tokens: Sequence[int], device: torch.device
) -> list[dict[str, Any]]:
    """Autotune AdamW on a model's launches and remember the winners."""
    found = []
    rule = get_epilogue("adamw")
    for recipe in recipes:
        names = codec_names(rule, recipe)
        for shape, count in itertools.product(tuned_shapes(model, recipe), tokens):
            best, timed = autotune(
                rule, names, shape, count, torch.bfloat16, device, master=RECIPES[recipe][2]
            )  # fmt: skip
            found.append(
                {"recipe": recipe, "shape": shape, "tokens": count, "best": asdict(best),
                 "all": [{"ms": ms, **asdict(config)} for ms, config in timed]}
            )  # fmt: skip
            print(f"tuned {recipe} {shape} {count}: {timed[0][0] * 1e3:.0f} us {best}", flush=True)
    return found


def run_cell(cell: Cell, device: torch.device, standards: dict[Any, dict[str, float]]) -> dict[str, Any]:
    """Check and time one cell."""
    rule = get_epilogue(cell.rule)
    operands = Operands(cell.shape, cell.tokens, device)
    example = prepare(cell, device, 0)
    target = make_target(rule, example.weight, example.states, master=example.master)
    config = config_for(operands.dy, operands.x, target)
    del example, target
    result: dict[str, Any] = {
        **asdict(cell),
        "config": asdict(config),
        **check(cell, operands, device, config),
    }
    torch.cuda.empty_cache()
    result["ms"] = time_fused(cell, operands, device, config)
    key = (cell.shape, cell.tokens)
    if key not in standards:
        standards[key] = time_standard(cell, operands, device)
    result.update(standards[key])
    result["floor_ms"] = floor_ms(rule, cell.recipe, cell.shape, cell.tokens)
    result["times_floor"] = result["ms"] / result["floor_ms"]
    result["times_standard"] = result["ms"] / result["standard_ms"]
    torch.cuda.empty_cache()
    return result


def main() -> int:
    """Run a set of cells; 1 if a cell failed or a T0 gate did not hold."""
    parser = argparse.ArgumentParser(description="Measure the fused update kernels.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    of_forms, of_cells = ("default", "random", "experts", "bytes"), ("default", "quick", "full", "random")
    parser.add_argument("--set", choices=tuple(dict.fromkeys(of_cells + of_forms)), default="default")
    parser.add_argument("--budget", type=float, default=210.0, help="seconds in which cells begin")
    parser.add_argument("--tune", choices=MERGED, help="autotune this model's launches first")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["bf16", "int8"], help="of --tune")
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 4096], help="of --tune")
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, help="check and compare these forms of the kernel instead"
    )
    parser.add_argument("--processes", type=int, default=8, help="checks of forms at a time")
    arguments = parser.parse_args()
    sets = of_forms if arguments.forms else of_cells
    if arguments.set not in sets:
        beside = "with" if arguments.forms else "without"
        parser.error(f"--set {arguments.set} is not there {beside} --forms: take one of {', '.join(sets)}")
    if not torch.cuda.is_available():
        raise SystemExit("scripts/bench/kernels.py measures a GPU, and there is none here")
    if arguments.forms:
        from kernel_forms import compare_forms

        return compare_forms(
            arguments.forms, arguments.out, arguments.budget, arguments.processes, arguments.set
        )
    device = torch.device("cuda")
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "machine": machine_facts(),
        "cells": [], "totals": [], "others": {}, "failures": [], "left_out": [], "seconds": 0.0,
    }  # fmt: skip

    def save() -> None:
        report["totals"] = totals(report["cells"], LAYER, LAYERS)
        (arguments.out / "kernels.json").write_text(json.dumps(report, indent=1))
        (arguments.out / "kernels.md").write_text(markdown(report))

    def attempt(what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            traceback.print_exc()
            report["failures"].append({"what": what, "error": f"{type(error).__name__}: {str(error)[-500:]}"})
            return None

    if arguments.tune:
        report["tuned"] = attempt(
            "tune", lambda: tune(arguments.tune, arguments.recipes, arguments.tokens, device)
        )
        save()
    started = time.perf_counter()
    standards: dict[Any, dict[str, float]] = {}
    for cell in cells(arguments.set):
        if time.perf_counter() - started > arguments.budget:
            report["left_out"].append(f"{cell.rule} {cell.recipe} {cell.shape} {cell.tokens}")
            continue
        result = attempt(str(cell), lambda cell=cell: run_cell(cell, device, standards))
        report["seconds"] = time.perf_counter() - started
        if result is not None:
            report["cells"].append(result)
            errors = " ".join(f"{value:.1e}" for value in result["errors"])
            print(
                f"[{report['seconds']:5.0f} s] {cell.rule:15s} {cell.recipe:12s} {cell.shape!s:14s} "
                f"{cell.tokens:5d} {result['ms'] * 1e3:7.0f} us  {result['times_floor']:.2f} x floor  "
                f"{result['times_standard']:.2f} x standard  T0 {result['t0']}  errors {errors}",
                flush=True,
            )
        save()
    if arguments.set != "quick":
        for name, function in (("flat", time_flat), ("embedding", time_embedding), ("grouped", time_grouped)):
            result = attempt(name, lambda function=function: function(device))
            if result is not None:
                report["others"][name] = result
                print(f"{name}: {result}", flush=True)
    report["machine"] = machine_facts()  # with the clocks of a card at work
    save()
    plot(report["cells"], arguments.out / "kernels.png")
    print(markdown(report))
    return 1 if report["failures"] or not all(cell["t0"] for cell in report["cells"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
