"""What matrix optimizers learn in equal tokens: GPT-2 Small's blocks on real text, seven arms, one protocol.

    python scripts/bench/matrix_quality.py                         # planned for 8 minutes of one H200
    python scripts/bench/matrix_quality.py --device cpu --tiny     # a toy, anywhere

AdamW, Muon, RMNP, Dion with rank fractions 1 and 1/16, Dobb with 1 and 16 blocks: the rows of Table 4 of the
Dobb paper, at its scale "Small" but for far fewer steps of fewer tokens. The protocol is the paper's (its
section 6, appendix E): update scale tau sqrt(max(m, n)) with tau = 0.2, AdamW for embeddings, biases and
norms, weight decay 0.1, warm-up over a tenth of the steps, cosine to 1 % of the peak, the same seed and so
the same sequences in the same order, and one peak rate for all, chosen with AdamW: `--lrs` are tried for
`--probe-steps` each. `--select each` chooses a rate for each arm instead, from as many probes; with one rate
nothing is tried. As many steps as fit into `--seconds` are taken, the same in all arms, unless `--steps` is
given.

The text is Python sources, the standard library's and those of the installed packages, as bytes: 85 million
weights in the blocks and a small embedding. Arms run beside each other on `--devices` GPUs. One that is done
is not run again, so the same command goes on where it stopped. Writes runs/ARM/metrics.jsonl,
matrix_quality.json, .md and .png.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from scripts.bench import matrix_quality_report
from titanforge.metrics.sinks.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[2]
MOMENTUM = {"optimizer.momentum": 0.95}
ARMS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.name": "AdamW", "optimizer.beta1": 0.9, "optimizer.beta2": 0.95},
    "muon": {"optimizer.name": "Muon", **MOMENTUM},
    "rmnp": {"optimizer.name": "RMNP", **MOMENTUM},
    "dion-1": {"optimizer.name": "Dion", **MOMENTUM, "optimizer.dion.rank_fraction": 1.0},
    "dion-1-16": {"optimizer.name": "Dion", **MOMENTUM, "optimizer.dion.rank_fraction": 1 / 16},
    "dobb-1": {"optimizer.name": "Dobb", **MOMENTUM, "optimizer.dobb.blocks": 1},
    "dobb-16": {"optimizer.name": "Dobb", **MOMENTUM, "optimizer.dobb.blocks": 16},
}
BASELINE = "adamw"
LAST = ("rmnp", "dion-1")  # what is told apart without them comes first; the slowest at the end
SMALL = {"dim": 768, "n_layers": 12, "n_heads": 12}
TOY = {"dim": 32, "n_layers": 2, "n_heads": 2}
SLOWER = 1.2  # the longest step of an arm over AdamW's, as far as the budget is planned
# What may differ between two calls that go on with each other's arms.
_NOT_SETTINGS = ("out", "arms", "seconds", "end", "cell_seconds", "devices", "in_process", "corpus")


# ---------------------------------------------------------------- text


def python_sources() -> list[Path]:
    """Python files of the standard library and of every folder of packages on `sys.path`, once each.

    In the order of their names' hashes: a beginning of it holds some of every package.
    """
    roots = {Path(sysconfig.get_paths()["stdlib"])}
    roots |= {Path(entry) for entry in sys.path if entry and Path(entry).is_dir()}
    found = {
        Path(folder, name): hashlib.blake2b(f"{Path(folder).name}/{name}".encode()).digest()
        for root in roots
        if root not in (ROOT, Path.cwd())
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith(".py")
    }
    return sorted(found, key=found.__getitem__)


def write_corpus(path: Path, most_bytes: int) -> dict[str, int]:
    """JSON Lines of distinct files, up to `most_bytes` of text.

    Files of a few lines and generated tables are left out: it takes those of 512 bytes to 256 KiB.
    """
    seen: set[bytes] = set()
    total = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as lines:
        for file in python_sources():
            if total >= most_bytes:
                break
            try:
                content = file.read_bytes() if 512 <= file.stat().st_size <= 1 << 18 else b""
                text = content.decode("utf-8")
            except (OSError, UnicodeDecodeError):  # unreadable, or of another encoding
                continue
            digest = hashlib.blake2b(content, digest_size=16).digest()
            if content and digest not in seen:
                seen.add(digest)
                lines.write(json.dumps({"text": text}) + "\n")
                total += len(content)
    unfinished.rename(path)
    return {"documents": len(seen), "bytes": total}


# ---------------------------------------------------------------- one arm


def arguments(folder: Path, recipe: dict[str, Any], lr: float, steps: int, options: Any) -> list[str]:
    """The command line of train.py for one arm."""
    keys: dict[str, Any] = {
        "job.dump_folder": folder,
        "job.description": f"matrix quality, {folder.name}",
        "model.name": "gpt2",
        "model.flavor": "debugmodel",
        **{f"model.{key}": value for key, value in (TOY if options.tiny else SMALL).items()},
        "optimizer.lr": lr,
        "optimizer.weight_decay": 0.1,
        # Weights and products in bfloat16 beside fp32 masters and states, as autocast would have it.
        "optimizer.master_weights": "float32",
        "lr_scheduler.warmup_steps": max(1, steps // 10),
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": 0.01,
        "training.dtype": "bfloat16",
        "training.dataset": "jsonl",
        "training.dataset_path": options.corpus,
        "training.steps": steps,
        "training.seq_len": options.seq_len,
        "training.local_batch_size": options.batch,
        "training.max_norm": 1.0,
        "training.dataloader.num_workers": 2 if options.device == "cuda" else 0,
        "data.tokenizer": options.tokenizer,
        "data.document_mask": False,
        "data.validation_fraction": 0.2 if options.tiny else 0.04,
        "validation.enable": True,
        "validation.freq": max(1, steps // 5),
        "validation.steps": options.validation_steps,
        "validation.local_batch_size": options.batch,
        "activation_checkpoint.mode": "none",
        "compile.enable": options.device == "cuda",
        "metrics.log_freq": 1,
        "debug.seed": options.seed,
        **recipe,
    }
    return [
        f"--{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in keys.items()
    ]


def train_here(words: list[str], log: Path) -> int:
    """train.py inside this process: for toys, where starting Python is most of an arm's time."""
    from train import main as train

    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = train(words)
    log.write_text(told.getvalue())
    return code


