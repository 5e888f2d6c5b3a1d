"""Weigh and time a step of every optimizer family, fused into backward and not, on the Llama-3.1-8B shape.

    python scripts/bench/families.py                           # all cells; about 7 minutes on one H200
    python scripts/bench/families.py --families adamw lion     # some
    python scripts/bench/families.py --quick                   # a toy on the CPU: proves the script anywhere

A cell is one family under one engine: `forge` (the update inside backward) or `native` (titanforge's ordinary
engine, gradients in `.grad`): bf16 weights, bf16 states, 512 tokens, no clipping, no checkpointing. Its peak
(`torch.cuda.max_memory_allocated`, after the warm-up steps) and eager times are those of plain steps; then
the whole step is captured in one CUDA graph and timed again, without the host. Cells share worker processes:
each begins with an empty allocator, and one that fails, or takes longer than `--cell-timeout`, ends its
worker and not the others. `<out>/families.json` is written after every cell, and a cell that is in it already
is not run again (`--again` runs it anew; `--resume FILE` reads an earlier report too).

Beside our figures stand those of the FORGE paper's appendix I: another card, so compare ratios, not times.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.forge_appendix_i import APPENDIX_I, SOURCE, PaperRow
from scripts.bench.harness import (
    GIB,
    StepClock,
    add_common_arguments,
    machine_facts,
    markdown_table,
    write_report,
)
from scripts.bench.synthetic import POOL_SIZE, token_pool

# family: (rule, options that differ from the sections' defaults). Rates at which eight steps from random
# weights stay finite; nobody tuned them.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {"lr": 1e-5}),
    "sgd": ("sgd", {"lr": 1e-2, "momentum": 0.0}),
    "momentum": ("sgd", {"lr": 1e-2}),
    "adagrad": ("adagrad", {"lr": 1e-5}),
    "rmsprop": ("rmsprop", {"lr": 1e-5}),
    "adam": ("adam", {"lr": 1e-5}),
    "adamax": ("adamax", {"lr": 1e-5}),
    "nadam": ("nadam", {"lr": 1e-5}),
    "radam": ("radam", {"lr": 1e-5}),
    "lion": ("lion", {"lr": 1e-5}),
    "lamb": ("lamb", {"lr": 1e-3}),
    "adam_mini": ("adam_mini", {"lr": 1e-5}),
    "adafactor": ("adafactor", {"lr": 1e-3}),
    "adalomo": ("adalomo", {"lr": 1e-3}),
    "sm3": ("sm3", {"lr": 1e-5}),
    "lars": ("lars", {"lr": 1.0}),
    "muon": ("muon", {"lr": 1e-5, "momentum": 0.95}),
    "scion": ("scion", {"lr": 1e-4, "momentum": 0.9}),
    "adamw-int8": ("adamw", {"lr": 1e-5, "state_dtype": "int8"}),
    "lion-int8": ("lion", {"lr": 1e-5, "state_dtype": "int8"}),
}
ENGINES = ("native", "forge")
# Both engines see the same batches; what is left is the order of sums and bf16 gradients.
LOSS_GAP = 0.1
LEFT_BEHIND = 64 * 2**20
"""Bytes that may be allocated after a cell."""
SAMPLE = 2**16
SLOW_MS = 300.0
_DONE, _START = "done", "start"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.set_defaults(seq_len=512, warmup=3, steps=5, max_norm=0.0)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--state-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kernel", default="auto", help="form of the fused kernel, as forge.kernel")
    parser.add_argument("--no-graph", action="store_true", help="eager steps alone")
    parser.add_argument("--cell-timeout", type=float, default=90.0, help="seconds for one cell")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all cells")
    parser.add_argument("--resume", type=Path, help="an earlier families.json, whose cells are not run again")
    parser.add_argument("--again", action="store_true", help="run cells that the report has already")
    parser.add_argument("--quick", action="store_true", help="a toy on the CPU, in seconds")
    parser.add_argument("--worker", nargs="+", default=None, help=argparse.SUPPRESS)
    return parser


# ---------------------------------------------------------------------------------------- one cell


def measure(args: argparse.Namespace, family: str, engine: str) -> dict[str, Any]:
    """One cell, in this process."""
    from scripts.bench.ours import Forge, GraphedStep, Native, TrainStep, build_llama
    from titanforge.captured import WARM_UP_STEPS
    from titanforge.config.sections import Optimizer
    from titanforge.kernels.forms import select_form
    from titanforge.optim.registry import build_rule

    start = time.perf_counter()
    select_form(args.kernel, torch.device(args.device))
    on_gpu = args.device == "cuda"
    rule, options = FAMILIES[family]
    config = Optimizer(**{"name": rule, "state_dtype": args.state_dtype, **options})
    model: Any = build_llama(tiny=args.tiny, seq_len=args.seq_len, device=args.device)
    update = (Forge if engine == "forge" else Native)(model, config=config, max_norm=0.0)
    step = TrainStep(model, update)
    pool = token_pool(model.args.vocab_size, args.batch, args.seq_len, device=args.device)
    before = _samples(model)
    losses: list[torch.Tensor] = []

    def once(taken: Any = step) -> None:
        losses.append(taken(*pool[len(losses) % POOL_SIZE]).clone())

    for _ in range(args.warmup):
        once()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    step_ms = StepClock(args.device).run(once, warmup=0, steps=args.steps)
    result: dict[str, Any] = {
        "family": family,
        "engine": engine,
        "regime": build_rule(rule).regime,
        "median_ms": statistics.median(step_ms),
        "step_ms": step_ms,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        "weights_gib": sum(p.numel() * p.element_size() for p in model.parameters()) / GIB,
        "states_gib": sum(s.numel() * s.element_size() for s in update.state_tensors()) / GIB,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": [float(loss) for loss in losses],
        "moved": _moved(before, _samples(model)),
    }
    result["finite"] = all(map(math.isfinite, result["losses"]))
    if on_gpu and not args.no_graph:
        slow = result["median_ms"] > SLOW_MS  # the host is long done there: a few replays say as much
        try:
            graphed = GraphedStep(step, *pool[0])
            # The first steps run as they are, the next is captured.
            graph_ms = StepClock(args.device).run(
                lambda: graphed(*pool[0]), warmup=WARM_UP_STEPS + 1, steps=2 if slow else args.steps
            )
            result["graph_ms"] = statistics.median(graph_ms)
        except Exception as error:  # the eager figures stand; the table says why there is no other
            result["graph_error"] = f"{type(error).__name__}: {str(error)[:300]}"
    result["seconds"] = time.perf_counter() - start
    return result


def _samples(model: torch.nn.Module) -> list[torch.Tensor]:
    """The first weights of each parameter."""
    return [param.detach().flatten()[:SAMPLE].clone() for param in model.parameters()]


def _moved(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Share of the sampled weights whose bits changed: small where steps are below bf16's half step."""
    changed = sum(int((old != new).sum()) for old, new in zip(before, after))
    return changed / sum(old.numel() for old in before)


