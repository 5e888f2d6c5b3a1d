"""What a torch.profiler trace of whole steps says bounds them: kernels, collectives, or the host."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WAITS = ("Synchronize", "cudaEventQuery")


def summarize_trace(path: Path, top: int = 15) -> dict[str, Any]:
    """Figures of a chrome trace, times in ms a step.

    step_ms: wall time. busy: share of it in which the device ran a kernel or copy. nccl: share of it in which
    one of NCCL ran; nccl_alone: in which nothing else did. host_ms: of the steps' own threads, inside
    operators and calls of CUDA, less what waited for the device. top: name, ms and calls of what takes most
    time: kernels, or operators where there was no device (which count what they call).
    """
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")]
    if not steps:
        raise ValueError(f"{path}: no ProfilerStep in it: not a trace of steps")
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    number, wall = len(steps), end - begin

    def covered(chosen: Iterable[dict[str, Any]]) -> float:
        """Length of the union of events within the steps."""
        total, until = 0.0, begin
        for event in sorted(chosen, key=lambda e: e["ts"]):
            stop = min(event["ts"] + event["dur"], end)
            total += max(0.0, stop - max(event["ts"], until))
            until = max(until, stop)
        return total

    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    nccl = [e for e in device if "nccl" in e["name"].lower()]
    others = [e for e in device if "nccl" not in e["name"].lower()]
    host = [e for e in events if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver")]
    waits = [e for e in host if any(word in e["name"] for word in WAITS)]
    busy = covered(device)
    times: dict[str, list[float]] = defaultdict(list)
    for event in device or [e for e in host if e["cat"] == "cpu_op"]:
        times[event["name"][:100]].append(event["dur"])
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:top]
    return {
        "step_ms": wall / number / 1e3,
        "busy": busy / wall,
        "nccl": covered(nccl) / wall,
        "nccl_alone": (busy - covered(others)) / wall,
        "host_ms": (covered(host) - covered(waits)) / number / 1e3,
        "kernels": len(device) / number,
        "top": [(name, sum(spent) / number / 1e3, len(spent) / number) for name, spent in longest],
    }


def lines_of(summary: dict[str, Any]) -> list[str]:
    """The summary to read."""
    head = (
        f"step {summary['step_ms']:.1f} ms, device busy {summary['busy']:.0%}, NCCL {summary['nccl']:.0%}"
        f" (alone {summary['nccl_alone']:.0%}), host {summary['host_ms']:.1f} ms,"
        f" {summary['kernels']:.0f} kernels"
    )
    return [head, *(f"  {ms:9.2f} ms {calls:7.0f} x  {name}" for name, ms, calls in summary["top"])]
