"""Cells of `sync_quality.py` as whole runs of train.py: a replica in each process, on its own GPU if any."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from scripts.bench.sync_threads import VALIDATION_SEQUENCES, late

ROOT = Path(__file__).resolve().parents[2]
Train = Callable[[Path, dict[str, Any], dict[str, Any], argparse.Namespace, float], dict[str, Any]]
"""Trains a cell (folder, size, `[sync]`, options) for at most so many seconds; returns what came of it."""
GoThrough = Callable[[argparse.Namespace, Train], None]


def arguments(
    folder: Path, size: dict[str, Any], options: argparse.Namespace, sync: dict[str, Any]
) -> list[str]:
    """Of train.py."""
    batch = options.batch or size["batch"]
    keys = {
        "job.config_file": ROOT / "train_configs" / "debug_model.toml",
        "job.dump_folder": folder,
        "job.description": folder.name,
        **{f"model.{key}": value for key, value in size["model"].items()},
        "training.seq_len": size["seq_len"],
        "training.local_batch_size": batch,
        "training.max_norm": 0,
        "training.mixed_precision_param": "bfloat16" if options.device == "cuda" else "float32",
        "training.steps": options.steps,
        "optimizer.name": "Dion",
        "optimizer.lr": options.lr or size["lr"],
        "optimizer.momentum": options.momentum,
        "optimizer.dion.rank_fraction": options.rank_fraction,
        "optimizer.dion.error_feedback": options.error_feedback,
        "optimizer.scalar.lr": options.scalar_lr or options.lr or size["lr"],
        "lr_scheduler.warmup_steps": options.lr_warmup,
        "lr_scheduler.decay_ratio": options.decay,
        "data.validation_fraction": 0.05,
        "validation.enable": True,
        "validation.freq": options.steps,  # an evaluation is a sync point: only the last step has one
        "validation.steps": max(1, VALIDATION_SEQUENCES // (batch * options.replicas)),
        "validation.local_batch_size": batch,
        "training.dataloader.num_workers": 2 if options.device == "cuda" else 0,
        "metrics.log_freq": 1,
        "parallelism.data_parallel_replicate_degree": options.replicas,
        "parallelism.data_parallel_shard_degree": 1,
        "debug.seed": options.seed,
        **{f"sync.{key}": value for key, value in sync.items()},
    }
    return [
        f"--{key}={json.dumps(value) if isinstance(value, bool) else value}"
        for key, value in keys.items()
        if value is not None
    ]


def train_process(rank: int, port: int, go_through: GoThrough, options: argparse.Namespace) -> None:
    """One replica of all cells, one after the other, in one process group; the first says which come."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.replicas),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    # For the moments before and after a run, which has a handler of its own.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")

    def say(told: Any = None) -> Any:
        box = [told]
        dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def train(*cell: Any) -> dict[str, Any]:
        say(cell)
        return train_cell(rank, *cell)

    if rank == 0:
        go_through(options, train)
        say()
    else:
        while cell := say():
            train_cell(rank, *cell)
    dist.destroy_process_group()


def train_cell(
    rank: int, folder: Path, size: dict[str, Any], sync: dict[str, Any], options: argparse.Namespace,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """This replica's part of a run of train.py; what came of it, for the first."""
    from titanforge.interruption import EXIT_DONE, EXIT_INTERRUPTED, EXIT_NONFINITE
    from train import main as train

    limit = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    limit.daemon = True
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was cut off
        limit.start()
    dist.barrier()
    with contextlib.redirect_stdout(io.StringIO()):
        code = train(arguments(folder, size, options, sync))
    limit.cancel()
    if code not in (EXIT_DONE, EXIT_INTERRUPTED, EXIT_NONFINITE):
        raise SystemExit(f"a cell ended with {code}: {folder.name}")
    return read_run(folder, options.steps) if rank == 0 else {}


def read_run(folder: Path, steps: int) -> dict[str, Any]:
    """What `train_threads` returns, from the folder of a run of train.py, which may have been cut."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    trained = [record for record in records if "loss" in record]
    validation = [record["validation_loss"] for record in records if "validation_loss" in record]
    last, totals = trained[-1] if trained else {"step": 0}, {}
    for key, value in last.items():
        if key.startswith("comm/") and key.endswith("_bytes"):
            purpose = key.split("/")[2].removesuffix("_bytes")
            totals[purpose] = totals.get(purpose, 0) + value
    return {
        "losses": [record["loss"] for record in trained],
        "step_seconds": late([record["step_seconds"] for record in trained]),
        "syncs": [(r["step"] - 1, r["sync"], r["sync/drift"] or 0.0) for r in records if "sync" in r],
        "finished": last["step"] == steps and bool(validation),
        "validation_loss": validation[-1] if validation else float("nan"),
        "bytes": totals,
    }


def train_processes(go_through: GoThrough, options: argparse.Namespace) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(train_process, args=(port, go_through, options), nprocs=options.replicas)
