"""What parts of a step cost on several ranks: the optimizer's call on shards, the decision of `rmmc`.

    torchrun --nproc_per_node=2 scripts/bench/rank_calls.py optimizer    # GPT-2 XL's shape, FSDP
    torchrun --nproc_per_node=2 scripts/bench/rank_calls.py decision     # whole replicas, local steps alone
    torchrun --nproc_per_node=2 scripts/bench/rank_calls.py optimizer decision --device cpu --tiny

Both run the trainer on the job of `--config`. `optimizer` times `step()` in each of T = 9 steps in a row, one
of which refreshes Dobb's bases, with the device idle before and after. `decision` trains local steps with
`scheduled`, which asks nobody, and with `rmmc`, turn by turn: the difference of whole steps, the host running
ahead as ever; and what the decision takes on an idle device, with no local step launched before it: norms,
their all-reduces, the host's wait. Where
a kernel updates momenta it leaves their norms, and the decision reads no momentum; the table says for how
many layers.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from scripts.bench.harness import machine_facts, markdown_table, write_report
from scripts.bench.matrix_steps import warm_bases
from titanforge.config import load_config, validate_config
from titanforge.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
PERIOD = 9
METHODS = ("AdamW fused", "AdamW", "RMNP", "Dobb", "Dobb, refresh in the call", "Dion", "Muon")
SENT = ("momenta", "updates", "factors", "row norms", "second moments")
"""What rules of matrices exchange."""
NEVER = {"scheduled": {"interval": 10**9}, "rmmc": {"threshold": 1e9}}
"""Policies that take local steps alone."""
TINY = {
    "model.dim": 64, "model.n_layers": 2, "model.n_heads": 4, "model.vocab_size": 512, "training.seq_len": 64,
}  # fmt: skip


def job(args: argparse.Namespace, name: str, keys: dict[str, Any]) -> list[str]:
    """Arguments of one run, which saves and evaluates nothing."""
    settings: dict[str, Any] = {
        "job.config_file": args.config,
        "job.dump_folder": args.out / name.replace(",", "").replace(" ", "_"),
        "model.vocab_size": 50304,
        "training.steps": 10**6,
        "training.dtype": "bfloat16",
        "training.local_batch_size": args.batch,
        "training.dataloader.num_workers": 0,
        "optimizer.state_dtype": "bfloat16",
        "optimizer.momentum": 0.95,
        "metrics.log_freq": 10**6,
        "metrics.enable_plot": "false",
        "checkpoint.enable": "false",
        "compile.enable": "false",
        **(TINY if args.tiny else {}),
        **keys,
        **dict(word.split("=", 1) for word in args.set),
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def trainer_of(args: argparse.Namespace, name: str, keys: dict[str, Any]) -> Trainer:
    config = load_config(job(args, name, keys))
    validate_config(config, dist.get_world_size(), args.device)
    return Trainer(config, args.device)


def idle(device: str) -> None:
    """Until the device has done all it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Free what a run that is closed held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def timed(call: Callable[..., Any], device: str, milliseconds: list[float]) -> Callable[..., Any]:
    """The call from a moment at which all ranks are idle to one at which this rank's device is."""

    def around(*arguments: Any, **options: Any) -> Any:
        idle(device)
        dist.barrier()  # else it waits for whatever a slower rank is late by
        idle(device)
        begin = time.perf_counter()
        result = call(*arguments, **options)
        idle(device)
        milliseconds.append((time.perf_counter() - begin) * 1e3)
        return result

    return around


