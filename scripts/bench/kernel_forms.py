"""The forms of the weight-gradient kernel beside one another: right first, then fast.

Every check and every form's timing runs in a process of its own with a time limit, since a wrong barrier
hangs a kernel and a hang must not lose the rest. Checks, against the portable form's gradient and a flat pass
(gate T0): every bit equal at shapes from one tile to a Llama-8B weight; 100 repeats at three shapes without
one differing element; nothing changes when the apply flag is 0; an infinite gradient spares its tile and is
counted; the norms of tiles. What fails a check is not timed. Called by `kernels.py --forms`.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from kernel_cells import ATTENTION, DOWN, EXPERTS, GATE_UP, LAYER, MODELS, QWEN3_32B
from kernel_form_jobs import BYTE_GEOMETRIES, GEOMETRIES, Check, Timing
from kernels_report import forms_markdown, plot

from scripts.bench.harness import machine_facts
from titanforge.kernels.forms import COOPERATIVE, PINGPONG, PORTABLE, unavailable


def checks(forms: Sequence[str], which: str) -> list[Check]:
    """What to check, the most wanted first."""
    if which == "random":
        return random_checks(forms)
    if which == "bytes":
        beside = [Check(PINGPONG, "paired", "adamw", "bf16"), Check(PINGPONG, "turns", "adamw", "fp8")]
        listed = [Check(PINGPONG, geometry, "adamw", "int8") for geometry in BYTE_GEOMETRIES] + beside
        return listed if PINGPONG in forms else []
    if which == "experts":
        recipes = (("adamw", "int8_sr"), ("adamw", "bf16"), ("momentum_state", "bf16"), ("adamw", "int8"))
        return [
            Check(form, geometry, *recipe, experts=True)
            for recipe in recipes
            for form in forms
            for geometry in ("overlap", "turns")
            if form == PINGPONG
        ]
    kinds = (
        ("adamw", "bf16"), ("adamw", "int8"), ("momentum_state", "bf16"), ("momentum_state", "fp32_states"),
        ("adamw", "fp8"), ("adamw", "fp32_states"), ("adamw", "master"), ("lion", "bf16"),
    )  # fmt: skip
    main_geometry = {PINGPONG: "turns", COOPERATIVE: "32x4"}
    listed = [
        Check(form, main_geometry[form], *kind) for kind in kinds for form in forms if form in main_geometry
    ]
    others = [("adamw", "bf16"), ("adamw", "int8"), ("adamw", "fp8")]
    for form in forms:
        for geometry in GEOMETRIES.get(form, {}):
            if geometry != main_geometry[form]:
                listed += [
                    Check(form, geometry, *kind) for kind in others[: 1 if geometry[-1] in "35" else 3]
                ]
    return listed


def random_checks(forms: Sequence[str]) -> list[Check]:
    """The same of stochastic rounding."""
    geometries = {PINGPONG: ("overlap", "turns"), COOPERATIVE: ("32x4",)}
    listed = [
        Check(form, geometry, "adamw", recipe)
        for recipe in ("int8_sr", "bf16_sr", "fp8_sr")
        for form in forms
        for geometry in geometries.get(form, ())
    ]
    return listed + [
        Check(form, geometries[form][0], rule, "bf16_sr")
        for rule in ("momentum_state", "lion")
        for form in forms
        if form in geometries
    ]


def group(shape: tuple[int, ...]) -> int:
    """Rows of tiles that `auto` walks at a time in pp2."""
    return 8 if shape[-1] > 8192 else 1


def random_timings(forms: Sequence[str]) -> list[Timing]:
    """Stochastic rounding beside the same states rounded to nearest."""
    shapes, large = ([shape for shape, _ in layer] for layer in (LAYER, QWEN3_32B))
    listed = [Timing(PINGPONG, "turns", group(s), "adamw", "int8_sr", s, 512) for s in (*large, *shapes)]
    listed += [Timing(PORTABLE, "", 0, "adamw", "int8_sr", s, 512) for s in (*large, *shapes)]
    listed += [Timing(PINGPONG, "overlap", group(s), "adamw", "int8_sr", s, 512) for s in (*large, *shapes)]
    for recipe in ("bf16_sr", "fp8_sr"):
        for geometry in ("turns", "overlap"):
            listed += [Timing(PINGPONG, geometry, group(s), "adamw", recipe, s, 512) for s in shapes]
    listed += [Timing(COOPERATIVE, "32x4", 8, "adamw", "int8_sr", s, 4096) for s in shapes]
    listed += [Timing(PORTABLE, "", 0, "adamw", "int8_sr", s, 4096) for s in shapes]
    return [timing for timing in listed if timing.form in forms]


def byte_timings() -> list[Timing]:
    """int8 states by geometry, then orders of tiles where rows are long."""
    shapes = (GATE_UP, DOWN, ATTENTION)
    listed = [Timing(PINGPONG, g, group(s), "adamw", "int8", s, 512) for g in BYTE_GEOMETRIES for s in shapes]
    listed += [Timing(PINGPONG, "paired", group(s), "adamw", "bf16", s, 512) for s in shapes]
    listed += [Timing(PINGPONG, "turns", group(s), "adamw", "fp8", s, 512) for s in shapes]
    orders = (8, 4, 2, 1)
    for geometry, recipe in (("paired", "bf16"), ("turns", "int8"), ("overlap", "int8"), ("turns", "fp8")):
        listed += [Timing(PINGPONG, geometry, n, "adamw", recipe, DOWN, 512) for n in orders]
    return list(dict.fromkeys(listed))


def timings(forms: Sequence[str], which: str) -> list[Timing]:
    """What to time, the most wanted first."""
    if which == "random":
        return random_timings(forms)
    if which == "bytes":
        return byte_timings() if PINGPONG in forms else []
    if which == "experts":
        geometries = ((PINGPONG, "overlap", 1), (PINGPONG, "turns", 1), (PORTABLE, "", 0))
        return [
            Timing(form, geometry, rows, "adamw", recipe, shape, tokens)
            for tokens in (4096, 16384)  # 512 and 2048 tokens, eight experts each
            for recipe in ("int8_sr", "bf16", "int8")
            for form, geometry, rows in geometries
            for shape, _ in EXPERTS
            if form in forms
        ]
    shapes = [shape for shape, _ in LAYER]
    listed: list[Timing] = []
    for recipe in ("bf16", "int8", "fp8"):
        for geometry in ("paired", "turns", "overlap"):
            listed += [Timing(PINGPONG, geometry, group(s), "adamw", recipe, s, 512) for s in shapes]
        listed += [Timing(PORTABLE, "", 0, "adamw", recipe, s, 512) for s in shapes]
    for geometry in ("32x4", "64x3", "32x5"):
        listed += [Timing(COOPERATIVE, geometry, 8, "adamw", "bf16", s, 4096) for s in shapes]
    listed += [Timing(PORTABLE, "", 0, "adamw", "bf16", s, 4096) for s in shapes]
    listed += [Timing(COOPERATIVE, "32x4", 8, "adamw", "bf16", s, 2048) for s in shapes]
    listed += [
        Timing(PINGPONG, g, group(s), "adamw", "bf16", s, 2048) for s in shapes for g in ("paired", "turns")
    ]
    for form, geometry in ((PINGPONG, "turns"), (COOPERATIVE, "32x4"), (PORTABLE, "")):
        for tokens in (512, 4096):
            listed += [Timing(form, geometry, 8, "momentum_state", "bf16", s, tokens) for s in shapes[:2]]
    for recipe in ("int8", "fp8"):
        listed += [Timing(COOPERATIVE, "32x4", 8, "adamw", recipe, s, 4096) for s in shapes]
        listed += [Timing(PORTABLE, "", 0, "adamw", recipe, s, 4096) for s in shapes[:1]]
    listed += [
        Timing(PINGPONG, g, n, "adamw", "bf16", GATE_UP, 512) for g in ("turns3", "overlap3") for n in (1, 8)
    ]
    listed += [
        Timing(PINGPONG, "turns", n, "adamw", "bf16", s, 512) for s in (GATE_UP, DOWN) for n in (1, 2, 4, 8)
    ]
    listed += [
        Timing(COOPERATIVE, "32x4", n, "adamw", "bf16", s, 4096) for s in (GATE_UP, DOWN) for n in (1, 4, 16)
    ]
    listed += [
        Timing(PINGPONG, "turns", group(s), "adamw", r, s, 512)
        for r in ("fp32_states", "master")
        for s in shapes[:1]
    ]
    for tokens in (256, 1024):
        listed += [Timing(PINGPONG, "paired", group(s), "adamw", "bf16", s, tokens) for s in shapes]
    listed += [Timing(COOPERATIVE, "32x4", 8, "adamw", "bf16", s, 1024) for s in shapes]
    listed += [Timing(COOPERATIVE, "32x4", 8, "adamw", "bf16", s, 8192) for s in shapes]
    return [timing for timing in dict.fromkeys(listed) if timing.form in forms]


def start_job(job: dict[str, Any], folder: Path, name: str, timeout: float) -> dict[str, Any]:
    """Run a job in a process of its own; what it wrote comes back even if it had to be killed."""
    out = folder / f"{name}.jsonl"
    command = [
        sys.executable,
        str(Path(__file__).with_name("kernel_form_jobs.py")),
        "--job",
        json.dumps(job),
        "--result",
        str(out),
    ]
    started, problem, text = time.perf_counter(), "", ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        text = (done.stdout + done.stderr)[-1500:]
        problem = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        problem = f"killed after {timeout:.0f} s"
        text = ((error.stdout or b"") + (error.stderr or b"")).decode(errors="replace")[-1500:]
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {"results": lines, "problem": problem, "text": text, "seconds": time.perf_counter() - started}


def tell_check(check: Check, answer: dict[str, Any]) -> bool:
    """Print one check's outcome; whether it passed."""
    failed = [result for result in answer["results"] if not result["good"]]
    done = any(result["what"] == "done" for result in answer["results"])
    compiled = [r["seconds"] for r in answer["results"] if r["what"] == "compiled"]
    passed = done and not failed and not answer["problem"]
    print(
        f"{check.name:44s} {'right' if passed else 'WRONG'}  {len(answer['results'])} results, compiled in "
        f"{compiled[0] if compiled else -1:.0f} s, all in {answer['seconds']:.0f} s {answer['problem']}",
        flush=True,
    )
    for result in failed:
        print(f"    {json.dumps(result)[:1500]}", flush=True)
    if answer["problem"]:
        last = answer["results"][-1]["what"] if answer["results"] else "nothing"
        print(f"    last result: {last}\n    {answer['text'][-1200:]}", flush=True)
    return passed


