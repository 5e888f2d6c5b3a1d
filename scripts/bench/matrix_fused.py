"""Part `fused` of `scripts/bench/matrix.py`: whole steps of rules of matrices, ordinary and inside of
backward, weighed and timed at Qwen3-8B's shape.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch

from scripts.bench.matrix_steps import Marks
from scripts.bench.ours import Forge, Native, TrainStep, build_shape
from scripts.bench.synthetic import token_pool
from titanforge.config.sections import Optimizer
from titanforge.forge import attach
from titanforge.optim.build import build_groups, build_recipe

ARMS = ("ordinary", "fused, U after backward", "fused, U in backward")


def fused(args: argparse.Namespace, left: Callable[[], float]) -> list[dict[str, Any]]:
    """Peak memory of whole steps after the first two, and their time. The FORGE paper (another card) has Muon
    at 48.69 and 37.92 GiB.
    """
    rows: list[dict[str, Any]] = []
    length = 64 if args.tiny else 512
    for name in args.fused_rules:
        for arm in ARMS:
            if args.device == "cuda" and left() < 25:
                rows.append({"rule": name, "arm": arm, "note": "not run: out of time"})
                continue
            try:
                rows.append({"rule": name, "arm": arm, **_weigh(args, name, arm, length)})
            except Exception as error:
                rows.append({"rule": name, "arm": arm, "note": f"{type(error).__name__}: {error}"[:300]})
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            print(rows[-1], flush=True)
    return rows


def _weigh(args: argparse.Namespace, name: str, arm: str, length: int) -> dict[str, Any]:
    on_gpu = args.device == "cuda"
    model: Any = build_shape(
        "qwen3-8b", tiny=args.tiny, seq_len=length, device=args.device, fused=arm != "ordinary"
    )
    config = Optimizer(name=name, lr=1e-5, momentum=0.95, state_dtype="bfloat16")
    config.dion.rank_fraction, config.dobb.blocks = 1 / 16, 16
    if arm == "ordinary":
        update: Any = Native(model, config=config, max_norm=0.0)
    else:
        tokens = torch.arange(8, device=args.device)[None]
        optimizer = attach(
            model,
            build_groups(model, config),
            build_recipe(config, "bfloat16"),
            probe=lambda: model(tokens, None, None, tokens),
            update_in_backward=arm.endswith("in backward"),
        )
        update = Forge.of(optimizer)
    step, pool = TrainStep(model, update), token_pool(model.args.vocab_size, 1, length, device=args.device)
    losses = [float(step(*pool[0])) for _ in range(2)]
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks = Marks(args.device)
    marks.mark()
    for _ in range(3):
        losses.append(float(step(*pool[0])))
        marks.mark()
    found = {"step ms": statistics.median(marks.times()), "last loss": losses[-1]}
    if on_gpu:
        found["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return found
