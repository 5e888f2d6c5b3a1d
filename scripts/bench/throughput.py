"""Tokens per second and MFU of Llama-3.1-8B training on one GPU, beside torchtitan where it is installed.

    python scripts/bench/throughput.py                                        # ours, no checkpointing
    python scripts/bench/throughput.py --arms ours:none:native torchtitan:none:sdpa --rounds 2
    python scripts/bench/throughput.py --device cpu --tiny --arms ours:none:native

bf16 weights, gradients and states, sequence 8192, batch 1, compiled blocks, global-norm clipping. An arm is
`ours:<checkpointing>:<update>` (update: native, torch-fused, torch-foreach; append `:graph` to capture
the whole step in a CUDA graph) or `torchtitan:<checkpointing>:<attention>` (append `:fsdp` for its own
parallelize function, `:nograph` to switch its CUDA graphs off). One process per arm; with `--rounds 2`
the arms run A B A B, so that a drift of the card's clock does not fall on one of them. MFU of every arm is
counted by our model's operations per token over the card's dense bf16 peak, so that the figures compare.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.harness import (
    GIB,
    Cell,
    StepClock,
    add_common_arguments,
    machine_facts,
    markdown_table,
    peak_memory,
    run_cells,
    write_report,
    write_result,
)
from scripts.bench.synthetic import token_pool

CHECKPOINTING = ("none", "selective", "full")
ATTENTION = ("flex", "varlen", "sdpa")
UPDATES = ("native", "torch-fused", "torch-foreach")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.set_defaults(warmup=5, steps=12, lr=1e-4)
    parser.add_argument("--arms", nargs="+", default=["ours:none:native"], metavar="ARM")
    parser.add_argument("--rounds", type=int, default=1, help="how often to go through the arms")
    parser.add_argument("--no-compile", action="store_true", help="for both sides")
    parser.add_argument("--cell-timeout", type=float, default=300.0, help="seconds for one arm")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all")
    parser.add_argument("--cell", default=None, help=argparse.SUPPRESS)
    return parser


def command_of(arm: str, options: Sequence[str]) -> list[str]:
    """The command line that runs one arm; `options` are those that every arm understands.

    Raises ValueError naming the arm and the words it may use.
    """
    side, *words = arm.split(":")
    here = Path(__file__).resolve().parent
    second = {"ours": UPDATES, "torchtitan": ATTENTION}.get(side)
    extras = {"ours": ("graph",), "torchtitan": ("fsdp", "nograph")}.get(side, ())
    if second is None or len(words) < 2 or words[0] not in CHECKPOINTING or words[1] not in second:
        raise ValueError(
            f"arm {arm!r}: write ours:CHECKPOINTING:UPDATE or torchtitan:CHECKPOINTING:ATTENTION, "
            f"CHECKPOINTING of {', '.join(CHECKPOINTING)}; UPDATE of {', '.join(UPDATES)}; "
            f"ATTENTION of {', '.join(ATTENTION)}"
        )
    if unknown := [word for word in words[2:] if word not in extras]:
        raise ValueError(
            f"arm {arm!r}: unknown {unknown[0]!r}; after the second colon only {', '.join(extras)}"
        )
    if side == "ours":
        return [sys.executable, str(here / "throughput.py"), "--cell", arm, *options]
    flags = {"fsdp": "--fsdp", "nograph": "--no-cuda-graphs"}
    return [
        sys.executable,
        str(here / "peer_torchtitan.py"),
        *("--ac", words[0], "--attention", words[1]),
        *(flags[word] for word in words[2:]),
        *options,
    ]


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    """Our arm, in this process."""
    from scripts.bench.ours import GraphedStep, TrainStep, build_llama, build_update, timed_parts
    from titanforge.metrics.memory import local_bytes

    _, checkpointing, kind, *extras = args.cell.split(":")
    on_gpu = args.device == "cuda"
    graphed = "graph" in extras and on_gpu
    model: Any = build_llama(
        tiny=args.tiny,
        seq_len=args.seq_len,
        device=args.device,
        ac=checkpointing,
        compile_mode="none" if args.no_compile else "blocks",
    )
    update = build_update(kind, model, lr=args.lr, max_norm=args.max_norm, capturable=graphed)
    pool = token_pool(model.args.vocab_size, args.batch, args.seq_len, device=args.device)
    plain = TrainStep(model, update)
    step: Any = GraphedStep(plain, *pool[0]) if graphed else plain
    first_loss = step(*pool[0]).clone()
    number = 0

    def once() -> None:
        nonlocal number
        step(*pool[number % len(pool)])
        number += 1

    step_ms = StepClock(args.device).run(once, warmup=args.warmup, steps=args.steps)
    peaks = peak_memory(args.device)
    weights = local_bytes(model.parameters(), args.device)
    states = local_bytes(update.state_tensors(), args.device)
    pools = {"weights_gib": weights / GIB, "states_gib": states / GIB, "gradients_gib": weights / GIB}
    if on_gpu:
        pools["rest_of_peak_gib"] = peaks["peak_gib"] - sum(pools.values())
    last_loss = step(*pool[0]).clone()
    parts = {} if graphed else timed_parts(plain, pool, repeats=3, device=args.device)
    return write_result(
        args,
        arm=args.cell,
        step_ms=step_ms,
        tokens_per_step=args.batch * args.seq_len,
        peaks=peaks,
        losses=[float(first_loss), float(last_loss)],
        extra={**pools, **parts, "ac": checkpointing, "update": kind, "cuda_graphs": graphed},
    )


def _model_rate(args: argparse.Namespace, outcomes: list[dict[str, Any]], card: str | None) -> None:
    """Add `tflops` and `mfu_percent` to every outcome, counted one way for all."""
    from titanforge.metrics.flops import peak_flops
    from titanforge.models.registry import build_model

    with torch.device("meta"):
        model: Any = build_model("llama3", "8B", seq_len=args.seq_len)[0]
    per_token = model.flops_per_token(args.seq_len)
    peak = peak_flops(card) if card else None
    for outcome in outcomes:
        if "error" not in outcome:
            rate = outcome["tokens_per_second"] * per_token
            outcome |= {"tflops": rate / 1e12, "mfu_percent": 100 * rate / peak if peak else None}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: use --device cpu --tiny to prove the script")
    if args.cell is not None:
        run_ours(args)
        return 0
    options = [
        *("--device", args.device, "--batch", str(args.batch), "--seq-len", str(args.seq_len)),
        *("--warmup", str(args.warmup), "--steps", str(args.steps), "--lr", str(args.lr)),
        *("--max-norm", str(args.max_norm), "--out", str(args.out)),
        *(["--tiny"] if args.tiny else []),
        *(["--no-compile"] if args.no_compile else []),
    ]
    cells = [Cell(arm, command_of(arm, options)) for _ in range(args.rounds) for arm in args.arms]
    outcomes = run_cells(cells, args.out, timeout=args.cell_timeout, budget=args.budget)
    facts = machine_facts()
    cards = facts.get("card") or []
    if not args.tiny:
        _model_rate(args, outcomes, cards[0]["name"] if cards else None)
    keys = (
        "tokens_per_second",
        "median_ms",
        "tflops",
        "mfu_percent",
        "peak_gib",
        "weights_gib",
        "states_gib",
        "gradients_gib",
        "rest_of_peak_gib",
        "forward_backward_ms",
        "update_ms",
    )
    rows = [
        [
            o["name"],
            *(o.get(key) for key in keys),
            "failed" if "error" in o else ("yes" if o["trained"] else "NO"),
        ]
        for o in outcomes
    ]
    header = ["arm", "tokens/s", "median ms", "TFLOP/s", "MFU %", "peak GiB"]
    header += ["weights", "states", "gradients", "rest", "fwd+bwd ms", "update ms", "trained"]
    table = markdown_table(header, rows) + "\n\n" + _ratio(outcomes)
    write_report(args.out, "throughput", {"machine": facts, "cells": outcomes}, table.strip())
    return 0 if all(outcome.get("trained") for outcome in outcomes) else 1


def _ratio(outcomes: list[dict[str, Any]]) -> str:
    """Best arm of each side, by the median over its rounds."""
    best: dict[str, tuple[float, str]] = {}
    for side in ("ours", "torchtitan"):
        rates: dict[str, list[float]] = {}
        for outcome in outcomes:
            if outcome["name"].startswith(side) and outcome.get("trained"):
                rates.setdefault(outcome["name"], []).append(outcome["tokens_per_second"])
        if rates:
            best[side] = max((statistics.median(values), name) for name, values in rates.items())
    if len(best) < 2:
        return ""
    (ours, ours_name), (theirs, theirs_name) = best["ours"], best["torchtitan"]
    return f"{ours_name} {ours:.0f} tokens/s against {theirs_name} {theirs:.0f}: {ours / theirs:.3f}x."


if __name__ == "__main__":
    sys.exit(main())
