"""Train a Llama of GPT-2 124M's blocks from scratch in four recipes that differ in the optimizer alone: does
fusing it, or storing bf16, change what is learned? (The question of the FORGE paper's figure 4.)

    python scripts/papers/forge_from_scratch.py                    # about 5 minutes on one H200
    python scripts/papers/forge_from_scratch.py --quick            # a toy, on a CPU too

The arms run one after the other through train.py, with the same seed and so the same data in the same order:

    master     bf16 weights with fp32 masters and fp32 AdamW states, ordinary engine: the reference
    unfused    bf16 weights and states, ordinary engine
    fused      the same inside backward (forge.enable)
    fused-sr   the same inside backward, weights and states rounded stochastically

12 blocks of width 768 (85 million weights, as in GPT-2 124M) on bytes of the Python standard library, which
needs no download; with 257 tokens the embedding is small, unlike GPT-2's. No clipping, so that the engines do
the same. An arm that is done is not run again: the same command goes on. Writes `forge_from_scratch.png`
(four curves) and `forge_from_scratch.json` (final losses).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from titanforge.metrics.plot import plot_runs
from titanforge.metrics.sinks.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[2]
BF16 = {"training.dtype": "bfloat16", "optimizer.state_dtype": "bfloat16"}
FUSED = {"forge.enable": True}
ARMS: dict[str, dict[str, Any]] = {
    "master": {"training.dtype": "bfloat16", "optimizer.master_weights": "float32"},
    "unfused": BF16,
    "fused": BF16 | FUSED,
    "fused-sr": BF16 | FUSED | {"optimizer.master_weights": "stochastic_rounding"},
}
REFERENCE = "master"
MODEL = {"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12, "hidden_dim": 2048}
TOY = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96}


def arguments(folder: Path, options: argparse.Namespace, recipe: Mapping[str, Any]) -> list[str]:
    """The command line of one arm."""
    sizes = TOY if options.quick else MODEL
    keys: dict[str, Any] = {
        "job.dump_folder": folder,
        "job.description": f"from scratch, {folder.name}",
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        **{f"model.{key}": value for key, value in sizes.items()},
        "optimizer.name": "AdamW",
        "optimizer.lr": options.lr,
        "lr_scheduler.warmup_steps": max(1, options.steps // 10),
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": 0.1,
        "training.dataset": "python_stdlib",
        "training.steps": options.steps,
        "training.seq_len": options.seq_len,
        "training.local_batch_size": options.batch,
        "training.max_norm": 0.0,
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": 1,
        "validation.enable": True,
        "validation.freq": max(1, options.steps // 4),
        "validation.steps": 2 if options.quick else 20,
        "data.validation_fraction": 0.05,
        "debug.seed": options.seed,
        **recipe,
    }
    return [
        f"--{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in keys.items()
    ]


def run_arm(name: str, options: argparse.Namespace) -> None:
    """Train one arm unless it is done. Raises RuntimeError with the end of its log if it fails."""
    folder = options.out / name
    done = folder / "done.json"
    words = arguments(folder, options, ARMS[name])
    if done.exists():
        if json.loads(done.read_text())["arguments"] == words:
            print(f"[{name}] done before", flush=True)
            return
        raise RuntimeError(f"{folder} holds a run of other arguments: choose another --out, or remove it")
    shutil.rmtree(folder, ignore_errors=True)  # of an arm that was cut off
    folder.mkdir(parents=True)
    start = time.perf_counter()
    with (folder / "log.txt").open("w") as log:
        try:
            code = subprocess.run(
                [sys.executable, str(ROOT / "train.py"), *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=options.timeout,
                cwd=ROOT,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    if code:
        tail = (folder / "log.txt").read_text(errors="replace")[-2000:]
        why = f"no end within {options.timeout:.0f} s" if code == -1 else f"exit code {code}"
        raise RuntimeError(f"arm {name}: {why}\n{tail}")
    seconds = time.perf_counter() - start
    done.write_text(json.dumps({"arguments": words, "seconds": seconds}))
    print(f"[{name}] {seconds:.0f} s", flush=True)


def summary_of(records: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Per arm: the mean of the last tenth of the training losses, the last validation loss, and how far both
    are from the reference's; positive is worse.
    """
    found: dict[str, dict[str, float]] = {}
    for name, lines in records.items():
        losses = [line["loss"] for line in lines if "loss" in line]
        last = losses[-max(1, len(losses) // 10) :]
        validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
        found[name] = {
            "steps": len(losses),
            "first_loss": losses[0],
            "loss": sum(last) / len(last),
            "validation_loss": validation[-1],
        }
    if REFERENCE in found:
        for one in found.values():
            for key in ("loss", "validation_loss"):
                one[f"{key}_above_reference"] = one[key] - found[REFERENCE][key]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/forge_from_scratch"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds for one arm")
    parser.add_argument("--quick", action="store_true", help="a toy: 12 steps of 2 x 32 tokens")
    options = parser.parse_args(argv)
    if options.quick:
        options.steps, options.batch, options.seq_len, options.lr = 12, 2, 32, 3e-3
    options.out = options.out.absolute()
    failed = []
    for name in options.arms:
        try:
            run_arm(name, options)
        except RuntimeError as error:
            failed.append(name)
            print(f"[{name}] FAILED: {error}", flush=True)
    records = {
        name: read_metrics(options.out / name / "metrics.jsonl")
        for name in ARMS
        if (options.out / name / "done.json").exists()
    }
    if records:
        summary = summary_of(records)
        (options.out / "forge_from_scratch.json").write_text(json.dumps(summary, indent=1))
        plot_runs(records, options.out / "forge_from_scratch.png", "From scratch, four recipes")
        for name, one in summary.items():
            print(f"{name:<10} loss {one['loss']:.4f}  validation {one['validation_loss']:.4f}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
