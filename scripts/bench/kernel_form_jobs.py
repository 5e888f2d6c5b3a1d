"""One process of `kernel_forms.py`: checks one form of the kernel, or times some cells.

A kernel that does not come back is ended by a timer, with what was found before already written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from kernel_cells import (
    ATTENTION,
    DOWN,
    GATE_UP,
    KEY_VALUE,
    Cell,
    Operands,
    Set,
    buffer_count,
    floor_ms,
    hyper_vector,
    prepare,
    time_standard,
)
from torch import Tensor

from titanforge.kernels.config import TileConfig
from titanforge.kernels.epilogues import get_epilogue
from titanforge.kernels.flat import flat_update
from titanforge.kernels.forms import COOPERATIVE, PINGPONG, PORTABLE, select_form
from titanforge.kernels.step import make_target
from titanforge.kernels.timing import replay_time
from titanforge.kernels.wgrad import config_for, fused_wgrad_update, tile_count, wgrad

DEVICE = torch.device("cuda")
TENSOR_ID = 13
GEOMETRIES: dict[str, dict[str, TileConfig]] = {
    PINGPONG: {
        "turns": TileConfig(128, 128, 64, stages=4, form=PINGPONG),
        "paired": TileConfig(128, 128, 64, stages=4, form=PINGPONG, paired=True),
        "overlap": TileConfig(128, 128, 64, stages=4, form=PINGPONG, overlap=True),
        "turns3": TileConfig(128, 128, 64, stages=3, form=PINGPONG),
        "overlap3": TileConfig(128, 128, 64, stages=3, form=PINGPONG, overlap=True),
    },
    COOPERATIVE: {
        "32x4": TileConfig(128, 256, 32, split=4, warps=8, stages=4, form=COOPERATIVE),
        "64x3": TileConfig(128, 256, 64, split=4, warps=8, stages=3, form=COOPERATIVE),
        "32x5": TileConfig(128, 256, 32, split=4, warps=8, stages=5, form=COOPERATIVE),
    },
}
BYTE_GEOMETRIES: dict[str, TileConfig] = {
    **{name: GEOMETRIES[PINGPONG][name] for name in ("turns", "overlap", "paired")},
    "overlap+": TileConfig(128, 128, 64, stages=4, form=PINGPONG, overlap=True, paired=True),
    "turns5": TileConfig(128, 128, 64, stages=5, form=PINGPONG),
    "overlap5": TileConfig(128, 128, 64, stages=5, form=PINGPONG, overlap=True),
    "paired5": TileConfig(128, 128, 64, stages=5, form=PINGPONG, paired=True),
}
"""For states of a byte, whose slots leave room for another stage of operands."""
EXACT_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((128, 256), 1), ((256, 512), 64), ((512, 768), 200), ((1024, 4096), 512), ((4096, 1024), 1000),
    (GATE_UP, 512),
)  # fmt: skip
REPEATED_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = ((KEY_VALUE, 512), (ATTENTION, 512), (DOWN, 2048))
EXPERT_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((3, 128, 256), 5), ((8, 256, 384), 700), ((128, 768, 2048), 4096), ((5, 2048, 768), 512),
)  # fmt: skip
REPEATED_EXPERTS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((128, 768, 2048), 4096), ((128, 2048, 768), 512), ((8, 768, 2048), 8192),
)  # fmt: skip
REPEATS = 100


@dataclass(frozen=True)
class Check:
    """One kernel to compile and check."""

    form: str
    geometry: str
    rule: str
    recipe: str
    experts: bool = False

    @property
    def name(self) -> str:
        """As printed."""
        experts = "/experts" if self.experts else ""
        return f"{self.form}/{self.geometry}/{self.rule}/{self.recipe}{experts}"


@dataclass(frozen=True)
class Timing:
    """One measurement."""

    form: str
    geometry: str
    group: int
    rule: str
    recipe: str
    shape: tuple[int, ...]
    tokens: int


def geometry_of(job: Check | Timing) -> TileConfig:
    """What the job runs with."""
    found = GEOMETRIES[job.form].get(job.geometry)
    return BYTE_GEOMETRIES[job.geometry] if found is None else found


@cache
def rng() -> Tensor:
    """Seed and step of everything here that rounds at random."""
    return torch.tensor([(5 << 40) + 11, 7], device=DEVICE)


def run(target: Set, operands: Operands, rule: Any, hyper: Tensor, config: TileConfig, **more: Any) -> None:
    """One fused update."""
    fused_wgrad_update(
        operands.dy, operands.x, target.weight, target.states, rule, hyper, master=target.master,
        offsets=operands.offsets, rng=rng(), tensor_id=TENSOR_ID, config=config, **more,
    )  # fmt: skip


def differences(found: Set, wanted: Set, before: Set, config: TileConfig) -> list[dict[str, Any]]:
    """Where and how two results differ, tensor by tensor; empty if they do not."""
    names = [part.codec.name for part in found.parts()]
    told = []
    for index, (a, b, old) in enumerate(zip(found.tensors(), wanted.tensors(), before.tensors())):
        wrong = a != b
        count = int(wrong.sum())
        if not count:
            continue
        entry: dict[str, Any] = {
            "tensor": index, "codec": names[index] if index < len(names) else "scales or master",
            "bytes_different": count, "of": a.numel(), "left_as_it_was": int((wrong & (a == old)).sum()),
        }  # fmt: skip
        if index < len(names) and a.dim() == 2:
            size = found.parts()[index].values.element_size()
            rows, columns = wrong.nonzero(as_tuple=True)
            columns = columns // size
            tiles = torch.unique(torch.stack((rows // config.block_n, columns // config.block_k)), dim=1)
            pieces = torch.unique(
                torch.stack((rows % config.block_n // 64, columns % config.block_k // 64)), dim=1
            )
            values = (found.parts()[index].values.float() - wanted.parts()[index].values.float()).abs()
            entry |= {
                "first": [[int(r), int(c)] for r, c in zip(rows[:4], columns[:4])],
                "tiles_different": int(tiles.shape[1]), "first_tiles": tiles[:, :6].t().tolist(),
                "pieces_of_64": pieces.t().tolist(), "largest_difference": float(values.nan_to_num().max()),
            }  # fmt: skip
        told.append(entry)
    return told


def check_exact(check: Check, config: TileConfig, shape: tuple[int, ...], tokens: int) -> dict[str, Any]:
    """Gate T0 against the portable gradient and a flat pass."""
    rule = get_epilogue(check.rule)
    hyper = hyper_vector(rule, DEVICE)
    operands = Operands(shape, tokens, DEVICE)
    start = prepare(Cell(check.rule, check.recipe, shape, tokens), DEVICE, 0)
    found, wanted = start.clone(), start.clone()
    norm = torch.full((tile_count(shape, config),), float("nan"), device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    run(found, operands, rule, hyper, config, norm_partials=norm, nonfinite=counter)
    gradient = wgrad(operands.dy, operands.x, offsets=operands.offsets)
    flat_update(
        rule, [wanted.weight] if wanted.weight is not None else None, [gradient], [wanted.states], hyper,
        masters=[wanted.master], rng=rng(), tensor_ids=[TENSOR_ID],
    )  # fmt: skip
    told = differences(found, wanted, start, config)
    squares = float(gradient.double().square().sum())
    return {
        "what": f"exact {shape} tokens {tokens}",
        "good": not told and int(counter) == 0 and abs(float(norm.double().sum()) / squares - 1) < 1e-5,
        "counted": int(counter), "norm_ratio": float(norm.double().sum()) / squares, "different": told,
    }  # fmt: skip


def check_flags(check: Check, config: TileConfig) -> Iterator[dict[str, Any]]:
    """apply = 0, and an infinite gradient in one tile."""
    rule, shape, tokens = get_epilogue(check.rule), (512, 1024), 100
    operands = Operands(shape, tokens, DEVICE)
    start = prepare(Cell(check.rule, check.recipe, shape, tokens), DEVICE, 0)
    idle = start.clone()
    hyper = hyper_vector(rule, DEVICE)
    hyper[0] = 0
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    run(idle, operands, rule, hyper, config, nonfinite=counter)
    told = differences(idle, start, start, config)
    yield {"what": "apply = 0", "good": not told and int(counter) == 0, "different": told}

    hyper[0] = 1
    operands.x[3, 300] = float("inf")
    operands.dy[3] = 0
    operands.dy[3, 200] = 1  # G is infinite or NaN in column 300
    found = start.clone()
    run(found, operands, rule, hyper, config, nonfinite=counter)
    spared = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    j = 300 // config.block_k
    spared[:, j * config.block_k : (j + 1) * config.block_k] = True
    bad = []
    for part, old in zip(found.parts(), start.parts()):
        if part.codec.kind == "tensor":
            continue  # written again under another scale
        bad.append(int(((part.values != old.values) & spared).sum()))
    expected = shape[0] // config.block_n
    yield {
        "what": "infinite gradient", "good": not any(bad) and int(counter) == expected,
        "counted": int(counter), "expected": expected, "changed_where_spared": bad,
    }  # fmt: skip


def check_repeats(check: Check, config: TileConfig, shape: tuple[int, ...], tokens: int) -> dict[str, Any]:
    """The same launch many times, on the same numbers."""
    rule = get_epilogue(check.rule)
    hyper = hyper_vector(rule, DEVICE)
    operands = Operands(shape, tokens, DEVICE)
    start = prepare(Cell(check.rule, check.recipe, shape, tokens), DEVICE, 0)
    first, again = start.clone(), start.clone()
    run(first, operands, rule, hyper, config)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    runs_wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS):
        for into, source in zip(again.tensors(), start.tensors()):
            into.copy_(source)
        run(again, operands, rule, hyper, config)
        count = sum((a != b).sum() for a, b in zip(again.tensors(), first.tensors()))
        wrong += count
        runs_wrong += count > 0
    return {
        "what": f"{REPEATS} repeats {shape} tokens {tokens}", "good": int(wrong) == 0,
        "bytes_different": int(wrong), "runs_different": int(runs_wrong),
    }  # fmt: skip


def run_check(check: Check) -> Iterator[dict[str, Any]]:
    """All checks of one kernel."""
    config = geometry_of(check)
    started = time.perf_counter()
    exact, repeated = (EXPERT_SHAPES, REPEATED_EXPERTS) if check.experts else (EXACT_SHAPES, REPEATED_SHAPES)
    yield check_exact(check, config, *exact[0])
    yield {"what": "compiled", "good": True, "seconds": time.perf_counter() - started}
    for shape, tokens in exact[1:]:
        yield check_exact(check, replace(config, group=1 if tokens == 512 else 8), shape, tokens)
    yield from check_flags(check, config)
    for shape, tokens in repeated:
        yield check_repeats(check, config, shape, tokens)


def time_one(timing: Timing) -> dict[str, Any]:
    """Milliseconds of one cell."""
    cell = Cell(timing.rule, timing.recipe, timing.shape, timing.tokens)
    rule = get_epilogue(timing.rule)
    hyper = hyper_vector(rule, DEVICE)
    operands = Operands(timing.shape, timing.tokens, DEVICE)
    sets = [prepare(cell, DEVICE, seed) for seed in range(buffer_count(cell))]
    if timing.form == PORTABLE:
        target = make_target(rule, sets[0].weight, sets[0].states, master=sets[0].master)
        experts = timing.shape[0] if len(timing.shape) == 3 else 1
        config = config_for(operands.dy, operands.x, target, experts)
    else:
        config = replace(geometry_of(timing), group=timing.group)
    ms = replay_time([lambda one=one: run(one, operands, rule, hyper, config) for one in sets], budget_ms=60)
    floor = floor_ms(rule, timing.recipe, timing.shape, timing.tokens)
    return {**asdict(timing), "ms": ms, "floor_ms": floor, "config": asdict(config)}


def worker(job: dict[str, Any], out: Path) -> None:
    """Run one job and append its results to a file, one a line."""
    limit = float(job["limit"])

    def stop() -> None:
        print(f"no answer for {limit:.0f} s: the kernel hangs", flush=True)
        os._exit(9)

    with out.open("a") as file:

        def put(result: dict[str, Any]) -> None:
            file.write(json.dumps(result) + "\n")
            file.flush()

        def guarded(function: Any) -> Any:
            timer = threading.Timer(limit, stop)
            timer.daemon = True
            timer.start()
            try:
                return function()
            finally:
                timer.cancel()

        if job["kind"] == "check":
            results = run_check(Check(**job["check"]))
            while (result := guarded(lambda: next(results, None))) is not None:
                put(result)
            put({"what": "done", "good": True})
            return
        if PORTABLE in job["forms"]:
            select_form(PORTABLE, DEVICE)
        for entry in job["cells"]:
            if time.time() > job["until"]:
                put({"left_out": entry})
                continue
            try:
                if "form" not in entry:
                    cell = Cell("adamw", "bf16", tuple(entry["shape"]), entry["tokens"])
                    operands = Operands(cell.shape, cell.tokens, DEVICE)
                    put({**entry, **guarded(lambda cell=cell, operands=operands: time_standard(
                        cell, operands, DEVICE))})  # fmt: skip
                else:
                    timing = Timing(**{**entry, "shape": tuple(entry["shape"])})
                    put(guarded(lambda timing=timing: time_one(timing)))
            except Exception as error:
                put({**entry, "error": f"{type(error).__name__}: {str(error)[-400:]}"})
            torch.cuda.empty_cache()


def main() -> None:
    """A worker's entry; `kernels.py --forms` is the user's."""
    parser = argparse.ArgumentParser(description="Workers of kernels.py --forms.")
    parser.add_argument("--job", required=True)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        worker(json.loads(arguments.job), arguments.result)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