def work(args: argparse.Namespace) -> None:
    """A worker: its cells one after another, a line each when it starts and when it is done.

    It ends early, for a fresh one to take over, when a cell has left memory behind or a capture has failed.
    """
    with args.result.open("a") as report:

        def tell(kind: str, **what: Any) -> None:
            report.write(json.dumps({"kind": kind, **what}) + "\n")
            report.flush()

        for name in args.worker:
            tell(_START, name=name)
            family, engine = name.split("/")
            result = measure(args, family, engine)
            tell(_DONE, name=name, **result)
            if "graph_error" in result:
                return
            gc.collect()
            if args.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
                if torch.cuda.memory_allocated() > LEFT_BEHIND:
                    return


# ---------------------------------------------------------------------------------------- all cells


def run_workers(
    command: Sequence[str], names: Sequence[str], args: argparse.Namespace, keep: Any, log: Path
) -> None:
    """Run cells in workers, `keep(name, result)` as each ends. One that fails is kept with its `error`."""
    end = time.monotonic() + args.budget
    left = list(names)
    while left and time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder, log.open("a+") as output:
            lines = Path(folder, "cells.jsonl")
            offset = output.seek(0, os.SEEK_END)
            worker = subprocess.Popen(
                [*command, "--result", str(lines), "--worker", *left], stdout=output, stderr=output
            )
            reason = _watch(worker, lines, left, args.cell_timeout, end, keep)
            if reason and left:
                output.seek(offset)
                keep(left.pop(0), {"error": f"{reason}\n{output.read()[-1200:]}"})
    for name in left:
        keep(name, {"error": "not run: out of time"})


