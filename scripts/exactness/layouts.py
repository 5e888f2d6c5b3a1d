"""Gates that compare a layout of ranks with one rank by itself, in fp32 unless said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from scripts.exactness.registry import Reading, World, at_least, gate, multiple_of
from scripts.exactness.runs import (
    ALONE,
    Layout,
    Make,
    Run,
    drift,
    fused,
    job,
    largest,
    losses_apart,
    ordinary,
    rule,
    tensors_apart,
)
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


def compare(
    world: World,
    what: str,
    layout: Layout,
    tolerance: float,
    paper: float | None = None,
    makes: Sequence[Make] = (ordinary, fused),
) -> Iterator[Reading]:
    """The losses of a layout, unfused and fused, against those of one rank."""
    _, wanted = train(world)
    for make in makes:
        run, losses = train(world, layout, make=make)
        run.close()
        apart = losses_apart(losses, wanted)
        yield Reading(f"{what}, {make.__name__}: losses apart", apart, tolerance, paper)


@gate("T0 by ranks", at_least(2))
def fused_is_unfused(world: World) -> Iterator[Reading]:
    """Gradients consumed by bucket or shard against the ordinary engine on the same ranks: bit for bit."""
    rounded = {
        "optimizer": rule(state_dtype="int8", master_weights="stochastic_rounding"),
        "training__dtype": "bfloat16",
    }
    layouts = {
        "replicas": Layout(dp_replicate=world.size),
        "fsdp": Layout(dp_shard=world.size),
        "cp": Layout(cp=world.size),
        "tp": Layout(tp=world.size),
    }
    if world.size >= 4 and world.size % 2 == 0:
        layouts["replicas of shards"] = Layout(dp_replicate=2, dp_shard=world.size // 2)
    for name, layout in layouts.items():
        recipes: dict[str, dict[str, Any]] = {"AdamW": {"optimizer": rule()}}
        if name in ("replicas", "fsdp"):
            recipes["Muon"] = {"optimizer": rule("Muon")}
        # On bf16 replicas the two differ: fused takes the fp32 sum, the ordinary engine its bf16 rounding.
        if name == "replicas":
            recipes["AdamW, int8"] = {"optimizer": rule(state_dtype="int8")}
        if name == "fsdp":
            recipes["AdamW, int8, rounded at random"] = rounded
        for what, recipe in recipes.items():
            (first, ours), (second, theirs) = (
                train(world, layout, make=make, **recipe) for make in (fused, ordinary)
            )
            apart = [
                losses_apart(ours, theirs),
                tensors_apart(first.weights(), second.weights()),
                tensors_apart(first.states(), second.states()),
            ]
            first.close()
            second.close()
            yield Reading(f"{name}, {what}: weights, states and losses apart", largest(apart), 0.0, 0.0)


@gate("T1", at_least(2))
def replicas_stay_equal(world: World) -> Iterator[Reading]:
    """Replicas that sum their gradients hold the same bits after steps."""
    for name, make in (("AdamW", ordinary), ("AdamW", fused), ("Muon", fused)):
        run, _ = train(world, Layout(dp_replicate=world.size), rule(name), make)
        what = f"{name}, {make.__name__}"
        yield Reading(f"{what}: weights of two replicas apart", drift(world, run.weights()), 0.0, 0.0)
        yield Reading(f"{what}: states of two replicas apart", drift(world, run.states()), 0.0, 0.0)
        run.close()


@gate("T2", at_least(2))
def replicas_against_one(world: World) -> Iterator[Reading]:
    """Replicas against one rank that sees the whole batch."""
    yield from compare(world, "replicas", Layout(dp_replicate=world.size), LOSS, 5.96e-7)


@gate("F1", at_least(2))
def shards_against_one(world: World) -> Iterator[Reading]:
    """FSDP against one rank; with replicas of shards too where the world is large enough."""
    yield from compare(world, "fsdp", Layout(dp_shard=world.size), LOSS, 4.77e-7)
    if world.size >= 4 and world.size % 2 == 0:
        hybrid = Layout(dp_replicate=2, dp_shard=world.size // 2)
        yield from compare(world, "replicas of shards", hybrid, LOSS)


@gate("F2", at_least(2))
def gathers_agree(world: World) -> Iterator[Reading]:
    """Every rank gathers the same weights and states."""
    for make in (ordinary, fused):
        run, _ = train(world, Layout(dp_shard=world.size), make=make)
        what = f"{make.__name__}: gathered"
        yield Reading(f"{what} weights of two ranks apart", drift(world, run.weights()), 0.0, 0.0)
        yield Reading(f"{what} states of two ranks apart", drift(world, run.states()), 0.0, 0.0)


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
        yield from compare(world, method, Layout(cp=world.size, method=method), 1.2e-4, 5.82e-5, (ordinary,))


@gate("TP", at_least(2))
def tensors_against_one(world: World) -> Iterator[Reading]:
    """Column and row splits with sequence parallelism against one rank; with shards where ranks allow."""
    yield from compare(world, "tp", Layout(tp=world.size), LOSS)
    if world.size >= 4 and world.size % 2 == 0:
        yield from compare(world, "tp by fsdp", Layout(tp=2, dp_shard=world.size // 2), LOSS)


def _gpus(world: World) -> str:
    return at_least(2)(world) or ("" if world.on_gpu else "needs CUDA devices")


@gate("TP, async", _gpus)
def overlapped_against_one(world: World) -> Iterator[Reading]:
    """Collectives in pieces beside matrix products against one rank; operators that do so are counted."""
    _, wanted = train(world)
    run, losses = train(
        world,
        Layout(tp=world.size),
        compile__enable=True,
        compile__components=["model"],
        parallelism__enable_async_tensor_parallel=True,
    )
    yield Reading("tp, async: losses apart", losses_apart(losses, wanted), LOSS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.step(len(losses))
    names = [event.name for event in profile.events() or ()]
    # Two gathers and two scatters a block in forward, two gathers in backward.
    for name, least in (("fused_all_gather_matmul", 8), ("fused_matmul_reduce_scatter", 4)):
        missing = max(0, least - sum(each.rpartition("::")[2] == name for each in names))
        yield Reading(f"{name}: of {least} a step, missing", missing, 0.0)


@gate("TP by CP by FSDP", multiple_of(8))
def three_ways(world: World) -> Iterator[Reading]:
    """Three axes at once against one rank."""
    yield from compare(world, "tp 2, cp 2", Layout(tp=2, cp=2, dp_shard=world.size // 4), 1.2e-4)
