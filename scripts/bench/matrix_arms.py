"""Arms of `matrix_quality.py`: what each is called with, runs of them beside each other, what a run left."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import shutil
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.bench.beside import Place
from titanforge.metrics.sinks.jsonl import read_metrics

MOMENTUM = {"optimizer.momentum": 0.95}
# Table 4 is of Householder QR: the paper's Table 16 repeats its losses as that routine's.
HOUSEHOLDER = {"optimizer.dobb.qr": "householder"}
ARMS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.name": "AdamW", "optimizer.beta1": 0.9, "optimizer.beta2": 0.95},
    "muon": {"optimizer.name": "Muon", **MOMENTUM},
    "rmnp": {"optimizer.name": "RMNP", **MOMENTUM},
    "dion-1": {"optimizer.name": "Dion", **MOMENTUM, "optimizer.dion.rank_fraction": 1.0},
    "dion-1-16": {"optimizer.name": "Dion", **MOMENTUM, "optimizer.dion.rank_fraction": 1 / 16},
    "dobb-1": {"optimizer.name": "Dobb", **MOMENTUM, **HOUSEHOLDER, "optimizer.dobb.blocks": 1},
    "dobb-16": {"optimizer.name": "Dobb", **MOMENTUM, **HOUSEHOLDER, "optimizer.dobb.blocks": 16},
}
TABLE_4 = tuple(ARMS)
# The routine that is our default, faster and with fewer digits: only if asked for.
ARMS |= {f"dobb-{b}-cholesky": {**ARMS[f"dobb-{b}"], "optimizer.dobb.qr": "cholesky"} for b in (1, 16)}
BASELINE = "adamw"
SMALL = {"dim": 768, "n_layers": 12, "n_heads": 12}
TOY = {"dim": 32, "n_layers": 2, "n_heads": 2}
WARM_STEPS = 11  # Dobb compiles its refresh in the first step and, another, in the tenth
PACE_STEPS = 30
SETTLED = 5  # steps after which a run's pace is taken: by then its step is a CUDA graph
EVALUATIONS = 5
GRACE = 10.0  # seconds in which a run that was told to stop ends its step and says what it has
_CONTEXT_BYTES = 700 << 20  # of a process on a GPU, beside what its allocator knows


@dataclass(frozen=True)
class Run:
    """One call of train.py. Of `warm` and `pace` nobody reads the loss: they evaluate one batch."""

    name: str
    arm: str
    lr: float
    steps: int
    place: str
    kind: str  # warm, pace, probe, arm


def arguments(run: Run, options: argparse.Namespace) -> list[str]:
    """The command line of train.py."""
    batches = {"arm": options.validation_steps, "probe": max(1, options.validation_steps // 4)}
    keys: dict[str, Any] = {
        "job.dump_folder": options.out / "runs" / run.name,
        "job.description": f"matrix quality, {run.name}",
        "model.name": "gpt2",
        "model.flavor": "debugmodel",
        **{f"model.{key}": value for key, value in (TOY if options.tiny else SMALL).items()},
        "optimizer.lr": run.lr,
        "optimizer.weight_decay": 0.1,
        # Weights and products in bfloat16 beside fp32 masters and states, as autocast would have it.
        "optimizer.master_weights": "float32",
        "lr_scheduler.warmup_steps": max(1, run.steps // 10),
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": 0.01,
        "training.dtype": "bfloat16",
        "training.dataset": "jsonl",
        "training.dataset_path": options.corpus,
        "training.steps": run.steps,
        "training.seq_len": options.seq_len,
        "training.local_batch_size": options.batch,
        "training.max_norm": 1.0,
        "training.dataloader.num_workers": 1 if options.device == "cuda" else 0,
        "data.tokenizer": options.tokenizer,
        "data.document_mask": False,
        "data.validation_fraction": 0.2 if options.tiny else 0.04,
        "validation.enable": True,
        "validation.freq": max(1, run.steps // EVALUATIONS) if run.kind == "arm" else run.steps,
        "validation.steps": batches.get(run.kind, 1),
        "validation.local_batch_size": options.batch,
        "activation_checkpoint.mode": "none",
        "compile.enable": options.device == "cuda",
        # The same bits; and the host, which all arms share, launches once a step.
        "compile.cuda_graph": options.device == "cuda" and run.arm not in options.eager,
        "metrics.log_freq": 1,
        "metrics.enable_plot": False,
        "debug.seed": options.seed,
        **ARMS[run.arm],
    }
    return [
        f"--{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in keys.items()
    ]


# ---------------------------------------------------------------- where they run


def get_ready(device: str) -> None:
    """In a process of its own, while others do the same: imports, and the GPU's context."""
    import titanforge.trainer  # noqa: F401

    if device == "cuda":
        torch.ones((), device="cuda")


