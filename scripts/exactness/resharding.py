"""Gates of checkpoints that several ranks write."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.exactness.registry import Reading, World, at_least, gate
from scripts.exactness.runs import ALONE, STEPS, Layout, Run, job, largest, losses_apart, tensors_apart
from titanforge.checkpoint import CheckpointManager
from titanforge.config.sections import Checkpoint


def _state(run: Run) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}


@gate("resume by ranks", at_least(2))
def resume_on_this_mesh_and_another(world: World) -> Iterator[Reading]:
    """A run on shards goes on from its checkpoint bit for bit; replicas, and one rank, take the same tensors
    and lose no more than the order of sums.
    """
    folder = Path(world.runtime.all_gather_object(tempfile.mkdtemp() if world.rank == 0 else "")[0])
    try:
        yield from _from(world, folder)
    finally:
        world.runtime.all_gather_object(None)  # nobody reads it any more
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _from(world: World, folder: Path) -> Iterator[Reading]:
    def manager() -> CheckpointManager:
        return CheckpointManager(Checkpoint(enable=True), folder, config_toml="", runtime=world.runtime)

    def resumed(layout: Layout) -> Run:
        fresh = Run(world, job(world, layout))
        loaded = manager().load(lambda: _state(fresh))
        assert loaded is not None
        fresh.model.load_state_dict(loaded["model"])
        fresh.optimizer.load_state_dict(loaded["optimizer"])
        return fresh

    run = Run(world, job(world, Layout(dp_shard=world.size)))
    run.train(0, 3)
    manager().save(3, lambda: _state(run), last=True)
    weights, states = run.weights(), run.states()
    wanted = run.train(3, 3 + STEPS)

    same = resumed(Layout(dp_shard=world.size))
    losses = losses_apart(same.train(3, 3 + STEPS), wanted)
    apart = largest([tensors_apart(same.weights(), run.weights()), losses])
    yield Reading("same mesh: weights and losses apart", apart, 0.0)
    for name, layout in (("replicas", Layout(dp_replicate=world.size)), ("one rank", ALONE)):
        other = resumed(layout)
        loaded = largest([tensors_apart(other.weights(), weights), tensors_apart(other.states(), states)])
        yield Reading(f"{name}: loaded weights and states apart", loaded, 0.0)
        losses = losses_apart(other.train(3, 3 + STEPS), wanted)
        yield Reading(f"{name}: losses apart", losses, 1e-5)
        other.close()