def _watch(
    worker: subprocess.Popen, lines: Path, left: list[str], timeout: float, end: float, keep: Any
) -> str:
    """Take over a worker's results until it ends; returns why its cell under way failed, if it did."""
    seen, since = 0, time.monotonic()
    while True:
        ended = worker.poll()
        # What follows the last line's end is a line under way.
        written = lines.read_text().split("\n")[:-1] if lines.exists() else []
        for line in written[seen:]:
            told = json.loads(line)
            since = time.monotonic()
            if told.pop("kind") == _DONE:
                name = told.pop("name")
                assert left[0] == name
                left.pop(0)
                keep(name, told)
        seen = len(written)
        if ended is not None:
            return "" if ended == 0 else f"exit code {ended}"
        now = time.monotonic()
        if now - since > timeout or now > end:
            worker.kill()
            worker.wait()
            return f"no result within {timeout:.0f} s" if now <= end else "out of time"
        time.sleep(0.1)


def table_of(cells: dict[str, dict[str, Any]], families: Sequence[str]) -> str:
    """The report's table: ours, then the paper's."""
    header = [
        "family", "regime", "native GiB", "forge GiB", "saved %", "native ms", "forge ms", "native graph ms",
        "forge graph ms", "speed-up", "last losses apart",
        "paper base GB", "paper FORGE GB", "paper base ms", "paper FORGE ms", "paper speed-up", "note",
    ]  # fmt: skip
    rows = []
    for family in families:
        native, forge = (cells.get(f"{family}/{engine}", {}) for engine in ENGINES)
        if not native and not forge:
            continue
        paper = APPENDIX_I.get(family, PaperRow())
        best = "graph_ms" if "graph_ms" in native and "graph_ms" in forge else "median_ms"
        gap = loss_gap(native, forge)
        rows.append(
            [
                family, str(native.get("regime", forge.get("regime", "–"))),
                native.get("peak_gib"), forge.get("peak_gib"),
                _saved(native.get("peak_gib"), forge.get("peak_gib")),
                native.get("median_ms"), forge.get("median_ms"),
                native.get("graph_ms"), forge.get("graph_ms"),
                _ratio(native.get(best), forge.get(best)),
                None if gap is None else f"{gap:.4f}",
                paper.base_gb, paper.forge_gb, paper.base_ms, paper.forge_ms,
                _ratio(paper.base_ms, paper.forge_ms),
                "; ".join(filter(None, [_trouble(native), _trouble(forge), paper.note])) or "–",
            ]
        )  # fmt: skip
    text = (
        "Peaks in GiB, medians of eager steps and of replays of one CUDA graph; speed-up: native over forge, "
        f"by graphs where both have one.\nThe paper's columns: {SOURCE}; GB as printed, means."
    )
    return f"{markdown_table(header, rows)}\n\n{text}"


def loss_gap(native: dict[str, Any], forge: dict[str, Any]) -> float | None:
    """How far apart the two engines' last losses are: they trained on the same batches."""
    if "losses" not in native or "losses" not in forge:
        return None
    last = min(len(native["losses"]), len(forge["losses"])) - 1
    return abs(native["losses"][last] - forge["losses"][last])


