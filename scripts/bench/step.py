"""Time and weigh one training step of a real shape at few tokens: ours, torch's, and other people's.

    python scripts/bench/step.py                                # ours and torch's, Llama-3.1-8B, 512 tokens
    python scripts/bench/step.py --methods forge-graph adamw-fused-compiled --seq-len 512 2048 --ac none full
    python scripts/bench/step.py --methods peers --model qwen3-8b      # whichever peers are installed
    python scripts/bench/step.py --device cpu --tiny            # proves the script anywhere, in seconds

bf16 weights, gradients and states, batch 1, no clipping; no activation checkpointing unless `--ac` says so.
A step is zero_grad, forward, loss, backward, update. At 512 tokens an eager step is mostly Python and
launches, so each update runs eager, with compiled blocks, with the whole model compiled, and captured whole
in a CUDA graph; the peers of `peers.py` eager and with compiled blocks. One process for each cell of
model x tokens x checkpointing x method. Peak is `torch.cuda.max_memory_allocated` of the whole process,
warm-up included; of a captured step from the capture on, which needs more than the steps before. `busy` is
the share of a step in which the card ran anything, from three more steps under the profiler.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from scripts.bench.peers import PEERS, missing
from scripts.bench.synthetic import token_pool

if TYPE_CHECKING:
    from scripts.bench.ours import CompileMode

# method: (update, compile mode, captured in a CUDA graph)
METHODS: dict[str, tuple[str, CompileMode, bool]] = {
    "adamw-fused-eager": ("torch-fused", "none", False),
    "adamw-fused-compiled": ("torch-fused", "blocks", False),
    "adamw-fused-whole": ("torch-fused", "whole", False),
    "adamw-fused-graph": ("torch-fused", "blocks", True),
    "native-eager": ("native", "none", False),
    "native-compiled": ("native", "blocks", False),
    "native-graph": ("native", "blocks", True),
    "forge-eager": ("forge", "none", False),
    "forge-compiled": ("forge", "blocks", False),
    "forge-graph": ("forge", "blocks", True),
    "forge-int8-graph": ("forge-int8", "blocks", True),
    "forge-int8-compiled": ("forge-int8", "blocks", False),
}
OURS = tuple(METHODS)
for _peer in PEERS:
    METHODS[f"{_peer}-eager"] = (_peer, "none", False)
    METHODS[f"{_peer}-compiled"] = (_peer, "blocks", False)
ALL_PEERS = "peers"
RECOMPUTE = ("none", "selective", "full", "memory_budget")
MODELS = ("llama3-8b", "qwen3-8b")
BASELINE = "adamw-fused-compiled"  # whose median every arm's is also given as a share of
# Options of several words, of which a cell gets one.
AXES = ("--model", "--seq-len", "--ac", "--methods")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, conflict_handler="resolve"
    )
    add_common_arguments(parser)
    parser.set_defaults(warmup=8, steps=30, lr=1e-5, max_norm=0.0)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama3-8b"])
    parser.add_argument("--seq-len", nargs="+", type=int, default=[512], help="tokens per sequence, each")
    parser.add_argument("--ac", nargs="+", choices=RECOMPUTE, default=["none"], help="recomputation, each")
    parser.add_argument(
        "--methods", nargs="+", choices=[*METHODS, ALL_PEERS], default=list(OURS), metavar="METHOD",
        help=f"of {', '.join(METHODS)}; {ALL_PEERS}: all of the others' (default: torch's and ours)",
    )  # fmt: skip
    parser.add_argument(
        "--forge-kernel", default="auto", choices=("auto", "portable", "pp2", "coop"),
        help="form of the fused arms' kernel, as forge.kernel",
    )  # fmt: skip
    parser.add_argument(
        "--keep-logits", action="store_true", help="of the fused arms' head, as forge.keep_logits"
    )
    parser.add_argument(
        "--merge-projections", action=argparse.BooleanOptionalAction, default=True,
        help="of the fused arms, as forge.merge_projections",
    )  # fmt: skip
    parser.add_argument("--cell-timeout", type=float, default=240.0, help="seconds for one method")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all methods")
    parser.add_argument("--cell", choices=METHODS, default=None, help=argparse.SUPPRESS)
    return parser


def run_method(args: argparse.Namespace) -> dict[str, Any]:
    """One method, in this process."""
    from scripts.bench.observed import busy_time, recorded_forms
    from scripts.bench.ours import GraphedStep, TrainStep, build_shape, build_update, timed_parts
    from scripts.bench.peers import build_peer
    from titanforge.forge import Steps

    kind, compile_mode, graphed = METHODS[args.cell]
    (shape,), (seq_len,), (ac,) = args.model, args.seq_len, args.ac
    on_gpu = args.device == "cuda"
    model: Any = build_shape(
        shape,
        tiny=args.tiny,
        seq_len=seq_len,
        device=args.device,
        ac=ac,
        compile_mode=compile_mode,
        fused=kind.startswith("forge"),
    )
    if kind in PEERS:
        update: Any = build_peer(kind, model, args.lr)
    else:
        update = build_update(
            kind,
            model,
            lr=args.lr,
            max_norm=args.max_norm,
            capturable=graphed,
            forge_kernel=args.forge_kernel,
            steps=Steps(keep_logits=args.keep_logits, merge_projections=args.merge_projections),
        )
    pool = token_pool(model.args.vocab_size, args.batch, seq_len, device=args.device)
    plain = TrainStep(model, update)
    losses: list[torch.Tensor] = []
    step: Any = plain
    if graphed and on_gpu:
        step = GraphedStep(plain, *pool[0])
    number = 0

    def once() -> None:
        nonlocal number
        loss = step(*pool[number % len(pool)])
        # Kept on the device: reading it here would wait for the step. A captured step reuses its memory.
        losses.append(loss.clone())
        number += 1

    with recorded_forms() as forms:
        step_ms = StepClock(args.device).run(once, warmup=args.warmup, steps=args.steps)
    peaks = peak_memory(args.device)
    mean_losses = [float(loss) for loss in losses]
    extra: dict[str, Any] = {
        "method": args.cell,
        "model": shape,
        "seq_len": seq_len,
        "ac": ac,
        "forge_kernel": args.forge_kernel if kind.startswith("forge") else None,
        "keep_logits": args.keep_logits if kind.startswith("forge") else None,
        "merge_projections": args.merge_projections if kind.startswith("forge") else None,
        "forms": forms,
        "weights_gib": sum(p.numel() * p.element_size() for p in model.parameters()) / GIB,
        "states_gib": None
        if kind in PEERS
        else sum(s.numel() * s.element_size() for s in update.state_tensors()) / GIB,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": mean_losses,
    }
    if on_gpu:
        extra |= busy_time(once, steps=3)
        extra["busy"] = extra["busy_ms"] / statistics.median(step_ms)
    if not graphed:
        extra |= timed_parts(plain, pool, repeats=5, device=args.device)
    return write_result(
        args,
        arm=args.cell,
        step_ms=step_ms,
        tokens_per_step=args.batch * seq_len,
        peaks=peaks,
        # Same batch at both ends, else the comparison would be between batches.
        losses=[
            mean_losses[0],
            *mean_losses[1:-1],
            _last_of_first_batch(mean_losses, len(pool)),
        ],
        extra=extra,
    )


def _last_of_first_batch(losses: list[float], pool_size: int) -> float:
    """The newest loss on the batch that the first loss was taken on (batches rotate)."""
    return losses[(len(losses) - 1) // pool_size * pool_size]


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: use --device cpu --tiny to prove the script")
    if args.cell is not None:
        run_method(args)
        return 0
    cells, absent = _cells(args, argv)
    outcomes = run_cells(cells, args.out, timeout=args.cell_timeout, budget=args.budget) + absent
    header = ["method", "peak GiB", "median ms", f"x {BASELINE}", "min ms", "busy %", "fwd+bwd ms"]
    header += ["update ms", "first loss", "last", "form", "trained"]
    rows = []
    for outcome in outcomes:
        keys = ("forward_backward_ms", "update_ms", "first_loss", "last_loss")
        busy = outcome["busy"] * 100 if "busy" in outcome else None
        measured = [outcome.get("peak_gib"), outcome.get("median_ms"), _ratio(outcome, outcomes)]
        form = "/".join(sorted({one["form"] for one in outcome.get("forms", ())})) or None
        rows.append(
            [
                outcome["name"],
                *measured,
                outcome.get("min_ms"),
                busy,
                *(outcome.get(key) for key in keys),
                form,
                _verdict_of(outcome),
            ]
        )
    table = markdown_table(header, rows)
    write_report(args.out, "step", {"machine": machine_facts(), "cells": outcomes}, table)
    _plot(outcomes, args.out / "step.png")
    return 0 if all(outcome.get("trained") or "absent" in outcome for outcome in outcomes) else 1


def _cells(args: argparse.Namespace, argv: list[str]) -> tuple[list[Cell], list[dict[str, Any]]]:
    """(what to run, outcomes of what cannot run here: with the reason, and no failure)."""
    peers = [method for method in METHODS if method not in OURS]
    methods = [m for asked in args.methods for m in (peers if asked == ALL_PEERS else [asked])]
    forwarded = argv
    for option in AXES:
        forwarded = _without(forwarded, option)
    cells, absent = [], []
    several = [len(values) > 1 for values in (args.model, args.seq_len, args.ac)]
    for model, seq_len, ac, method in itertools.product(args.model, args.seq_len, args.ac, methods):
        kind, compile_mode, graphed = METHODS[method]
        axes = [text for text, shown in zip((model, str(seq_len), ac), several) if shown]
        name = " ".join([method, *axes])
        reason = missing(kind, args.device) if kind in PEERS else ""
        if graphed and args.device == "cpu":
            continue
        if ac == "memory_budget" and compile_mode != "blocks":
            reason = "a memory budget is kept by the compiler of the blocks"
        if reason:
            print(f"[{name}] absent: {reason}", flush=True)
            absent.append({"name": name, "method": method, "absent": reason})
            continue
        command = [sys.executable, __file__, "--cell", method, "--model", model, "--seq-len", str(seq_len)]
        cells.append(Cell(name, [*command, "--ac", ac, *forwarded]))
    return cells, absent


def _verdict_of(outcome: dict[str, Any]) -> str:
    if "absent" in outcome:
        return f"absent ({outcome['absent']})"
    return "failed" if "error" in outcome else ("yes" if outcome["trained"] else "NO")


def _ratio(outcome: dict[str, Any], outcomes: list[dict[str, Any]]) -> float | None:
    """Its median step as a share of the baseline's at the same model, tokens and recomputation."""
    for other in outcomes:
        same = all(other.get(key) == outcome.get(key) for key in ("model", "seq_len", "ac"))
        if other.get("method") == BASELINE and same and "median_ms" in outcome and "median_ms" in other:
            return outcome["median_ms"] / other["median_ms"]
    return None


def _without(argv: list[str], option: str) -> list[str]:
    """The command line without one option that takes several words."""
    kept: list[str] = []
    skipping = False
    for word in argv:
        if word.startswith("--"):
            skipping = word == option
        if not skipping:
            kept.append(word)
    return kept


def _plot(outcomes: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    done = [outcome for outcome in outcomes if "median_ms" in outcome]
    if not done:
        return
    names = [outcome["name"] for outcome in done]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.5 * len(done) + 1.6), sharey=True)
    for axis, key, label in zip(axes, ("median_ms", "peak_gib"), ("ms per step", "peak GiB")):
        values = [outcome.get(key) or 0.0 for outcome in done]
        axis.bar_label(axis.barh(names, values), fmt="%.1f", padding=2)
        axis.set_xlabel(label)
        axis.margins(x=0.12)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