def best_totals(cells: list[dict[str, Any]], standards: dict[Any, dict[str, float]]) -> list[str]:
    """Lines: all linears of a model's step by form, with the best geometry of each shape."""
    lines = []
    keys = dict.fromkeys((c["form"], c["recipe"], c["tokens"]) for c in cells if c["rule"] == "adamw")
    for (form, recipe, tokens), (model, (layer, layers)) in itertools.product(keys, MODELS.items()):
        total = floor = standard = 0.0
        for shape, count in layer:
            found = [
                c for c in cells
                if (c["form"], c["recipe"], c["tokens"], tuple(c["shape"]), c["rule"])
                == (form, recipe, tokens, shape, "adamw")
            ]  # fmt: skip
            if not found:
                break
            total += layers * count * min(c["ms"] for c in found)
            floor += layers * count * found[0]["floor_ms"]
            standard += layers * count * standards.get((shape, tokens), {}).get("standard_ms", float("nan"))
        else:
            known = not math.isnan(standard)
            beside = f"  standard {standard:7.2f}  ratio {total / standard:.2f}" if known else ""
            lines.append(
                f"{model} linears  {form:9s} {recipe:8s} tokens {tokens:5d}: {total:7.2f} ms  "
                f"floor {floor:6.2f}{beside}"
            )
    return lines