def _trouble(cell: dict[str, Any]) -> str:
    if "error" in cell:
        return f"failed: {cell['error'].splitlines()[0]}"
    if cell and not cell["finite"]:
        return f"{cell['engine']}: loss not finite"
    if cell and cell["moved"] == 0:
        return f"{cell['engine']}: no weight moved"
    return f"{cell['engine']}: no graph ({cell['graph_error'][:80]})" if "graph_error" in cell else ""


def _saved(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else 100.0 * (1.0 - after / before)


def _ratio(before: float | None, after: float | None) -> str | None:
    return None if before is None or after is None else f"{before / after:.2f}x"


def failures(cells: dict[str, dict[str, Any]], wanted: Sequence[str]) -> list[str]:
    """Cells that have no figure, or whose figure is that of a run that did not train alike."""
    found = [name for name in wanted if "error" in cells.get(name, {"error": ""})]
    found += [name for name in wanted if cells.get(name, {}).get("finite") is False]
    found += [name for name in wanted if cells.get(name, {}).get("moved") == 0]
    for family in dict.fromkeys(name.split("/")[0] for name in wanted):
        gap = loss_gap(*(cells.get(f"{family}/{engine}", {}) for engine in ENGINES))
        if gap is not None and not gap <= LOSS_GAP:
            found.append(f"{family}: the engines' losses are {gap:.3f} apart")
    return found


def read_cells(*files: Path | None) -> dict[str, dict[str, Any]]:
    """Cells of earlier reports that have a figure."""
    cells: dict[str, dict[str, Any]] = {}
    for file in files:
        if file is not None and file.exists():
            cells |= {
                name: cell
                for name, cell in json.loads(file.read_text())["cells"].items()
                if "error" not in cell
            }
    return cells


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    if args.quick:
        args.device, args.tiny, args.seq_len, args.warmup, args.steps = "cpu", True, 32, 1, 2
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: --quick proves the script on a CPU")
    if args.worker is not None:
        work(args)
        return 0
    if args.resume is not None and not args.resume.exists():
        raise SystemExit(f"--resume {args.resume}: no such file")
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [f"{family}/{engine}" for family in args.families for engine in args.engines]
    cells = {} if args.again else read_cells(args.resume, args.out / "families.json")
    facts = machine_facts()
    facts["shape"] = f"{'toy' if args.tiny else 'Llama-3.1-8B'}, batch {args.batch}, sequence {args.seq_len}"
    facts["states"], facts["forge.kernel"] = args.state_dtype, args.kernel

    def keep(name: str, result: dict[str, Any]) -> None:
        cells[name] = result
        report = {"machine": facts, "paper": SOURCE, "cells": cells}
        aside = args.out / "families.json.part"
        aside.write_text(json.dumps(report, indent=1))
        aside.replace(args.out / "families.json")
        if "error" in result:
            print(f"[{name}] FAILED: {result['error'][-500:]}", flush=True)
        else:
            peak = result["peak_gib"]
            print(
                f"[{name}] {result['median_ms']:.2f} ms"
                + (f", graph {result['graph_ms']:.2f} ms" if "graph_ms" in result else "")
                + (f", {peak:.2f} GiB" if peak is not None else "")
                + f"  ({result['seconds']:.0f} s)",
                flush=True,
            )

    command = [sys.executable, __file__, *_without(argv, "--families", "--engines", "--result")]
    todo = [name for name in wanted if name not in cells]
    run_workers(command, todo, args, keep, args.out / "families.log")
    write_report(
        args.out,
        "families",
        {"machine": facts, "paper": SOURCE, "cells": cells},
        table_of(cells, args.families),
    )
    wrong = failures(cells, wanted)
    if wrong:
        print("not as they should be: " + "; ".join(wrong), flush=True)
    return 1 if wrong else 0


def _without(argv: list[str], *options: str) -> list[str]:
    """The command line without options and the words that follow them."""
    kept: list[str] = []
    skipping = False
    for word in argv:
        if word.startswith("--"):
            skipping = word in options
        if not skipping:
            kept.append(word)
    return kept


if __name__ == "__main__":
    sys.exit(main())
