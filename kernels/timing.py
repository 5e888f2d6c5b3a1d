"""How long a GPU function takes: the median over replays of a CUDA graph, so that no host work is counted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def replay_time(functions: Sequence[Callable[[], object]], *, budget_ms: float = 90.0) -> float:
    """Median milliseconds of one call, over graph replays that cycle through `functions`.

    functions: the same work on different buffers, enough of them that a cache does not serve the next call.
    Each is called once before the capture. budget_ms: time that the measured replays may take together.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in functions:
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    calls = len(functions) * max(1, 8 // len(functions))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            functions[index % len(functions)]()

    def once() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    for _ in range(2):
        graph.replay()
    first = once()
    repeats = max(5, min(60, int(budget_ms / max(first, 1e-3))))
    return statistics.median(once() for _ in range(repeats)) / calls
