"""What a run says about itself: log lines and their sinks, memory, profiles, the summary plot."""

from titanforge.metrics.estimate import MemoryEstimate, activation_bytes, estimate_memory
from titanforge.metrics.flops import peak_flops
from titanforge.metrics.logger import MetricsLogger
from titanforge.metrics.memory import MemoryPools
from titanforge.metrics.profiling import Profiler
from titanforge.metrics.sinks.jsonl import read_metrics

__all__ = [
    "MemoryEstimate",
    "MemoryPools",
    "MetricsLogger",
    "Profiler",
    "activation_bytes",
    "estimate_memory",
    "peak_flops",
    "read_metrics",
]
