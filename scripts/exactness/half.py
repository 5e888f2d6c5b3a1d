"""Layouts of ranks that compute in bf16 against one rank that does, as F3 does for shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.exactness.experts import mixture
from scripts.exactness.layouts import train
from scripts.exactness.registry import Reading, World, at_least, gate
from scripts.exactness.runs import Layout, losses_apart

LOSS_BF16 = 2e-3  # an addend of a sum on another rank is rounded to 8 bits before it is added


@gate("bf16", at_least(2))
def half_precision_against_one(world: World) -> Iterator[Reading]:
    """Every axis in bf16, on fp32 weights, against one rank in bf16."""
    mixed: dict[str, Any] = {"training__mixed_precision_param": "bfloat16", "rounded": True}
    deep: dict[str, Any] = {"model__n_layers": 2 * world.size}  # for stages
    dense = {
        "replicas": Layout(dp_replicate=world.size),
        "fsdp": Layout(dp_shard=world.size),
        "tp": Layout(tp=world.size),
        "cp, ring": Layout(cp=world.size),
        "cp, ulysses": Layout(cp=world.size, method="ulysses"),
        "pp": Layout(pp=world.size),
    }
    for model, layouts in (
        (deep, dense),
        (mixture(world), {"ep": Layout(dp_shard=world.size, ep=world.size)}),
    ):
        _, wanted = train(world, **mixed, **model)
        for name, layout in layouts.items():
            _, losses = train(world, layout, **mixed, **model)
            yield Reading(f"{name}: losses apart", losses_apart(losses, wanted), LOSS_BF16)
