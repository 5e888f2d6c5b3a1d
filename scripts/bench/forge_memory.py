"""Show from the allocator's own records that no gradient of any weight exists during backward, and weigh the
step.

    python scripts/bench/forge_memory.py                            # Llama-3.1-8B's shape on the GPU
    python scripts/bench/forge_memory.py --tiny                     # a toy on the GPU, in seconds
    python scripts/bench/forge_memory.py --methods native forge     # with the ordinary engine as the control

One process per method. Peak is `torch.cuda.max_memory_allocated` at `--seq-len` tokens, of whole steps after
the first two. Then one backward runs at `--proof-len` tokens with the allocator's history on, and every
allocation of the size of a matrix (numel x 2 or x 4 bytes, rounded up to 512) is listed with the code that
asked for it. That length is chosen so that no activation has such a size; the script checks that and stops if
one has. The control must show one allocation for each matrix, or the method proves nothing."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.harness import (
    GIB,
    Cell,
    add_common_arguments,
    machine_facts,
    markdown_table,
    run_cells,
    write_report,
    write_result,
)
from scripts.bench.synthetic import token_pool

METHODS = ("native", "forge", "forge-int8")
TARGETS_GIB = {"forge": 46.5, "forge-int8": 33.0}
_UNIT = 512  # the allocator's


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.set_defaults(seq_len=512, warmup=2, steps=4, lr=1e-5, max_norm=0.0)
    parser.add_argument("--proof-len", type=int, default=500, help="tokens of the recorded backward")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--compile-mode", choices=("none", "blocks"), default="blocks")
    parser.add_argument("--ac", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--cell", choices=METHODS, default=None, help=argparse.SUPPRESS)
    return parser


def run_method(args: argparse.Namespace) -> dict[str, Any]:
    """One method, in this process."""
    from scripts.bench.ours import TrainStep, build_llama, build_update

    longest = max(args.seq_len, args.proof_len)
    model: Any = build_llama(
        tiny=args.tiny,
        seq_len=longest,
        device=args.device,
        ac=args.ac,
        compile_mode=args.compile_mode,
        fused=args.cell.startswith("forge"),
    )
    update: Any = build_update(args.cell, model, lr=args.lr, max_norm=0.0)
    step = TrainStep(model, update)
    pool = token_pool(model.args.vocab_size, args.batch, args.seq_len, device=args.device)
    losses = [float(step(*pool[0])) for _ in range(args.warmup)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step_ms = []
    for _ in range(args.steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = step(*pool[0])
        end.record()
        torch.cuda.synchronize()
        step_ms.append(begin.elapsed_time(end))
        losses.append(float(loss))
    peaks = {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }
    found = _recorded_backward(args, model, step)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = sum(s.numel() * s.element_size() for s in update.state_tensors())
    return write_result(
        args,
        arm=args.cell,
        step_ms=step_ms,
        tokens_per_step=args.batch * args.seq_len,
        peaks=peaks,
        losses=losses,
        extra={
            "weights_gib": weights / GIB,
            "states_gib": states / GIB,
            "above_weights_and_states_gib": peaks["peak_gib"] - (weights + states) / GIB,
            **found,
        },
    )


def _recorded_backward(args: argparse.Namespace, model: Any, step: Any) -> dict[str, Any]:
    """Allocations of one backward whose size is that of a matrix."""
    sizes = _matrix_sizes(model)
    _refuse_collisions(sizes, model, args.batch * args.proof_len)
    tokens, labels = token_pool(model.args.vocab_size, args.batch, args.proof_len, device=args.device)[0]
    events: list[Any] = []
    for recorded in (False, True):  # the first compiles for this length and settles the tile choice
        step.update.prepare()
        step.update.zero_grad()
        loss = model(tokens, None, None, labels) / labels.numel()
        step.update.before_backward(loss.detach())
        torch.cuda.synchronize()
        if recorded:
            torch.cuda.memory._record_memory_history(max_entries=2_000_000, context="alloc", stacks="python")
        loss.backward()
        torch.cuda.synchronize()
        if recorded:
            snapshot: Any = torch.cuda.memory._snapshot()
            events = [event for trace in snapshot["device_traces"] for event in trace]
            torch.cuda.memory._record_memory_history(enabled=None)
        step.update.step()
    trace = [event for event in events if event["action"] == "alloc"]
    if not trace:
        raise RuntimeError("the allocator recorded nothing: is another allocator in use?")
    hits = [event for event in trace if _rounded(event["size"]) in sizes]
    asked_by = Counter(f"{sizes[_rounded(e['size'])]} <- {_origin(e)}" for e in hits)
    matrices = sum(1 for p in model.parameters() if p.dim() >= 2)
    return {
        "allocations_in_backward": len(trace),
        "largest_allocation_mib": max(event["size"] for event in trace) / 2**20,
        "of_matrix_size": len(hits),
        "matrices": matrices,
        "asked_by": dict(asked_by.most_common(20)),
    }


def _matrix_sizes(model: Any) -> dict[int, str]:
    """Bytes of a gradient in bf16 or fp32 → which matrices have it."""
    sizes: dict[int, str] = {}
    for name, param in model.named_parameters():
        if param.dim() < 2:
            continue
        for width in (2, 4):
            sizes.setdefault(_rounded(param.numel() * width), f"{name.split('.', 2)[-1]} x {width} bytes")
    return sizes


def _refuse_collisions(sizes: dict[int, str], model: Any, tokens: int) -> None:
    args = model.args
    heads = (args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim)
    widths = {args.dim, args.ffn_dim, args.vocab_size, *heads}
    for width in widths | {2 * args.ffn_dim, 2 * args.dim}:
        for size in (tokens * width * 2, tokens * width * 4):
            if _rounded(size) in sizes:
                raise SystemExit(
                    f"an activation [{tokens}, {width}] has the size of {sizes[_rounded(size)]}: choose "
                    "another --proof-len"
                )


def _rounded(size: int) -> int:
    return -(-size // _UNIT) * _UNIT


def _origin(event: dict[str, Any]) -> str:
    """The innermost frame of ours, else the innermost of all."""
    frames = [f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in event.get("frames", [])]
    ours = [frame for frame, f in zip(frames, event.get("frames", [])) if "titanforge" in f["filename"]]
    return (ours or frames or ["unknown"])[0]


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    if args.device != "cuda" or not torch.cuda.is_available():
        raise SystemExit("the records are the CUDA allocator's: this script needs a GPU")
    if args.cell is not None:
        run_method(args)
        return 0
    cells = [Cell(name, [sys.executable, __file__, "--cell", name, *argv]) for name in args.methods]
    outcomes = run_cells(cells, args.out, timeout=280, budget=560)
    header = [
        "method",
        "peak GiB",
        "weights",
        "states",
        "rest",
        "matrices",
        "allocations of their size",
        "verdict",
    ]
    rows = []
    passed = True
    for outcome in outcomes:
        verdict = _verdict(outcome, args.tiny)
        passed &= not verdict.startswith("NOT")
        keys = (
            "peak_gib",
            "weights_gib",
            "states_gib",
            "above_weights_and_states_gib",
            "matrices",
            "of_matrix_size",
        )
        rows.append([outcome["name"], *(outcome.get(key) for key in keys), verdict])
    details = "\n".join(
        f"{o['name']}: {count} x {what}" for o in outcomes for what, count in o.get("asked_by", {}).items()
    )
    table = markdown_table(header, rows)
    write_report(
        args.out, "forge_memory", {"machine": machine_facts(), "cells": outcomes}, f"{table}\n\n{details}"
    )
    return 0 if passed else 1


def _verdict(outcome: dict[str, Any], tiny: bool) -> str:
    if "error" in outcome:
        return "NOT run"
    if outcome["name"] == "native":
        seen = outcome["of_matrix_size"] >= outcome["matrices"]
        return "control: gradients are seen" if seen else "NOT a control: gradients are not seen"
    if outcome["of_matrix_size"]:
        return "NOT free of gradients"
    target = TARGETS_GIB[outcome["name"]]
    if not tiny and outcome["peak_gib"] > target:
        return f"NOT within {target} GiB"
    return "no gradient" + ("" if tiny else f", within {target} GiB")


if __name__ == "__main__":
    sys.exit(main())
