"""Gates of pipelines, entered last: a schedule that hangs shall take no other gate's figures along."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.exactness.layouts import LOSS, train
from scripts.exactness.registry import Reading, World, at_least, gate
from scripts.exactness.runs import Layout, losses_apart


def against_one(world: World, layouts: dict[str, Layout]) -> Iterator[Reading]:
    """layouts: by the name of a schedule, and what else a person should know."""
    deep: dict[str, Any] = {"model__n_layers": 2 * world.size}
    _, wanted = train(world, **deep)
    for name, layout in layouts.items():
        deep["parallelism__pipeline_parallel_schedule"] = name.split()[0]
        _, losses = train(world, layout, **deep)
        yield Reading(f"{name}: losses apart", losses_apart(losses, wanted), LOSS)


@gate("PP", at_least(2))
def stages_against_one(world: World) -> Iterator[Reading]:
    """Stages of a pipeline against one rank; with shards where ranks allow."""
    layouts = {schedule: Layout(pp=world.size) for schedule in ("1F1B", "Interleaved1F1B")}
    if world.size >= 4 and world.size % 2 == 0:
        layouts["1F1B by fsdp"] = Layout(pp=2, dp_shard=world.size // 2)
    yield from against_one(world, layouts)


@gate("PP, zero bubble", at_least(2))
def zero_bubble_against_one(world: World) -> Iterator[Reading]:
    """The V-shaped schedule without bubbles against one rank."""
    yield from against_one(world, {"ZBVZeroBubble": Layout(pp=world.size)})
