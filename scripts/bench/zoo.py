"""Tokens per second of forward and backward through a model of the zoo, beside transformers on one GPU.

    python scripts/bench/zoo.py                            # both Qwen3 shapes at 512 and 8192 tokens
    python scripts/bench/zoo.py --cells qwen3-8B:512:compiled qwen3-8B:512:transformers
    python scripts/bench/zoo.py --device cpu --tiny --cells qwen3-8B:32:eager qwen3-8B:32:transformers

A cell is `<family>-<flavor>:<tokens>:<how>`; how: `eager`, `compiled` (block by block), `transformers`
(`sdpa` attention, not compiled); `+recomputed` after it recomputes every block in backward. Weights and
gradients in bf16, one sequence, the loss of every token included; no update. transformers gets the shape
from the config.json that titanforge would export. One process per cell. TFLOP/s of both sides are counted by
our model's operations per token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.harness import (
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

WAYS = ("eager", "compiled", "transformers")
CELLS = [
    *(f"qwen3-8B:{tokens}:{way}" for tokens in (512, 8192) for way in WAYS),
    *(f"qwen3-30B-A3B:512:{way}" for way in WAYS),
    *(f"qwen3-30B-A3B:8192:{way}+recomputed" for way in WAYS),
]


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.set_defaults(warmup=4, steps=10)
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="CELL")
    parser.add_argument("--cell-timeout", type=float, default=150.0, help="seconds for one cell")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all")
    parser.add_argument("--cell", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: use --device cpu --tiny to prove the script")
    if args.cell is not None:
        run(args)
        return 0
    for name in args.cells:
        parse(name)
    common = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    common += ["--warmup", str(args.warmup), "--steps", str(args.steps)]
    cells = [Cell(name, [sys.executable, __file__, "--cell", name, *common]) for name in args.cells]
    outcomes = run_cells(cells, args.out, timeout=args.cell_timeout, budget=args.budget)
    header = ["cell", "tokens/s", "median ms", "TFLOP/s", "peak GiB", "note"]
    rows = [
        [
            outcome["name"],
            outcome.get("tokens_per_second"),
            outcome.get("median_ms"),
            outcome.get("tflops"),
            outcome.get("peak_gib"),
            outcome["error"].strip().splitlines()[-1][:90] if "error" in outcome else outcome["note"],
        ]
        for outcome in outcomes
    ]
    write_report(
        args.out, "zoo", {"machine": machine_facts(), "cells": outcomes}, markdown_table(header, rows)
    )
    return 1 if any("error" in outcome for outcome in outcomes) else 0


def parse(cell: str) -> tuple[str, str, int, str, bool]:
    """(family, flavor, tokens, way, recomputed) of a cell's name; SystemExit naming the fault."""
    try:
        shape, tokens, how = cell.split(":")
        family, flavor = shape.split("-", 1)
        way, _, recomputed = how.partition("+")
        if way not in WAYS or recomputed not in ("", "recomputed"):
            raise ValueError
        return family, flavor, int(tokens), way, bool(recomputed)
    except ValueError:
        raise SystemExit(
            f"--cells {cell}: a cell is family-flavor:tokens:way, the way one of {', '.join(WAYS)}, "
            "with +recomputed after it or not"
        ) from None


def run(args: argparse.Namespace) -> None:
    """One cell, in this process."""
    family, flavor, tokens, way, recomputed = parse(args.cell)
    model, flops, vocab_size, note = build(family, flavor, tokens, way, recomputed, args)
    pool = token_pool(vocab_size, 1, tokens, device=args.device)
    losses: list[Tensor] = []

    def once() -> None:
        ids, labels = pool[len(losses) % len(pool)]
        for parameter in model.parameters():
            parameter.grad = None
        if way == "transformers":
            # `shift_labels`: labels that are already the next tokens, as ours are.
            loss = model(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss
        else:
            loss = model(ids, None, None, labels) / labels.numel()
        loss.backward()
        losses.append(loss.detach())

    step_ms = StepClock(args.device).run(once, warmup=args.warmup, steps=args.steps)
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if missing:
        raise SystemExit(f"no gradient for {missing[:3]}: not the whole backward")
    median_s = sorted(step_ms)[len(step_ms) // 2] / 1e3
    write_result(
        args,
        arm=args.cell,
        step_ms=step_ms,
        tokens_per_step=tokens,
        peaks=peak_memory(args.device),
        losses=[float(loss) for loss in losses],
        extra={"tflops": flops * tokens / median_s / 1e12, "note": note},
    )


TINY: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "hidden_dim": 96,
    "vocab_size": 512,
}


def build(
    family: str, flavor: str, tokens: int, way: str, recomputed: bool, args: argparse.Namespace
) -> tuple[Any, float, int, str]:
    """The model, on the device and ready; its operations per token, vocabulary, and what is to be noted."""
    from titanforge.models.initialization import initialize_weights
    from titanforge.models.registry import build_model, model_args
    from titanforge.parallelisms import apply_activation_checkpoint, apply_compile

    overrides = dict(TINY) if args.tiny else {}
    if args.tiny and model_args(family, flavor, seq_len=tokens).n_experts:
        overrides |= {"n_experts": 8, "n_experts_per_token": 2}
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            ours: Any
            ours, shape = build_model(family, flavor, seq_len=tokens, overrides=overrides)
    finally:
        torch.set_default_dtype(previous)
    flops = ours.flops_per_token(tokens)
    if way == "transformers":
        model, note = build_transformers(shape, recomputed, args.device)
        return model, flops, shape.vocab_size, note
    apply_activation_checkpoint(ours, "full" if recomputed else "none")
    if way == "compiled":
        apply_compile(ours)
        ours.output.compile()
    ours.to_empty(device=args.device)
    initialize_weights(ours, 0)
    return ours.train(), flops, shape.vocab_size, ""


def build_transformers(shape: Any, recomputed: bool, device: str) -> tuple[Any, str]:
    """transformers' model of the same shape, by the config.json that we export; its own initial values."""
    import transformers

    from titanforge.models.huggingface import form_of

    settings = form_of(shape).config(torch.bfloat16)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    experts = getattr(model.config, "_experts_implementation", None)
    note = f"transformers {transformers.__version__}" + (f", experts {experts}" if experts else "")
    return model.train(), note


if __name__ == "__main__":
    sys.exit(main())
