"""Host time and collectives of one block on an axis, apart from what a device computes: on CPUs, in seconds.

    python scripts/bench/host_time.py                                # one process, tp, both context methods
    python scripts/bench/host_time.py --axes tp --compile --recompute none

One process is rank 0 of several, with torch's fake process group: collectives return at once, and send
nothing. Blocks of few numbers cost what Python, dispatch and autograd cost, and that is what launches cost
the host beside a GPU too. Forward and backward of two depths of a narrow Qwen3 are timed on the clock of the
thread, which stands while other processes run; the difference is the cost of one block. Operators and
collectives are those that reach plain tensors, counted in a step of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.bench.harness import markdown_table
from titanforge.models.initialization import initialize_weights
from titanforge.models.registry import build_model
from titanforge.parallelisms import (
    apply_activation_checkpoint,
    apply_compile,
    apply_context_parallel,
    apply_tensor_parallel,
    complete_gradients,
)

AXES = ["one", "tp", "ring", "ulysses"]
SIZES = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 96, "vocab_size": 256}
TOKENS = (2, 32)
COLLECTIVE = ("c10d", "_c10d_functional", "titanforge")


class Counted(TorchDispatchMode):
    """Operators on plain tensors, those on DTensors, and collectives with dtype and bytes handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.operators["DTensor"] += 1
            return NotImplemented
        self.operators["plain"] += 1
        if func.namespace in COLLECTIVE and not func._opname.startswith("wait"):
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            if tensors:
                dtype = str(tensors[0].dtype).removeprefix("torch.")
                self.sent[f"{func._opname} {dtype} {tensors[0].nbytes} B"] += 1
        return func(*args, **(kwargs or {}))


def measure(axis: str, ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return [of_depth(axis, layers, ranks, args) for layers in args.layers]
    finally:
        dist.destroy_process_group()


def of_depth(axis: str, layers: int, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Thread seconds of forward and backward, and counts, of a model of so many blocks."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        sizes = {**SIZES, "n_layers": layers}
        model, _ = build_model("qwen3", "debugmodel", seq_len=TOKENS[1], overrides=sizes)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
    if axis == "tp":
        apply_tensor_parallel(model, mesh)
    elif axis != "one":
        apply_context_parallel(model, mesh, axis)
    apply_activation_checkpoint(model, args.recompute)
    if args.compile:
        apply_compile(model, args.backend, recompute_outside=axis == "tp")
    model.to_empty(device="cpu")
    initialize_weights(model, 0)
    if axis == "tp":
        complete_gradients(model)
    tokens = torch.randint(0, SIZES["vocab_size"], TOKENS, generator=torch.Generator().manual_seed(0))

    def forward() -> torch.Tensor:
        return model(tokens, None, None, tokens)

    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(args.steps):
        model.zero_grad()
        start = time.thread_time()
        loss = forward()
        middle = time.thread_time()
        loss.backward()
        seconds["forward"].append(middle - start)
        seconds["backward"].append(time.thread_time() - middle)
    counted = Counted()
    if not args.compile:  # compiled code runs under no mode of this kind
        with counted:
            forward().backward()
    best = {name: statistics.median(sorted(times)[: len(times) // 2 + 1]) for name, times in seconds.items()}
    return {**best, "operators": counted.operators, "sent": counted.sent}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs=2, default=[2, 10], help="the two depths")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--recompute", default="selective", help="activation_checkpoint.mode")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for axis in args.axes:
        ranks = 1 if axis == "one" else args.ranks
        shallow, deep = measure(axis, ranks, args)
        blocks = args.layers[1] - args.layers[0]
        times = [(deep[name] - shallow[name]) / blocks * 1e3 for name in ("forward", "backward")]
        counts = {
            name: (deep["operators"][name] - shallow["operators"][name]) / blocks
            for name in ("plain", "DTensor")
        }
        sent = {name: (deep["sent"][name] - shallow["sent"][name]) / blocks for name in sorted(deep["sent"])}
        rows.append([axis, *times, sum(times), *counts.values()])
        print(f"[{axis}]", *(f"{count:g} x {name};" for name, count in sent.items() if count), flush=True)
    header = ["axis", "forward ms a block", "backward ms", "both ms", "plain operators", "on DTensors"]
    print(markdown_table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
