"""A cell of `sync_quality.py` with replicas as threads: policies and optimizers around a bare loop."""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.bench.replicas import ThreadGroup, ThreadLedger, run_replicas
from scripts.bench.sync_captured import CapturedGradients, CapturedUpdates, NewGraph
from scripts.bench.sync_pace import Pace
from titanforge.captured import CudaGraph
from titanforge.config.sections import DionOptions, Optimizer, ScalarOptimizer, Sync
from titanforge.data.sources.jsonl import open_jsonl
from titanforge.data.sources.text import open_python_stdlib
from titanforge.models.initialization import initialize_weights
from titanforge.models.registry import build_model
from titanforge.optim import build_optimizer, lr_factor
from titanforge.parallelisms import apply_compile, apply_mixed_precision
from titanforge.sync import Replication, build_sync_policy

VALIDATION_SEQUENCES = 512
VALIDATION_BATCH = 32


def late(seconds: list[float]) -> float:
    """Median of the second half."""
    return statistics.median(seconds[len(seconds) // 2 :] or [0.0])


@functools.cache
def text(device: torch.device, corpus: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of a JSON Lines file, or of the Python standard library, uint8: documents in an order drawn once,
    a twentieth held out."""
    source = open_jsonl(str(corpus), "text") if corpus else open_python_stdlib()
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(1)).tolist()
    joined = bytearray("\0".join(source.read(index) for index in order).encode())
    whole = torch.frombuffer(joined, dtype=torch.uint8)
    split = len(whole) * 19 // 20
    return whole[:split].to(device), whole[split:].to(device)


def crops(
    data: torch.Tensor, rows: int, length: int, seed: int, mine: slice = slice(None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [rows, length] tokens and labels, from places drawn on the CPU: the same on any device. mine: of
    the rows, those that are wanted."""
    starts = torch.randint(len(data) - length - 1, (rows,), generator=torch.Generator().manual_seed(seed))
    own = starts[mine].to(data.device, non_blocking=True)
    found = data[own[:, None] + torch.arange(length + 1, device=data.device)].long()
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def new_model(size: dict[str, Any], options: Any) -> torch.nn.Module:
    """A replica's model on its device, initialised by the seed: the same for all."""
    device = torch.device(options.device)
    overrides = {key: value for key, value in size["model"].items() if key not in ("name", "flavor")}
    names = size["model"]["name"], size["model"]["flavor"]
    model, _ = build_model(*names, vocab_size=256, seq_len=size["seq_len"], overrides=overrides)
    model.to(device)
    initialize_weights(model, options.seed)
    apply_mixed_precision(model, torch.bfloat16 if device.type == "cuda" else None)
    if options.compile:
        apply_compile(model)
    return model


@torch.no_grad()
def validation_loss(model: torch.nn.Module, held_out: torch.Tensor, length: int, batch: int) -> float:
    """Nats per token. batch: sequences at a time."""
    pairs = [
        crops(held_out, VALIDATION_BATCH, length, 7 + index)
        for index in range(VALIDATION_SEQUENCES // VALIDATION_BATCH)
    ]
    x, y = (torch.cat(parts) for parts in zip(*pairs))
    total = torch.zeros((), device=held_out.device)
    for tokens, labels in zip(x.split(batch), y.split(batch)):
        total += model(tokens, None, None, labels) / (VALIDATION_SEQUENCES * length)
    return float(total)


@torch.no_grad()
def take_mean(model: torch.nn.Module, replicas: Sequence[torch.nn.Module]) -> None:
    """Overwrite a model's weights with the mean of the replicas'; they keep theirs."""
    for own, *theirs in zip(model.parameters(), *(replica.parameters() for replica in replicas)):
        own.copy_(torch.stack([weight.float() for weight in theirs]).mean(0))


def get_ready(size: dict[str, Any], options: Any) -> str:
    """Read the text and compile, once for all cells of this process. With `options.graph`, returns why steps
    are not to be captured: what failed, or that they train otherwise than steps as they are."""
    torch.set_num_threads(1)
    keys = {"replicas": 2, "cell_seconds": 1e9, "pace": None, "look": 0, "graph": False, "lr_warmup": 4}
    alone = argparse.Namespace(**vars(options) | keys | {"steps": 12 if options.graph else 2})
    local = {"policy": "scheduled", "interval": 10, "warmup_steps": 1}
    for sync in (local, {"policy": "every_step"}) if options.graph else ({"policy": "every_step"},):
        plain = train_threads(size, sync, alone)["losses"]
        if not options.graph:
            continue
        try:
            captured = train_threads(size, sync, argparse.Namespace(**vars(alone) | {"graph": True}))
        except RuntimeError as error:
            return f"a step could not be captured: {error}"
        far = max(abs(ours / theirs - 1) for ours, theirs in zip(captured["losses"], plain))
        if not far < 1e-2:
            return f"losses of captured steps {captured['losses']}, of others {plain}"
    return ""


def train_threads(
    size: dict[str, Any], sync: dict[str, Any], options: Any, new_graph: NewGraph | None = None
) -> dict[str, Any]:
    """One cell with replicas as threads. new_graph: in place of CUDA's, with `options.graph`."""
    gc.collect()  # what an earlier cell left in cycles holds memory of the device
    replicas, device = options.replicas, torch.device(options.device)
    train, held_out = text(device, options.corpus)
    batch, length = options.batch or size["batch"], size["seq_len"]
    tokens, end = [batch * length] * replicas, time.monotonic() + options.cell_seconds
    settings = Optimizer(
        name="Dion",
        lr=options.lr or size["lr"],
        momentum=options.momentum,
        dion=DionOptions(options.rank_fraction, options.error_feedback),
        scalar=ScalarOptimizer(lr=options.scalar_lr or options.lr or size["lr"]),
    )
    # One shape for compiled blocks: a second would be compiled for too.
    rows = batch if options.compile else VALIDATION_BATCH
    pace, cell = (Pace(*options.pace[:2]), options.pace[2]) if options.pace else (None, 0)
    models: list[Any] = [None] * replicas
    looks: list[tuple[int, float]] = []
    mean_model = new_model(size, options) if options.look else None

    def look(step: int) -> None:
        assert mean_model is not None
        take_mean(mean_model, models)
        looks.append((step, validation_loss(mean_model, held_out, length, rows)))

    def plan(step: int) -> int:
        """The number of steps as far as it is known; 0: to stop."""
        if pace is not None:
            pace.wait(cell, step, end)
        return 0 if time.monotonic() > end else (pace.settled if pace is not None else 0) or options.steps

    def replica(group: ThreadGroup) -> dict[str, Any]:
        rank = group.rank()
        model = models[rank] = new_model(size, options)
        optimizer: Any = build_optimizer(model, settings, "float32")
        ledger, policy = ThreadLedger(), build_sync_policy(Sync(**sync))
        divisor = 1

        def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return model(x, None, None, y) / divisor

        gradients: Any = None
        if options.graph:
            graph = new_graph or functools.partial(CudaGraph, device)
            gradients = CapturedGradients(forward, list(model.parameters()), graph)
            optimizer = CapturedUpdates(optimizer, graph, lambda: gradients.captured)
        replication = Replication(group) if replicas > 1 else None  # type: ignore[arg-type]
        policy.attach(model, replication, ledger, optimizer)
        divisor = policy.gradient_divisor(tokens)
        losses, events, times = [], [], [time.monotonic()]
        started = time.time() - time.monotonic()
        one = torch.ones((), device=device)
        total, step = options.steps, 0
        while step < total:
            if step % 10 == 0:
                planned = group.tell(functools.partial(plan, step))
                if not planned:
                    break
                total = planned
                if options.look and step and step % options.look == 0:
                    group.tell(functools.partial(look, step))
            mine = slice(rank, None, replicas)
            x, y = crops(train, batch * replicas, length, 1_000_003 * options.seed + step, mine)
            optimizer.set_lr(lr_factor(step, options.lr_warmup, total, options.decay, "linear", 0.0))
            optimizer.zero_grad()
            optimizer.begin_step(1)
            policy.begin_step(1, tokens)
            # Not armed by `before_backward`: a backward that is replayed calls no hooks, so that gradients
            # are summed when all are there.
            if gradients is not None:
                loss = gradients(x, y)
            else:
                loss = forward(x, y)
                loss.backward()
            policy.reduce_gradients()
            policy.step(optimizer, one, one)
            losses.append(loss.detach() * (divisor / tokens[0]))
            times.append(time.monotonic())
            events += [(step, event["sync"], event["sync/drift"]) for event in policy.take_events()]
            step += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        ended = time.time()
        if pace is not None:
            pace.leave(cell)
        policy.synchronize("evaluation")
        # All replicas have the same weights now; one evaluates.
        validation = validation_loss(model, held_out, length, rows) if rank == 0 else 0.0
        return {
            "losses": torch.stack(losses).tolist() if losses else [],
            "step_seconds": late([after - before for before, after in itertools.pairwise(times)]),
            "span": (started + times[min(1, len(losses))], ended),
            "syncs": [(step, reason, float(drift)) for step, reason, drift in events],
            "finished": len(losses) == total,
            "looks": looks,
            "validation_loss": validation,
            "bytes": {purpose: entry.bytes for (_, purpose), entry in ledger.entries().items()},
        }

    results = run_replicas(replicas, replica)
    mean = [sum(values) / replicas for values in zip(*(result["losses"] for result in results))]
    return {**results[0], "losses": mean}