def tell_cell(cell: dict[str, Any], report: dict[str, Any], standards: dict[Any, dict[str, float]]) -> None:
    """Print what was timed, a form or the standard path (its cells enter `standards`), and report it."""
    if "left_out" in cell:
        print(f"left out for want of time: {cell['left_out']}", flush=True)
    elif "error" in cell:
        report["failures"].append(cell)
        print(f"FAILED {cell}", flush=True)
    elif "form" not in cell:
        standards[tuple(cell["shape"]), cell["tokens"]] = cell
        report["standards"].append(cell)
        print(
            f"standard {cell['shape']!s:14s} tokens {cell['tokens']:5d} "
            f"{cell['standard_ms'] * 1e3:7.0f} us  "
            f"(cuBLAS {cell['cublas_ms'] * 1e3:.0f}, adamw {cell['torch_adamw_ms'] * 1e3:.0f})",
            flush=True,
        )
    else:
        report["cells"].append(cell)
        standard = standards.get((tuple(cell["shape"]), cell["tokens"]), {}).get("standard_ms")
        beside = f"  {cell['ms'] / standard:.2f} x standard" if standard else ""
        print(
            f"{cell['form']:9s}{cell['geometry']:9s} group {cell['group']:2d} {cell['rule']:15s}"
            f"{cell['recipe']:12s}{cell['shape']!s:17s} tokens {cell['tokens']:5d} "
            f"{cell['ms'] * 1e3:7.1f} us  {cell['ms'] / cell['floor_ms']:.2f} x floor"
            f"{beside}",
            flush=True,
        )


