"""Fused runs of several ranks: the unfused run bit for bit, one rank's to round-off, and no gradient kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from scripts.exactness.registry import World
from scripts.exactness.runs import (
    Layout,
    Run,
    batch,
    fused,
    job,
    ordinary,
    partly_fused,
    tensors_apart,
)
from tests.distributed_harness import run_distributed
from tests.trainer.runs import (
    argv,
    assert_same_checkpoint,
    column,
    greatest_difference,
    train_all,
    write_corpus,
)
from titanforge.config.sections import Comm
from titanforge.forge import engine, hooked
from titanforge.parallelisms import init_distributed

REPLICAS = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}
SHARDS = {"parallelism__data_parallel_replicate_degree": 1, "parallelism__data_parallel_shard_degree": 2}
FORGE = {"forge__enable": True}


def run(folder: Path, corpus: Path, **more: Any) -> list[str]:
    keys: dict[str, Any] = {
        "training__steps": 4,
        "training__local_batch_size": 2,
        "training__global_batch_size": 8,  # two micro-batches on each of two ranks
        "training__max_norm": 0.0,
        "optimizer__lr": 2e-3,
        "checkpoint__enable": True,
        "data__validation_fraction": 0,
        "sync__bucket_mib": 0.02,
        "activation_checkpoint__mode": "full",
    }
    return argv(folder, corpus, **(keys | more))


def test_whole_runs(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=40)
    runs = []
    for name, layout in (("replicas", REPLICAS), ("shards", SHARDS)):
        runs += [run(tmp_path / name / "ordinary", corpus, **layout)]
        runs += [run(tmp_path / name / "fused", corpus, **layout, **FORGE)]
        lagged = {"training__max_norm": 0.5, "forge__clip": "lagged"}
        runs += [run(tmp_path / name / "lagged", corpus, **layout, **FORGE, **lagged)]
    train_all(2, runs)
    for name in ("replicas", "shards"):
        plain, forge, lagged = (tmp_path / name / each for each in ("ordinary", "fused", "lagged"))
        assert column(forge, "loss") == column(plain, "loss")
        assert column(forge, "grad_norm") == pytest.approx(column(plain, "grad_norm"), rel=1e-5)
        assert_same_checkpoint(
            forge / "checkpoint" / "step-4", plain / "checkpoint" / "step-4", ("model.", "optimizer.")
        )
        assert min(column(lagged, "grad_norm")) > 0.5  # clipping had something to do
        assert column(lagged, "loss") != column(plain, "loss")
    assert greatest_difference(tmp_path / "replicas" / "lagged", tmp_path / "shards" / "lagged") < 1e-5


def on_two_ranks(rank: int, world_size: int) -> None:
    world = World(init_distributed(Comm(), "cpu"))
    for layout in (Layout(dp_replicate=2), Layout(dp_shard=2), Layout(tp=2)):
        bad_loss_on_one_rank(world, layout)
        gradients_are_gone(world, layout)
        replaced_weight(world, layout)
    unreached_weight(world, Layout(dp_shard=2), fused)
    # The spare weight waits for `step`, which is to leave alone what backward and the exchange have done.
    unreached_weight(world, Layout(tp=2), partly_fused, "Muon")


def bad_loss_on_one_rank(world: World, layout: Layout) -> None:
    """Weights and states keep their bits on all ranks."""
    run = Run(world, job(world, layout), fused)
    run.train(0, 2)
    before = run.weights() | run.states()
    forward = run.model.forward
    factor = float("inf") if world.rank == 1 or layout.tp > 1 else 1.0
    run.model.forward = lambda *inputs, **named: forward(*inputs, **named) * factor
    run.step(2)
    assert tensors_apart(before, run.weights() | run.states()) == 0.0
    run.model.forward = forward
    run.step(3)
    assert tensors_apart(before, run.weights() | run.states()) > 0.0
    run.close()


def flush_to(consume: Any) -> Any:
    def flush(self: hooked.ArrivalQueue) -> None:
        waiting = list(self._waiting)
        self.clear()
        consume(waiting)

    return flush


def gradients_are_gone(world: World, layout: Layout) -> None:
    """When backward is over no weight has a gradient, and while it runs only what has just arrived."""
    config = job(world, layout)
    config.sync.bucket_mib = 0.01
    run = Run(world, config, fused)
    alive: list[int] = []
    consumed: list[str] = []

    def look(arrived: Any) -> None:
        consumed.extend(sink.name for sink, _ in arrived)
        waiting = sum(param.grad is not None for param in run.model.parameters())
        alive.append(waiting + len(arrived))
        hooked.consume(arrived)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooked.ArrivalQueue, "LIMIT", 2000)
        patch.setattr(engine, "consume", look)
        patch.setattr(hooked.ArrivalQueue, "flush", flush_to(look))
        run.train(0, 1)
    weights = list(run.model.parameters())
    assert len(consumed) == len(set(consumed)) == len(weights)
    assert max(alive) < len(weights) / 2
    assert all(param.grad is None for param in weights)
    run.close()


def replaced_weight(world: World, layout: Layout) -> None:
    """The module would train on without the optimizer, which still has the former weight."""
    run = Run(world, job(world, layout), fused)
    run.train(0, 1)
    tokens, labels = batch(world, run.config, 1)
    with torch.no_grad():  # FSDP leaves gathered what no backward follows
        run.model(tokens[:2], None, None, labels[:2])
    run.step(1)
    run.model.load_state_dict({k: v.clone() for k, v in run.model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"was replaced .*: attach again"):
        run.step(2)
    run.close()


def unreached_weight(world: World, layout: Layout, make_fused: Any, rule: str = "AdamW") -> None:
    """A weight without gradient still takes the part of its step that is free of it."""
    weights = {}
    for make in (make_fused, ordinary):
        run = Run(world, job(world, layout, optimizer__name=rule), make)
        run.model.register_parameter("spare", torch.nn.Parameter(torch.ones(3, 3)))
        if make is make_fused:
            run.optimizer.detach()
        run.optimizer = make(run.model, run.config, run.dims)
        tokens, labels = batch(world, run.config, 0)
        run.optimizer.set_lr(1.0)
        run.optimizer.zero_grad()
        run.optimizer.begin_step(1)
        run.optimizer.before_backward(0, torch.tensor(True))
        (run.model(tokens[:2], None, None, labels[:2]) / 100).backward()
        run.optimizer.step()
        weights[make] = run.weights()
        assert float(weights[make]["spare"].mean()) == pytest.approx(1 - 1e-3 * 0.1)
        assert any(isinstance(param, DTensor) for param in run.model.parameters())
    assert tensors_apart(weights[make_fused], weights[ordinary]) == 0.0


def test_guards_hold_on_every_rank() -> None:
    run_distributed(on_two_ranks, 2)
