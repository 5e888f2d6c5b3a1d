"""A cell of `sync_quality.py` with replicas as threads: policies and optimizers around a bare loop."""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from scripts.bench.replicas import ThreadGroup, ThreadLedger, run_replicas
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


def crops(data: torch.Tensor, rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [rows, length] tokens and labels, from places drawn on the CPU: the same on any device."""
    starts = torch.randint(len(data) - length - 1, (rows,), generator=torch.Generator().manual_seed(seed))
    places = starts[:, None] + torch.arange(length + 1)
    found = data[places.to(data.device)].long()
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


def get_ready(size: dict[str, Any], options: Any) -> None:
    """Read the text and compile, once for all cells of this process, and before several threads would."""
    torch.set_num_threads(1)
    alone = argparse.Namespace(**vars(options) | {"replicas": 1, "steps": 2, "cell_seconds": 1e9})
    train_threads(size, {"policy": "every_step"}, alone)


def train_threads(size: dict[str, Any], sync: dict[str, Any], options: Any) -> dict[str, Any]:
    """One cell with replicas as threads."""
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

    def replica(group: ThreadGroup) -> dict[str, Any]:
        rank = group.rank()
        model = new_model(size, options)
        optimizer = build_optimizer(model, settings, "float32")
        ledger, policy = ThreadLedger(), build_sync_policy(Sync(**sync))
        replication = Replication(group) if replicas > 1 else None  # type: ignore[arg-type]
        policy.attach(model, replication, ledger, optimizer)
        losses, events, times = [], [], [time.monotonic()]
        started = time.time() - time.monotonic()
        stop = torch.zeros((), device=device)
        for step in range(options.steps):
            stop.fill_(time.monotonic() > end)
            if step % 20 == 0:
                group.exchange(stop, lambda slots: slots[0].clone())
                if bool(stop):
                    break
            x, y = crops(train, batch * replicas, length, 1_000_003 * options.seed + step)
            optimizer.set_lr(lr_factor(step, options.lr_warmup, options.steps, options.decay, "linear", 0.0))
            optimizer.zero_grad()
            optimizer.begin_step(1)
            policy.begin_step(1, tokens)
            policy.before_backward(0)
            loss = model(x[rank::replicas], None, None, y[rank::replicas])
            (loss / policy.gradient_divisor(tokens)).backward()
            policy.reduce_gradients()
            policy.step(optimizer, torch.ones((), device=device), torch.ones((), device=device))
            losses.append(loss.detach() / tokens[0])
            times.append(time.monotonic())
            events += [(step, event["sync"], event["sync/drift"]) for event in policy.take_events()]
        if device.type == "cuda":
            torch.cuda.synchronize()
        ended = time.time()
        policy.synchronize("evaluation")
        validation = torch.zeros((), device=device)
        with torch.no_grad():
            # All replicas have the same weights now; one evaluates.
            for index in range(VALIDATION_SEQUENCES // VALIDATION_BATCH if rank == 0 else 0):
                x, y = crops(held_out, VALIDATION_BATCH, length, 7 + index)
                validation += model(x, None, None, y) / (VALIDATION_SEQUENCES * length)
        return {
            "losses": torch.stack(losses).tolist() if losses else [],
            "step_seconds": late([after - before for before, after in itertools.pairwise(times)]),
            "span": (started + times[min(1, len(losses))], ended),
            "syncs": [(step, reason, float(drift)) for step, reason, drift in events],
            "finished": len(losses) == options.steps,
            "validation_loss": float(validation),
            "bytes": {purpose: entry.bytes for (_, purpose), entry in ledger.entries().items()},
        }

    results = run_replicas(replicas, replica)
    mean = [sum(values) / replicas for values in zip(*(result["losses"] for result in results))]
    return {**results[0], "losses": mean}