def train_apart(words: list[str], log: Path, device: int, options: argparse.Namespace) -> int | None:
    """train.py in a process of its own on GPU `device`: exit code, None after `--cell-seconds`."""
    environment = {**os.environ}
    if options.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    else:  # what is visible here is what the numbers count
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[device] if any(visible) else str(device)
    with log.open("w") as output:
        try:
            return subprocess.run(
                [sys.executable, str(ROOT / "train.py"), *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=options.cell_seconds,
                env=environment,
                cwd=ROOT,
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def run_arm(name: str, arm: str, lr: float, steps: int, device: int, options: argparse.Namespace) -> None:
    """Train one arm into runs/`name` unless it is done; an arm that fails is told and leaves no done.json."""
    folder = options.out / "runs" / name
    words = arguments(folder, ARMS[arm], lr, steps, options)
    if done_of(folder):
        print(f"[{name}] done before", flush=True)
        return
    if time.perf_counter() > options.end:
        print(f"[{name}] not begun: --seconds are over", flush=True)
        return
    shutil.rmtree(folder, ignore_errors=True)  # of an arm that was cut off
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    start = time.perf_counter()
    code = train_here(words, log) if options.in_process else train_apart(words, log, device, options)
    seconds = time.perf_counter() - start
    if code:
        tail = log.read_text(errors="replace")[-1500:]
        print(f"[{name}] FAILED: exit code {code}\n{tail}", flush=True)
        return
    records = read_metrics(folder / "metrics.jsonl")
    result = {
        "arm": arm, "lr": lr, "steps": steps, "seconds": seconds, "finished": code is not None,
        "device": device, "arguments": words, **measured(records, options),
    }  # fmt: skip
    (folder / "done.json").write_text(json.dumps(result, indent=1))
    print(
        f"[{name}] lr {lr:.3g}  validation {result['validation_loss']:.4f}  "
        f"{result['step_ms']:.1f} ms a step, {result['trained_steps']} steps, {seconds:.0f} s"
        + ("" if result["finished"] else "  STOPPED: --cell-seconds"),
        flush=True,
    )


def measured(records: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Losses and times of one run. The median step is of the second half, after everything is compiled."""
    trained = [record for record in records if "loss" in record]
    losses = [record["loss"] for record in trained]
    validation = [record["validation_loss"] for record in records if "validation_loss" in record]
    seconds = statistics.median([record["step_seconds"] for record in trained[len(trained) // 2 :]])
    tail = losses[-max(1, len(losses) // 10) :]
    return {
        "trained_steps": len(trained),
        "tokens": len(trained) * options.batch * options.seq_len,
        "first_loss": losses[0],
        "loss": sum(tail) / len(tail),
        "validation_loss": validation[-1] if validation else float("nan"),
        "step_ms": seconds * 1e3,
        "tokens_per_second": options.batch * options.seq_len / seconds,
        "failed_blocks": trained[-1].get("dobb_failed_blocks"),
    }


def done_of(folder: Path) -> dict[str, Any] | None:
    path = folder / "done.json"
    return json.loads(path.read_text()) if path.exists() else None


# ---------------------------------------------------------------- all of them


def side_by_side(work: Sequence[Callable[[int], None]], devices: int) -> None:
    """Run each piece with the number of a device that no other piece has at that time."""
    if devices == 1:  # in the main thread, which alone may set signal handlers
        for piece in work:
            piece(0)
        return
    free: queue.Queue[int] = queue.Queue()
    for device in range(devices):
        free.put(device)

    def one(piece: Callable[[int], None]) -> None:
        device = free.get()
        try:
            piece(device)
        finally:
            free.put(device)

    with ThreadPoolExecutor(devices) as pool:
        for future in [pool.submit(one, piece) for piece in work]:
            future.result()


def settle(options: argparse.Namespace) -> dict[str, Any]:
    """Peak rates and steps of all arms: from plan.json if there is one, else from probes.

    Raises:
        SystemExit: plan.json is of other settings, or no probe came to its end.
    """
    path = options.out / "plan.json"
    settings = {key: value for key, value in vars(options).items() if key not in _NOT_SETTINGS}
    if path.exists():
        plan = json.loads(path.read_text())
        if plan["settings"] != settings:
            raise SystemExit(
                f"{options.out} holds runs of other settings: choose another --out, or remove it"
            )
        return plan
    probed = list(ARMS) if options.select == "each" else [BASELINE]
    tried = {(arm, lr): f"probe-{arm}-{lr:.3g}" for arm in probed for lr in options.lrs}
    lrs = dict.fromkeys(ARMS, options.lrs[0])
    results = []
    if len(options.lrs) > 1 or not options.steps:
        side_by_side(
            [
                lambda device, name=name, arm=arm, lr=lr: run_arm(
                    name, arm, lr, options.probe_steps, device, options
                )
                for (arm, lr), name in tried.items()
            ],
            options.devices,
        )
        found = {key: done_of(options.out / "runs" / name) for key, name in tried.items()}
        results = [result for result in found.values() if result and result["finished"]]
        for arm in probed:
            losses = {result["lr"]: result["validation_loss"] for result in results if result["arm"] == arm}
            if not losses:
                raise SystemExit(f"no probe of {arm} came to its end: see {options.out}/runs/probe-{arm}-*")
            # NaN, of a rate that diverged, compares with nothing.
            lrs[arm] = min(losses, key=lambda lr: losses[lr] if losses[lr] == losses[lr] else float("inf"))
        if options.select == "shared":
            lrs = dict.fromkeys(ARMS, lrs[BASELINE])
    steps = options.steps or steps_that_fit(
        results,
        left=options.end - time.perf_counter(),
        rounds=-(-len(ARMS) // options.devices),
    )
    plan = {
        "settings": settings,
        "lrs": lrs,
        "steps": steps,
        "probes": [{key: r[key] for key in ("arm", "lr", "validation_loss", "seconds")} for r in results],
    }
    path.write_text(json.dumps(plan, indent=1))
    return plan


def steps_that_fit(probes: Sequence[dict[str, Any]], *, left: float, rounds: int) -> int:
    """Steps of each arm, if `rounds` of them one after the other are to end within `left` seconds.

    An arm is its steps, each at most `SLOWER` times a probe's, and what a probe took beside its own: start,
    compilation (the least of them: later ones find the compiler's cache filled), evaluations.
    """
    step = min(probe["step_ms"] for probe in probes) / 1e3
    beside = min(probe["seconds"] - probe["trained_steps"] * step for probe in probes)
    return max(20, int((left / rounds - beside) / (SLOWER * step)))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, default=Path("outputs/matrix_quality"))
    found.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    found.add_argument("--devices", type=int, help="arms beside each other, a GPU each; default: all GPUs")
    found.add_argument("--tiny", action="store_true", help="a toy, to prove the script anywhere")
    found.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    found.add_argument("--lrs", type=float, nargs="+", default=[8.85e-4, 1.77e-3, 3.54e-3])
    found.add_argument("--select", choices=["shared", "each"], default="shared", help="whose peak rate")
    found.add_argument("--probe-steps", type=int, default=100, help="of a rate that is tried")
    found.add_argument("--steps", type=int, help="default: as many as fit into --seconds")
    found.add_argument("--seconds", type=float, default=470.0, help="for everything")
    found.add_argument("--cell-seconds", type=float, default=240.0, help="an arm is stopped after them")
    found.add_argument("--batch", type=int, default=32, help="sequences of a step")
    found.add_argument("--seq-len", type=int, default=1024)
    found.add_argument("--validation-steps", type=int, default=20, help="batches of an evaluation")
    found.add_argument("--seed", type=int, default=5000)
    found.add_argument("--tokenizer", default="byte", help="as data.tokenizer")
    found.add_argument("--corpus", type=Path, help="JSON Lines, written if not there; default: in --out")
    found.add_argument("--corpus-mib", type=int, default=64, help="text to gather")
    return found


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    begin = time.perf_counter()
    if options.tiny:
        options.batch, options.seq_len, options.validation_steps, options.corpus_mib = 2, 32, 2, 1
        options.lrs, options.probe_steps, options.steps = [1e-2, 2e-2], 3, options.steps or 12
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    if options.device == "cuda" and (options.devices or 1) > gpus:
        raise SystemExit(
            f"{gpus} GPUs: --devices {options.devices or 1} needs more (--device cpu --tiny: none)"
        )
    options.end = begin + options.seconds
    options.in_process = options.tiny and options.devices is None
    options.devices = options.devices or max(gpus, 1)
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    options.corpus = (options.corpus or options.out / "corpus.jsonl").absolute()
    if not options.corpus.exists():
        told = write_corpus(options.corpus, options.corpus_mib << 20)
        print(f"corpus: {told['documents']} files, {told['bytes'] / 2**20:.1f} MiB", flush=True)
    plan = settle(options)
    print(
        f"{plan['steps']} steps of {options.batch * options.seq_len} tokens, rates {plan['lrs']}", flush=True
    )
    side_by_side(
        [
            lambda device, arm=arm: run_arm(arm, arm, plan["lrs"][arm], plan["steps"], device, options)
            for arm in sorted(options.arms, key=lambda arm: LAST.index(arm) + 1 if arm in LAST else 0)
        ],
        options.devices,
    )
    results = {arm: done for arm in ARMS if (done := done_of(options.out / "runs" / arm))}
    if results:
        matrix_quality_report.write(options.out, results, plan, time.perf_counter() - begin)
    return 0 if all(arm in results and results[arm]["finished"] for arm in options.arms) else 1


if __name__ == "__main__":
    sys.exit(main())
