"""Final loss, sync rate and bytes of the sync policies on a small model and real text, on CPU replicas.

    python scripts/bench/sync_quality.py --steps 200 --replicas 4 -o outputs/sync_quality

Every arm trains the same model on the same data in the same order, replica by replica, on gloo processes of
this machine; arms differ in `[sync]` alone. Writes results.jsonl (a line an arm) and results.png (validation
loss against the bytes that one rank handed to collectives between replicas).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MODEL = {
    "model.dim": 64,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.n_kv_heads": 2,
    "training.seq_len": 64,
    "training.local_batch_size": 4,
    "metrics.log_freq": 1,
    "validation.enable": True,
    "validation.steps": 16,
    "validation.local_batch_size": 4,
    "data.validation_fraction": 0.05,
}


def arms(warmup: int) -> dict[str, dict[str, Any]]:
    """`[sync]` of each arm; local arms share the warm-up."""
    found: dict[str, dict[str, Any]] = {"every_step": {"policy": "every_step"}}
    for tau in (0.1, 0.2, 0.3, 0.5, 0.7):
        found[f"rmmc {tau}"] = {"policy": "rmmc", "threshold": tau, "warmup_steps": warmup}
    for update, lr in (("gradient", None), ("gradient", 1.0), ("momentum", 0.1)):
        name = f"rmmc 0.3, {update}" + ("" if lr is None else f" at {lr}")
        found[name] = found["rmmc 0.3"] | {"local_update": update, "local_lr": lr}
    for interval in (3, 5, 10, 20, 50):
        found[f"scheduled {interval}"] = {
            "policy": "scheduled", "interval": interval, "warmup_steps": warmup,
        }  # fmt: skip
    return found


def arguments(folder: Path, options: argparse.Namespace, sync: dict[str, Any]) -> list[str]:
    keys = {
        "job.config_file": ROOT / "train_configs" / "debug_model.toml",
        "job.dump_folder": folder,
        "job.description": folder.name,
        "optimizer.name": options.optimizer,
        "optimizer.lr": options.lr,
        "training.steps": options.steps,
        "validation.freq": options.steps,  # an evaluation is a sync point: only the last step has one
        "parallelism.data_parallel_replicate_degree": options.replicas,
        "parallelism.data_parallel_shard_degree": 1,
        **MODEL,
        **{f"sync.{key}": value for key, value in sync.items() if value is not None},
    }
    return [
        f"--{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in keys.items()
    ]


def _work(rank: int, world_size: int, port: int, runs: list[list[str]]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    from train import main

    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # one group for all arms
    for run in runs:
        with contextlib.redirect_stdout(io.StringIO()):
            code = main(run)
        if code:
            raise SystemExit(f"an arm ended with {code}: {run}")
    dist.destroy_process_group()


def summary(name: str, folder: Path, sync: dict[str, Any]) -> dict[str, Any]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    last = steps[-1]
    prefix, suffix = "comm/dp_replicate/", "_bytes"
    tail = [record["loss"] for record in steps[-max(1, len(steps) // 10) :]]
    return {
        "arm": name,
        **{f"sync.{key}": value for key, value in sync.items()},
        "steps": len(steps),
        "validation_loss": [r["validation_loss"] for r in records if "validation_loss" in r][-1],
        "training_loss_of_last_tenth": sum(tail) / len(tail),
        "sync_rate": last.get("sync/rate", 1.0),
        "replica_bytes": sum(v for k, v in last.items() if k.startswith(prefix) and k.endswith(suffix)),
        "greatest_drift": max((r["sync/drift"] or 0.0 for r in records if "sync" in r), default=0.0),
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for result in results:
        x, y = result["replica_bytes"] / 2**20, result["validation_loss"]
        axes.plot(x, y, "o", color="#0072B2")
        axes.annotate(result["arm"], (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("MiB handed to collectives between replicas, per rank")
    axes.set_ylabel("validation loss after the last step (nats per token)")
    axes.grid(alpha=0.25, linewidth=0.6)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "outputs" / "sync_quality")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--optimizer", default="Dion")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--arms", nargs="*", help="names, as the output has them; default: all")
    options = parser.parse_args(argv)
    known = arms(options.warmup)
    if unknown := set(options.arms or ()) - set(known):
        parser.error(f"--arms: {sorted(unknown)} unknown; there are {', '.join(known)}")
    chosen = {name: sync for name, sync in known.items() if not options.arms or name in options.arms}
    folders = {name: options.output / name.replace(" ", "_").replace(",", "") for name in chosen}
    runs = [arguments(folders[name], options, sync) for name, sync in chosen.items()]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_work, args=(options.replicas, port, runs), nprocs=options.replicas)
    results = [summary(name, folders[name], sync) for name, sync in chosen.items()]
    with open(options.output / "results.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(result) + "\n" for result in results)
    draw(results, options.output / "results.png")
    for result in results:
        print(
            f"{result['arm']:<28} validation {result['validation_loss']:.4f}  sync rate "
            f"{result['sync_rate']:6.1%}  {result['replica_bytes'] / 2**20:9.1f} MiB  drift "
            f"{result['greatest_drift']:.2e}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
