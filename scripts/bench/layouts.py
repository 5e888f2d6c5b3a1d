"""Tokens per second, memory and losses of the training job itself on several layouts of the same GPUs.

    python scripts/bench/layouts.py                              # all layouts of two GPUs, Qwen3-8B's shape
    python scripts/bench/layouts.py --cells one dp_shard=2 tp=2 --seq-len 8192
    python scripts/bench/layouts.py --cells cp=2,ring cp=2,ulysses --seq-len 131072 --recompute
    python scripts/bench/layouts.py --cells one ep=2 --config train_configs/qwen3_30b_a3b.toml
    python scripts/bench/layouts.py --cells tp=2 cp=2,ring --profile
    python scripts/bench/layouts.py --device cpu --tiny --cells one tp=2

A cell is `one` (one process), or axes and their degrees, comma-separated: dp_replicate, dp_shard, cp, tp, pp,
ep (which borrows its ranks from the others); `ring` or `ulysses` after cp, `compiled` for compiled blocks,
`async` beside it for collectives of tp in pieces beside their products,
`fused` for updates inside backward (compare losses with `--set training.max_norm=0`: fused clips otherwise).
Each runs `train.py` under torchrun with the same seed and global batch: real text, logging, clipping, the
whole step; weights, gradients and states in bf16. Losses are compared with those of the first cell.
Tokens/s are of all ranks together, the median of the logged steps but the first ones. With --profile rank 0
records the last two steps, which no median counts, nor the one before: what bounds a cell.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.harness import free_port, machine_facts, markdown_table, write_report
from scripts.bench.trace_summary import lines_of, summarize_trace

ROOT = Path(__file__).resolve().parents[2]
AXES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}
CELLS = ["one", "dp_replicate=2", "dp_shard=2", "tp=2", "cp=2,ring", "cp=2,ulysses", "pp=2"]
PROFILED = 3
"""Steps beyond the others with --profile: one to start the profiler, two that it records."""
TINY = {
    "model.dim": 64, "model.n_layers": 4, "model.n_heads": 4, "model.n_kv_heads": 2, "model.head_dim": 16,
    "model.hidden_dim": 96, "model.vocab_size": 512,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "train_configs" / "qwen3_8b.toml")
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy shape, to prove the script on any machine")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=4, help="first steps that no median counts")
    parser.add_argument("--recompute", action="store_true", help="every block recomputed in backward")
    parser.add_argument("--layers", type=int, default=0, help="blocks in place of the config's; 0: all")
    parser.add_argument("--cell-timeout", type=float, default=150.0, help="seconds for one cell")
    parser.add_argument("--profile", action="store_true", help="record two more steps on rank 0 of each cell")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the job")
    parser.add_argument("--out", type=Path, default=Path("outputs/layouts"))
    args = parser.parse_args(argv)
    cells = {cell: parse(cell) for cell in args.cells}
    outcomes = []
    for number, (cell, layout) in enumerate(cells.items()):
        outcome = run_cell(cell, layout, args, args.out / f"{number:02d}")
        outcomes.append(outcome)
        print(f"[{cell}] " + (outcome.get("error") or line_of(outcome)), flush=True)
        for line in lines_of(outcome["profile"]) if "profile" in outcome else []:
            print(line, flush=True)
    reference = next((outcome["losses"] for outcome in outcomes if "losses" in outcome), [])
    header = ["layout", "ranks", "tokens/s", "peak GiB a rank", "last loss", "largest difference of loss"]
    rows = [
        [
            outcome["name"],
            outcome["ranks"],
            outcome.get("tokens_per_second"),
            outcome.get("peak_gib"),
            f"{outcome['losses'][-1]:.4f}" if "losses" in outcome else outcome["error"][:120],
            difference(outcome.get("losses", []), reference),
        ]
        for outcome in outcomes
    ]
    report = {"machine": machine_facts(), "cells": outcomes}
    write_report(args.out, "layouts", report, markdown_table(header, rows))
    return 1 if any("error" in outcome for outcome in outcomes) else 0


def parse(cell: str) -> dict[str, Any]:
    """Degrees by axis, and the words beside them; SystemExit naming a word that is neither."""
    layout: dict[str, Any] = {}
    for word in cell.split(","):
        axis, _, degree = word.partition("=")
        if axis in AXES and degree.isdecimal():
            layout[axis] = int(degree)
        elif word in ("one", "ring", "ulysses", "compiled", "async", "fused"):
            layout[word] = True
        else:
            raise SystemExit(f"--cells {cell}: {word!r} is neither an axis of {', '.join(AXES)} nor a word")
    return layout


def run_cell(cell: str, layout: dict[str, Any], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the job, wait, read its metrics.jsonl: the cell's figures, or `error`."""
    degrees = {axis: layout.get(axis, 1) for axis in AXES}
    ranks = math.prod(degree for axis, degree in degrees.items() if axis != "ep")
    if ranks < degrees["ep"]:
        degrees["dp_shard"] = ranks = degrees["ep"]
    readers = degrees["dp_replicate"] * degrees["dp_shard"]
    settings: dict[str, Any] = {
        "job.dump_folder": folder,
        "training.steps": args.steps + PROFILED * args.profile,
        "lr_scheduler.warmup_steps": 2,
        "training.seq_len": args.seq_len,
        "training.global_batch_size": args.batch,
        "training.local_batch_size": max(1, args.batch // readers),
        "training.dtype": "bfloat16",
        "optimizer.state_dtype": "bfloat16",
        "metrics.log_freq": 1,
        "metrics.enable_wandb": "false",
        "checkpoint.enable": "false",
        "validation.enable": "false",
        "compile.enable": "true" if "compiled" in layout else "false",
        "parallelism.enable_async_tensor_parallel": "true" if "async" in layout else "false",
        "activation_checkpoint.mode": "full" if args.recompute else "none",
        **{f"parallelism.{key}": degrees[axis] for axis, key in AXES.items()},
    }
    if "ring" in layout or "ulysses" in layout:
        settings["parallelism.context_parallel_method"] = "ring" if "ring" in layout else "ulysses"
    if "fused" in layout:
        settings |= {"forge.enable": "true", "forge.clip": "lagged"}
    if args.profile:
        settings |= {
            "profiling.enable_profiling": "true",
            "profiling.profile_freq": args.steps + PROFILED,
            "profiling.profiler_warmup": 1,
            "profiling.profiler_active": PROFILED - 1,
        }
    if args.layers:
        settings["model.n_layers"] = args.layers
    settings |= TINY if args.tiny else {}
    settings |= dict(word.split("=", 1) for word in args.set)
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    launcher += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-backend", "c10d"]
    command = [*launcher, str(ROOT / "train.py"), "--job.config_file", str(args.config), *words]
    environment = dict(os.environ)
    if args.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome: dict[str, Any] = {"name": cell, "ranks": ranks, "command": " ".join(map(str, command))}
    start = time.perf_counter()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout=args.cell_timeout)
        except subprocess.TimeoutExpired:
            # The ranks too, or the next cell shares the GPUs with them.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    outcome["seconds"] = time.perf_counter() - start
    rows = []
    if (folder / "metrics.jsonl").exists():
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row and "validation_loss" not in row]
    if code != 0 or len(steps) <= args.skip:
        reason = "timed out" if code is None else f"exit code {code}"
        told = (folder / "log.txt").read_text(errors="replace").splitlines()
        named = [line.strip() for line in told if "Error: " in line or line.startswith("error")]
        return outcome | {"error": f"{reason}; {(named or told or ['no output'])[0][:300]}"}
    if args.profile:
        trace = folder / "profile_traces" / f"step_{args.steps + PROFILED}" / "rank0_trace.json"
        outcome["profile"] = summarize_trace(trace)
        trace.unlink()  # hundreds of MB
        steps = steps[: args.steps]
    return outcome | {
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steps[args.skip :]),
        "peak_gib": max((row["peak_memory_gib"] or 0.0) for row in steps),
        "losses": [row["loss"] for row in steps],
    }


def difference(losses: list[float], reference: list[float]) -> str | None:
    if not losses:
        return None
    return f"{max(abs(a - b) for a, b in zip(losses, reference)):.1e}"


def line_of(outcome: dict[str, Any]) -> str:
    return (
        f"{outcome['tokens_per_second']:.0f} tokens/s  {outcome['peak_gib']:.2f} GiB a rank  "
        f"loss {outcome['losses'][0]:.4f} -> {outcome['losses'][-1]:.4f}  ({outcome['seconds']:.0f} s)"
    )


if __name__ == "__main__":
    sys.exit(main())
