"""What a timed arm did on the card: how much of a step it was busy, with what, and in which kernel forms."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

MOST_KERNELS = 60


def busy_time(step: Callable[[], object], steps: int) -> dict[str, Any]:
    """Milliseconds of a step in which the card ran something, and the kernels that took most of them.

    From `steps` further steps under torch.profiler. Intervals that overlap count once. The profiler slows the
    host and hardly the card: divide by the time of steps without it. Empty without a GPU.
    """
    if not torch.cuda.is_available():
        return {}
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    step()  # the profiler's own start falls outside
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    intervals: list[tuple[float, float]] = []
    by_name: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        if event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        intervals.append((event.time_range.start, event.time_range.end))
        by_name[event.name] += event.time_range.elapsed_us() / 1e3 / steps
        calls[event.name] += 1 / steps
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:MOST_KERNELS]
    return {
        "busy_ms": union_length(intervals) / 1e3 / steps,
        "launches": len(intervals) / steps,
        "kernels_ms": {name[:120]: round(ms, 3) for name, ms in longest},
        "kernels_calls": {name[:120]: round(calls[name], 1) for name, _ in longest},
    }


def union_length(intervals: list[tuple[float, float]]) -> float:
    """How much of a line the intervals (start, end) cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


@contextlib.contextmanager
def recorded_forms() -> Iterator[list[dict[str, Any]]]:
    """Fills a list with the tile configurations that fused updates chose in the block, each shape's once.

    Where a captured step replays launches, they were chosen while it was captured.
    """
    from titanforge.kernels import wgrad

    choose = wgrad.config_for
    seen: dict[tuple[int, int, int], Any] = {}

    def choose_and_note(dy: torch.Tensor, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        config = choose(dy, x, *args, **options)
        seen[(dy.shape[1], x.shape[1], dy.shape[0])] = config
        return config

    found: list[dict[str, Any]] = []
    wgrad.config_for = choose_and_note
    try:
        yield found
    finally:
        wgrad.config_for = choose
        found += [{"n": n, "k": k, "tokens": t, **asdict(seen[n, k, t])} for n, k, t in sorted(seen)]
