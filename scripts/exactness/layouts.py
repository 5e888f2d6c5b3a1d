"""Gates that compare a layout of ranks with one rank by itself, in fp32 unless said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.exactness.registry import Reading, World, at_least, gate, multiple_of
from scripts.exactness.runs import ALONE, Layout, Make, Run, drift, job, losses_apart, ordinary, rule
from titanforge.config.sections import Optimizer

LOSS = 1e-5  # dealing one process's batch into pieces moves a loss by 3e-6 alone


def train(
    world: World,
    layout: Layout = ALONE,
    optimizer: Optimizer | None = None,
    make: Make = ordinary,
    rounded: bool = False,
    **changes: Any,
) -> tuple[Run, list[float]]:
    """A run and its losses. rounded: it starts from weights rounded to bf16."""
    config = job(world, layout, **changes)
    config.optimizer = optimizer or rule()
    run = Run(world, config, make)
    if rounded:
        run.round_weights()
    return run, run.train()


def compare(world: World, what: str, layout: Layout, tolerance: float, paper: float | None = None) -> Reading:
    """The losses of a layout against those of one rank."""
    run, losses = train(world, layout)
    run.close()
    _, wanted = train(world)
    return Reading(f"{what}: losses apart", losses_apart(losses, wanted), tolerance, paper)


@gate("T1", at_least(2))
def replicas_stay_equal(world: World) -> Iterator[Reading]:
    """Replicas that sum their gradients hold the same bits after steps."""
    for name in ("AdamW", "Muon"):
        run, _ = train(world, Layout(dp_replicate=world.size), rule(name))
        yield Reading(f"{name}: weights of two replicas apart", drift(world, run.weights()), 0.0, 0.0)
        yield Reading(f"{name}: states of two replicas apart", drift(world, run.states()), 0.0, 0.0)
        run.close()


@gate("T2", at_least(2))
def replicas_against_one(world: World) -> Iterator[Reading]:
    """Replicas against one rank that sees the whole batch."""
    yield compare(world, "replicas", Layout(dp_replicate=world.size), LOSS, 5.96e-7)


@gate("F1", at_least(2))
def shards_against_one(world: World) -> Iterator[Reading]:
    """FSDP against one rank; with replicas of shards too where the world is large enough."""
    yield compare(world, "fsdp", Layout(dp_shard=world.size), LOSS, 4.77e-7)
    if world.size >= 4 and world.size % 2 == 0:
        hybrid = Layout(dp_replicate=2, dp_shard=world.size // 2)
        yield compare(world, "replicas of shards", hybrid, LOSS)


@gate("F2", at_least(2))
def gathers_agree(world: World) -> Iterator[Reading]:
    """Every rank gathers the same weights and states."""
    run, _ = train(world, Layout(dp_shard=world.size))
    yield Reading("gathered weights of two ranks apart", drift(world, run.weights()), 0.0, 0.0)
    yield Reading("gathered states of two ranks apart", drift(world, run.states()), 0.0, 0.0)


@gate("F3", at_least(2))
def sharded_master(world: World) -> Iterator[Reading]:
    """FSDP on fp32 shards that computes in bf16, against one rank on the same recipe, and FSDP on bf16 shards
    with an fp32 master against it.
    """
    mixed: dict[str, Any] = {"training__mixed_precision_param": "bfloat16", "rounded": True}
    _, wanted = train(world, **mixed)
    _, losses = train(world, Layout(dp_shard=world.size), **mixed)
    yield Reading("fp32 shards: losses apart", losses_apart(losses, wanted), 2e-3, 1.67e-6)
    _, losses = train(
        world, Layout(dp_shard=world.size), rule(master_weights="float32"), training__dtype="bfloat16"
    )
    yield Reading("bf16 shards, fp32 master: losses apart", losses_apart(losses, wanted), 2e-3)


@gate("CP1", at_least(2))
def context_against_one(world: World) -> Iterator[Reading]:
    """Sequences dealt to ranks, attention by ring and by Ulysses, against one rank."""
    for method in ("ring", "ulysses"):
        yield compare(world, method, Layout(cp=world.size, method=method), 1.2e-4, 5.82e-5)


@gate("TP", at_least(2))
def tensors_against_one(world: World) -> Iterator[Reading]:
    """Column and row splits with sequence parallelism against one rank; with shards where ranks allow."""
    yield compare(world, "tp", Layout(tp=world.size), LOSS)
    if world.size >= 4 and world.size % 2 == 0:
        yield compare(world, "tp by fsdp", Layout(tp=2, dp_shard=world.size // 2), LOSS)


@gate("TP by CP by FSDP", multiple_of(8))
def three_ways(world: World) -> Iterator[Reading]:
    """Three axes at once against one rank."""
    yield compare(world, "tp 2, cp 2", Layout(tp=2, cp=2, dp_shard=world.size // 4), 1.2e-4)