def train_here(words: list[str], log: Path) -> dict[str, Any]:
    """train.py inside this process: exit code, seconds, and the most bytes that it had of the GPU."""
    from train import main as train

    gpu, begin = torch.cuda.is_initialized(), time.perf_counter()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    with (
        log.open("w", buffering=1) as told,
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(told),
    ):
        code = train(words)
    gc.collect()
    peak = 0
    if gpu:
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()  # for the others
    return {"code": code, "seconds": time.perf_counter() - begin, "bytes": peak}


class Places:
    """A process for each place, on the GPUs in turn; made when the first run asks for one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._made = options, dict[str, Place]()

    def make(self, names: Sequence[str]) -> None:
        """Those of `names` that there are not yet, all of them at once."""
        for name in names:
            if name not in self._made and not self._options.in_process:
                self._made[name] = Place(visible(device_of(name, names, self._options), self._options))
                self._made[name].submit(get_ready, self._options.device)

    def close(self, names: Sequence[str] | None = None, kill: bool = False) -> None:
        for name in list(self._made) if names is None else names:
            if name in self._made:
                self._made.pop(name).close(kill)

    def run(self, runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
        """All of them, as many beside each other as they have places: what each left, by its name.

        One that is done is not run again. At `--seconds` they are told to stop; what failed is told and left
        out.
        """
        options, left = self._options, dict[str, dict[str, Any]]()
        going = {}
        for run in runs:
            folder = options.out / "runs" / run.name
            if run.kind != "warm" and (found := done_of(folder)):
                print(f"[{run.name}] done before", flush=True)
                left[run.name] = found
            elif time.perf_counter() > options.end:
                print(f"[{run.name}] not begun: --seconds are over", flush=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
                folder.mkdir(parents=True)
                call = train_here, arguments(run, options), folder / "log.txt"
                if options.in_process:  # for toys: starting Python is most of a run's time
                    left |= self._end(run, call[0](*call[1:]))
                else:
                    going[self._made[run.place].submit(*call)] = run
        waiting = set(going)
        for grace, tell in ((0.0, signal.SIGTERM), (GRACE, signal.SIGKILL)):
            limit = max(0.0, options.end - time.perf_counter()) + grace
            while waiting:
                begin = time.perf_counter()
                done, waiting = wait(waiting, limit, "FIRST_COMPLETED")
                limit -= time.perf_counter() - begin
                for future in done:
                    run = going[future]
                    if error := future.exception():
                        print(f"[{run.name}] FAILED: its process ended: {error}", flush=True)
                    else:
                        left |= self._end(run, future.result())
                if not done:  # all the time is over
                    for name in {going[future].place for future in waiting}:
                        self._made[name].stop(tell)
                    break
        return left

    def _end(self, run: Run, ended: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Keep and tell what a run left."""
        from titanforge.interruption import EXIT_DONE, EXIT_INTERRUPTED

        options, folder = self._options, self._options.out / "runs" / run.name
        if ended["code"] not in (EXIT_DONE, EXIT_INTERRUPTED):
            log = (folder / "log.txt").read_text(errors="replace")[-1500:]
            print(f"[{run.name}] FAILED: exit code {ended['code']}\n{log}", flush=True)
            return {}
        records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        trained = [record for record in records if "loss" in record]
        finished = ended["code"] == EXIT_DONE
        if not trained:
            print(f"[{run.name}] STOPPED before its first step: --seconds are over", flush=True)
            return {}
        begin = min(SETTLED, (len(trained) - 1) // 2)
        result = {
            "arm": run.arm, "lr": run.lr, "steps": run.steps, "finished": finished, "place": run.place,
            "seconds": ended["seconds"], "reserved_gib": ended["bytes"] / 2**30,
            "span": (trained[begin]["time"], trained[-1]["time"]), "spanned_steps": len(trained) - 1 - begin,
            **measured(records, trained, options),
        }  # fmt: skip
        (folder / "done.json").write_text(json.dumps(result, indent=1))
        print(
            f"[{run.name}] lr {run.lr:.3g}  validation {result['validation_loss']:.4f}  "
            f"{len(trained)} of {run.steps} steps, {ended['seconds']:.0f} s, "
            f"{result['reserved_gib']:.1f} GiB" + ("" if finished else "  STOPPED: --seconds are over"),
            flush=True,
        )
        return {run.name: result}


def device_of(place: str, places: Sequence[str], options: argparse.Namespace) -> int:
    return list(places).index(place) % options.devices


def visible(device: int, options: argparse.Namespace) -> dict[str, str]:
    """Environment of a process that sees this GPU alone. What is visible here is what the numbers count."""
    if options.device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": named[device] if any(named) else str(device)}


def fits(results: Mapping[str, Mapping[str, Any]], total: int) -> str:
    """What runs that have been alone would take beside each other, of `total` bytes of one GPU.

    Raises:
        SystemExit: more than there is.
    """
    need = sum(result["reserved_gib"] * 2**30 + _CONTEXT_BYTES for result in results.values())
    told = f"{len(results)} runs beside each other take {need / 2**30:.0f} of {total / 2**30:.0f} GiB"
    if need > total:
        raise SystemExit(f"{told}: choose a smaller --batch, fewer --arms or more --devices")
    return told


# ---------------------------------------------------------------- what a run left


def measured(
    records: Sequence[dict[str, Any]], trained: Sequence[dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """Losses of one run, and its median step, of the second half, beside whatever else ran."""
    losses = [record["loss"] for record in trained]
    validation = [record["validation_loss"] for record in records if "validation_loss" in record]
    seconds = statistics.median([record["step_seconds"] for record in trained[len(trained) // 2 :]])
    tail = [loss for loss in losses[-max(1, len(losses) // 10) :] if loss is not None]
    return {
        "trained_steps": len(trained),
        "tokens": len(trained) * options.batch * options.seq_len,
        "first_loss": losses[0],
        "loss": sum(tail) / len(tail) if tail else float("nan"),
        "validation_loss": validation[-1] if validation and validation[-1] is not None else float("nan"),
        "step_ms": seconds * 1e3,
        "failed_blocks": trained[-1].get("dobb_failed_blocks"),
    }


def own_seconds(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of the device that a step of each run takes, if runs beside each other share it evenly.

    From the spans between the first and the last step: a second that k runs share is 1/k of one to each.
    """
    spans = {name: result["span"] for name, result in results.items()}
    edges = sorted({edge for span in spans.values() for edge in span})
    own = dict.fromkeys(spans, 0.0)
    for begin, end in itertools.pairwise(edges):
        there = [name for name, span in spans.items() if span[0] <= begin and end <= span[1]]
        for name in there:
            own[name] += (end - begin) / len(there)
    return {name: own[name] / max(1, results[name]["trained_steps"] - 1) for name in spans}


def done_of(folder: Path) -> dict[str, Any] | None:
    path = folder / "done.json"
    return json.loads(path.read_text()) if path.exists() else None
