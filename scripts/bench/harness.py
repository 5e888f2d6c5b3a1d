"""What the benchmark scripts share: the clock, one process per cell, machine facts, reports.

A *cell* is one method on one shape. It runs in a process of its own, so that neither the allocator's cache
nor compiled code nor a failure of one method reaches another; the parent process never touches the device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

GIB = 1024**3


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that every cell of every benchmark understands."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy shape, to prove the script on any machine")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens per sequence")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--max-norm", type=float, default=1.0, help="global-norm clipping; 0: none")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/bench"), help="folder for everything written"
    )
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)


class StepClock:
    """Times steps by device events (CUDA) or by the host clock (CPU), without waiting inside the run.

    Events are recorded between steps on the current stream and read at the end, so the host may run ahead
    of the device as it does in training: a host-bound step shows its host time, a device-bound one its
    device time.
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def run(self, step: Callable[[], object], *, warmup: int, steps: int) -> list[float]:
        """Milliseconds of each of `steps` steps after `warmup` untimed ones."""
        for _ in range(warmup):
            step()
        if not self.on_gpu:
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                step()
                times.append((time.perf_counter() - start) * 1e3)
            return times
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def peak_memory(device: str) -> dict[str, float]:
    """Peak GiB of the process so far by the CUDA allocator, everything included; empty on CPU."""
    if device != "cuda":
        return {}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def write_result(
    args: argparse.Namespace,
    *,
    arm: str,
    step_ms: Sequence[float],
    tokens_per_step: int,
    peaks: dict[str, float],
    losses: Sequence[float],
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Print one cell's result as a JSON line and, for a parent process, write it to `--result`.

    `losses` are mean token losses, the first from before training: `trained` says that all are finite and
    the last is lower, so that a method which does nothing cannot pass for a fast one.
    """
    median = statistics.median(step_ms)
    result = {
        "arm": arm,
        "median_ms": median,
        "min_ms": min(step_ms),
        "max_ms": max(step_ms),
        "timed_steps": len(step_ms),
        "warmup_steps": args.warmup,
        "tokens_per_step": tokens_per_step,
        "tokens_per_second": tokens_per_step / median * 1e3,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "trained": all(map(math.isfinite, losses)) and losses[-1] < losses[0],
        **peaks,
        **extra,
        "step_ms": list(step_ms),
    }
    if args.result is not None:
        args.result.write_text(json.dumps(result))
    print(json.dumps({key: value for key, value in result.items() if key != "step_ms"}), flush=True)
    return result


@dataclass
class Cell:
    """One process to run: its name in the tables, and its command line."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def run_cell(cell: Cell, out: Path, *, index: int, timeout: float) -> dict[str, Any]:
    """Run the cell: its result, or `{"error": …}` with the end of its output if it failed."""
    stem = f"{index:02d}-{cell.name.replace('/', '-').replace(' ', '-')}"
    result_file, log_file = (out / "cells" / f"{stem}{end}" for end in (".json", ".log"))
    result_file.parent.mkdir(parents=True, exist_ok=True)
    result_file.unlink(missing_ok=True)
    start = time.perf_counter()
    with log_file.open("w") as log:
        try:
            code = subprocess.run(
                [*cell.command, "--result", str(result_file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **cell.environment},
                timeout=timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    seconds = time.perf_counter() - start
    outcome: dict[str, Any] = {"name": cell.name, "seconds": seconds, "command": shlex.join(cell.command)}
    if code == 0 and result_file.exists():
        outcome |= json.loads(result_file.read_text())
    else:
        tail = log_file.read_text(errors="replace")[-1500:]
        reason = f"no result within {timeout:.0f} s" if code == -1 else f"exit code {code}"
        outcome["error"] = f"{reason}\n{tail}"
    return outcome


def run_cells(cells: Sequence[Cell], out: Path, *, timeout: float, budget: float) -> list[dict[str, Any]]:
    """Run the cells one after another, telling each as it ends.

    Args:
        timeout: seconds that one cell may take.
        budget: seconds that all may take; cells that no longer fit are reported as not run.
    """
    start = time.perf_counter()
    outcomes = []
    for index, cell in enumerate(cells):
        left = budget - (time.perf_counter() - start)
        if left < 30:
            outcome: dict[str, Any] = {"name": cell.name, "error": "not run: out of time"}
        else:
            outcome = run_cell(cell, out, index=index, timeout=min(timeout, left))
        outcomes.append(outcome)
        if "error" in outcome:
            print(f"[{cell.name}] FAILED: {outcome['error'][-600:]}", flush=True)
        else:
            peak = outcome.get("peak_gib")
            print(
                f"[{cell.name}] {outcome['median_ms']:.2f} ms  {outcome['tokens_per_second']:.0f} tokens/s"
                + (f"  {peak:.2f} GiB" if peak is not None else "")
                + f"  ({outcome['seconds']:.0f} s)",
                flush=True,
            )
    return outcomes


def machine_facts() -> dict[str, Any]:
    """Versions, the card as found, and the command line: what a figure needs to be compared later."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = None
    fields = (
        "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,"
        "power.draw,power.limit,temperature.gpu"
    )
    try:
        query = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        if query.returncode == 0:
            facts["card"] = [
                dict(zip(fields.split(","), map(str.strip, line.split(","))))
                for line in query.stdout.strip().splitlines()
            ]
    except (OSError, subprocess.TimeoutExpired):
        facts["card"] = None
    return facts


def write_report(out: Path, name: str, report: dict[str, Any], table: str) -> None:
    """`<name>.json` with every number and `<name>.md` with the table and the facts."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1))
    facts = "\n".join(f"- {key}: {value}" for key, value in report["machine"].items())
    (out / f"{name}.md").write_text(f"# {name}\n\n{table}\n\n{facts}\n")
    print(f"\n{table}\n\nwritten: {out / name}.json, .md", flush=True)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats to two digits, None as a dash."""

    def text(value: object) -> str:
        if value is None:
            return "–"
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(text(value) for value in line) + " |" for line in lines)


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
