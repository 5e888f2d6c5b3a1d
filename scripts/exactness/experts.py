"""Gates of experts that ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.exactness.layouts import train
from scripts.exactness.registry import Reading, World, at_least, gate
from scripts.exactness.runs import Layout, fused, largest, losses_apart, ordinary, tensors_apart


def mixture(world: World) -> dict[str, Any]:
    """A model with two experts a rank; no balancing, whose term is each rank's own."""
    return {
        "model__name": "qwen3",
        "model__flavor": "debugmodel_moe",
        "model__hidden_dim": 64 if world.on_gpu else 24,
        "model__n_experts": 2 * world.size,
        "model__n_experts_per_token": 2,
        "model__moe_balancing": "none",
    }


@gate("EP1", at_least(2))
def experts_against_one(world: World) -> Iterator[Reading]:
    """Experts dealt to ranks, tokens sent to them, against one rank that holds them all; fused against
    unfused on the same ranks, bit for bit.
    """
    _, wanted = train(world, **mixture(world))
    layouts = {"ep": Layout(dp_shard=world.size, ep=world.size)}
    if world.size >= 4 and world.size % 2 == 0:
        layouts["ep 2, the rest shards"] = Layout(dp_shard=world.size, ep=2)
    for name, layout in layouts.items():
        (plain, ours), (update, theirs) = (
            train(world, layout, make=make, **mixture(world)) for make in (ordinary, fused)
        )
        yield Reading(f"{name}: losses apart", losses_apart(ours, wanted), 4.9e-5, 3.58e-5)
        apart = largest([tensors_apart(plain.weights(), update.weights()), losses_apart(ours, theirs)])
        yield Reading(f"{name}, fused against unfused: weights and losses apart", apart, 0.0)