def compare_forms(
    forms: Sequence[str], out: Path, budget: float, processes: int, which: str = "default"
) -> int:
    """Check, then time; 1 if anything asked for is wrong or fails. which: a set of `kernels.py`."""
    began = time.time()
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "machine": machine_facts(), "checks": {}, "cells": [],
        "standards": [], "totals": [], "failures": [],
    }  # fmt: skip

    def save() -> None:
        (out / "kernel_forms.json").write_text(json.dumps(report, indent=1))

    if any(form != PORTABLE for form in forms) and (reason := unavailable(device)):
        print(f"only the portable form runs here: {reason}")
        forms = [PORTABLE]
    right: set[tuple[str, str, str, str]] = set()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(processes) as pool:
        folder = Path(name)
        listed = checks(forms, which)
        running = []
        for number, check in enumerate(listed):
            job = {"kind": "check", "check": asdict(check), "limit": 75}
            running.append(pool.submit(start_job, job, folder, f"check{number}", 110))
        for check, future in zip(listed, running):
            answer = future.result()
            report["checks"][check.name] = answer
            answer["right"] = tell_check(check, answer)
            if answer["right"]:
                right.add((check.form, check.geometry, check.rule, check.recipe))
            else:
                report["failures"].append(check.name)
            save()
        print(f"[{time.time() - began:.0f} s] checks done, {len(right)} of {len(listed)} right", flush=True)

        def runs(timing: Timing) -> bool:
            key = (timing.form, timing.geometry, timing.rule, timing.recipe)
            # A geometry that was not checked with this recipe is not timed with it either.
            return timing.form == PORTABLE or key in right

        wanted = [timing for timing in timings(forms, which) if runs(timing)]
        sizes = list(dict.fromkeys((timing.shape, timing.tokens) for timing in wanted))
        until = began + budget
        # The standard path and the portable form cannot hang: one process for both.
        safe: list[Any] = [{"shape": shape, "tokens": tokens} for shape, tokens in sizes if len(shape) == 2]
        safe += [asdict(timing) for timing in wanted if timing.form == PORTABLE]
        jobs: list[tuple[str, list[Any]]] = [(PORTABLE, safe)]
        for form in forms:
            if form != PORTABLE:
                jobs.append((form, [asdict(timing) for timing in wanted if timing.form == form]))
        standards: dict[Any, dict[str, float]] = {}
        for index, (form, cells) in enumerate(jobs):
            # Each job may take an even share of what is left.
            share = max(15.0, (until - time.time()) / (len(jobs) - index))
            job = {"kind": "time", "cells": cells, "forms": [form], "limit": 25, "until": time.time() + share}
            answer = start_job(job, folder, f"time_{form}", share + 30)
            if answer["problem"]:
                report["failures"].append(f"timing {form}: {answer['problem']}")
                print(f"timing {form}: {answer['problem']}\n{answer['text']}", flush=True)
            for cell in answer["results"]:
                tell_cell(cell, report, standards)
            save()
        report["machine"] = machine_facts()  # with the clocks of a card at work
        report["totals"] = best_totals(report["cells"], standards)
        save()
        (out / "kernel_forms.md").write_text(forms_markdown(report))
        plot(report["cells"], out / "kernel_forms.png")
        for line in report["totals"]:
            print(line, flush=True)
    print(
        f"[{time.time() - began:.0f} s] {len(report['failures'])} failures: {report['failures']}"[:3000],
        flush=True,
    )
    return 1 if report["failures"] else 0