def optimizer_calls(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`step()` of each method over a period, on this rank's shards."""
    rows = []
    for method in args.methods:
        keys: dict[str, Any] = {
            "optimizer.name": method.split()[0].rstrip(","),
            "parallelism.data_parallel_shard_degree": -1,
            "optimizer.dion.rank_fraction": 1 / 16,
            "optimizer.dobb.blocks": 16,
            "optimizer.dobb.overlap_refresh": "false" if "in the call" in method else "true",
        }
        if method == "AdamW fused":
            keys["optimizer.implementation"] = "fused"
        trainer = trainer_of(args, method, keys)
        optimizer: Any = trainer.optimizer
        calls: list[float] = []
        try:
            if getattr(optimizer, "capture", None) is not None:
                warm_bases(optimizer)
            optimizer.step = timed(optimizer.step, args.device, calls)
            for _ in range(2 * PERIOD):
                trainer.train_step()
            sent = sum(e.bytes for (_, purpose), e in trainer.ledger.entries().items() if purpose in SENT)
        finally:
            trainer.close()
            del trainer, optimizer
            free_memory(args.device)
        last = calls[PERIOD:]
        rows.append(
            {
                "method": method,
                "mean of 9, ms": statistics.fmean(last),
                "median ms": statistics.median(last),
                "longest ms": max(last),
                "MB sent a step": sent / (2 * PERIOD) / 1e6,
            }
        )
        say(rows[-1])
    base = next((row["mean of 9, ms"] for row in rows if row["method"] == "AdamW fused"), None)
    for row in rows if base else []:
        row["x AdamW fused"] = row["mean of 9, ms"] / base
    return rows


def decision(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Local steps of `scheduled` and of `rmmc` in turns; then the decision alone."""
    rows = []
    for rule in args.rules:
        steps: dict[str, list[float]] = {policy: [] for policy in NEVER}
        alone: list[float] = []
        layers = given = 0
        for turn, policy in itertools.product(range(args.turns), NEVER):
            keys = {
                "optimizer.name": rule,
                "optimizer.dion.rank_fraction": 1 / 16,
                "parallelism.data_parallel_replicate_degree": dist.get_world_size(),
                "parallelism.data_parallel_shard_degree": 1,
                "sync.policy": policy,
                **{f"sync.{key}": value for key, value in NEVER[policy].items()},
            }
            trainer = trainer_of(args, f"{rule}_{policy}_{turn}", keys)
            policy_of_run: Any = trainer.sync
            if args.wait:
                policy_of_run._ahead = 0.0
            try:
                for _ in range(args.warmup):
                    trainer.train_step()
                idle(args.device)
                begin = time.perf_counter()
                for _ in range(args.steps):
                    trainer.train_step()
                idle(args.device)
                steps[policy].append((time.perf_counter() - begin) * 1e3 / args.steps)
                if policy == "rmmc":
                    policy_of_run._ahead = 0.0  # the whole decision in one call
                    policy_of_run.wants_sync = timed(policy_of_run.wants_sync, args.device, alone)
                    for _ in range(args.steps):
                        trainer.train_step()
                    layers, given = len(policy_of_run.layers), len(policy_of_run.squares)
            finally:
                trainer.close()
                del trainer, policy_of_run
                free_memory(args.device)
        plain, watched = (statistics.median(steps[policy]) for policy in NEVER)
        rows.append(
            {
                "rule": rule,
                "layers": layers,
                "norms from the update": given,
                "scheduled, ms a step": plain,
                "rmmc, ms a step": watched,
                "difference, %": (watched - plain) / plain * 100,
                "spread of scheduled, %": (max(steps["scheduled"]) - min(steps["scheduled"])) / plain * 100,
                "decision from idle, ms": statistics.median(alone),
                "of a step, %": statistics.median(alone) / watched * 100,
            }
        )
        say(rows[-1])
    return rows


def say(row: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        print(row, flush=True)


PARTS = {"optimizer": optimizer_calls, "decision": decision}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy shape, to prove the script on any machine")
    parser.add_argument("--config", type=Path, default=ROOT / "train_configs" / "gpt2_1.56b.toml")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank and step")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    parser.add_argument("--rules", nargs="+", default=["Dion", "Muon"], help="of the part `decision`")
    parser.add_argument(
        "--wait", action="store_true", help="of the part `decision`: launch U only once it is known"
    )
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the job")
    parser.add_argument("--out", type=Path, default=Path("outputs/rank_calls"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: use --device cpu --tiny to prove the script")
    own_group = not dist.is_initialized()
    if own_group and "RANK" not in os.environ:
        raise SystemExit(
            "several ranks are measured: torchrun --nproc_per_node=2 scripts/bench/rank_calls.py"
        )
    if args.device == "cpu":
        torch.set_num_threads(1)
    if own_group:  # one for all runs, which take it as they find it
        dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    report: dict[str, Any] = {"machine": machine_facts() | {"ranks": dist.get_world_size()}}
    table = ""
    for part in args.parts:
        report[part] = PARTS[part](args)
        header = list(dict.fromkeys(key for row in report[part] for key in row))
        table += markdown_table(header, [[row.get(key) for key in header] for row in report[part]]) + "\n"
        if dist.get_rank() == 0:
            write_report(args.out, "rank_calls", report, table)
    if own_group:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
