"""Final loss, sync rate and bytes of the sync policies: equal model, data and order, other moments to talk.

    python scripts/bench/sync_quality.py --size small --steps 300          # threads of one CPU process
    python scripts/bench/sync_quality.py --size gpt --steps 800            # one replica for each GPU, NCCL
    python scripts/bench/sync_quality.py --size gpt --mode threads --replicas 4   # all on one GPU
    python scripts/bench/sync_quality.py --size gpt-14m --beside 6 --seconds 270 --compile --tune 5e-3 1e-2
    python scripts/bench/sync_quality.py --thresholds --cell far policy=scheduled interval=100

Cells: every step, those of `--cell`, CurvaDion's RMMC at several thresholds, each followed by the schedule
with the sync rate that it came to. `processes` are whole runs of train.py, a replica each on its own GPU (or
CPU process); `threads` are replicas inside one process, with the same policies and optimizers around a bare
training loop: as many as wanted on one device, nothing to be learnt about time. With `--beside` several cells
of such threads run at the same time, each in a process of its own, dealt over the GPUs; with `--seconds` too
they take as many steps, at most --steps, as let all cells of the first seed end in time. With `--together`
all cells begin at once and go at one pace, and the number of steps is settled on the way.

A cell that is done is not run again. One that takes longer than --cell-seconds, or goes on at the end of
--seconds, is stopped and called unfinished; none is begun that would not end in time if it took as long as
the longest so far. Writes cells/*.json, after each of them results.json and results.md, which names cells
that have no result, and at the end results.png. The exit status is 0 where all cells came to their last step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench import sync_report  # noqa: E402
from scripts.bench.peak_rates import at_edge, best_rate  # noqa: E402
from scripts.bench.python_text import write_corpus  # noqa: E402
from scripts.bench.sync_beside import go_beside  # noqa: E402
from scripts.bench.sync_cells import (  # noqa: E402
    cell_file,
    cells,
    done,
    matched,
    own_options,
    store,
    with_seed,
)
from scripts.bench.sync_processes import Train, train_processes  # noqa: E402
from scripts.bench.sync_threads import get_ready, train_threads  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {
    # Flavor and the keys that change it; sequences of a replica and step, their length, peak rate.
    "tiny": {
        "model": {
            "name": "llama3", "flavor": "debugmodel", "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2,
        },
        "batch": 32, "seq_len": 32, "lr": 6e-2,
    },
    "small": {
        "model": {
            "name": "llama3", "flavor": "debugmodel", "dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2,
        },
        "batch": 16, "seq_len": 64, "lr": 2e-2,
    },
    "gpt": {  # 38 million weights: CurvaDion's architecture at half the width of its 160M
        "model": {"name": "gpt2", "flavor": "debugmodel_modern", "dim": 512, "n_layers": 12, "n_heads": 4},
        "batch": 32, "seq_len": 512, "lr": 5e-3,
    },
    "gpt-5m": {  # the same, for 3000 steps of many cells: with four replicas 20 tokens a weight, as CurvaDion
        "model": {"name": "gpt2", "flavor": "debugmodel_modern", "dim": 256, "n_layers": 6, "n_heads": 2},
        "batch": 32, "seq_len": 256, "lr": 1e-2,
    },
    "gpt-14m": {  # the same architecture, for several cells on one GPU
        "model": {"name": "gpt2", "flavor": "debugmodel_modern", "dim": 384, "n_layers": 8, "n_heads": 3},
        "batch": 32, "seq_len": 512, "lr": 5e-3,
    },
}  # fmt: skip


def fitting_steps(options: argparse.Namespace, train: Train) -> int:
    """Steps that a cell of every_step takes in `--fit` seconds, by a short one; at most `--steps`."""
    probe = argparse.Namespace(**vars(options) | {"steps": 30})
    found = attempt("probe", {"policy": "every_step"}, probe, train, options.cell_seconds)
    assert found is not None
    return max(30, min(options.steps, int(options.fit / found["step_seconds"])))


def tuned_rate(options: argparse.Namespace, train: Train) -> float:
    """The rate of `--tune` with which every_step ends lowest, after `--tune-steps`: a policy is compared with
    a run that could not simply take larger steps."""
    found = {}
    for rate in options.tune:
        probe = argparse.Namespace(**vars(options) | {"steps": options.tune_steps, "lr": rate})
        every = {"policy": "every_step"}
        result = attempt(f"rate {rate:g}", every, probe, train, options.cell_seconds)
        if result and result["finished"]:
            found[rate] = result["validation_loss"]
    if not found:
        raise SystemExit("--tune: no rate came to its last step")
    if told := at_edge(found):
        print(f"--tune: {told}", flush=True)
    return best_rate(found)


def go_through(options: argparse.Namespace, train: Train) -> None:
    """All cells that are not done, as time allows, with a report after each."""
    end, longest = time.monotonic() + options.seconds, 0.0
    results: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    options.seed = options.seeds[0]
    if options.tune:
        options.lr = tuned_rate(options, train)
    if options.fit:
        options.steps = fitting_steps(options, train)
    for seed in options.seeds:
        options.seed = seed
        waiting, begun = cells(options), set()
        while waiting:
            name, sync = next(iter(waiting.items()))
            del waiting[name]
            begun.add(name)
            begin = time.monotonic()
            left = end - begin if end - begin > longest else 0.0
            found = attempt(name, sync, options, train, min(left, options.cell_seconds))
            longest = max(longest, time.monotonic() - begin)
            if not found:
                missing[with_seed(name, options)] = "not begun, --seconds are nearly over"
            else:
                results.append(found)
                sync_report.write(results, options.output, missing)
                new = matched(found, options)
                waiting = {n: s for n, s in new.items() if n not in begun} | waiting
    sync_report.write(results, options.output, missing)
    if results:
        sync_report.draw(results, options.output / "results.png")
        print((options.output / "results.md").read_text())
    else:
        print("no cell was run")


def attempt(
    name: str, keys: dict[str, Any], options: argparse.Namespace, train: Train, seconds: float
) -> dict[str, Any] | None:
    """A cell's result, from before or, where there are seconds left, from now."""
    sync, options = own_options(keys, options)
    found = done(name, sync, options)
    if seconds <= 0 or (found and found["finished"]):
        return found
    begin, folder = time.monotonic(), options.output / "runs" / cell_file(name, options).stem
    result = train(folder, SIZES[options.size], sync, options, seconds)
    store(name, sync, options, result, time.monotonic() - begin)
    return done(name, sync, options)


def train_here(
    folder: Path, size: dict[str, Any], sync: dict[str, Any], options: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    return train_threads(size, sync, argparse.Namespace(**vars(options) | {"cell_seconds": seconds}))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("-o", "--output", type=Path, default=ROOT / "outputs" / "sync_quality")
    found.add_argument("--size", choices=SIZES, default="small")
    found.add_argument("--mode", choices=["auto", "threads", "processes"], default="auto")
    found.add_argument("--replicas", type=int, help="default: GPUs if there are several, else 4")
    found.add_argument("--steps", type=int, default=300)
    found.add_argument("--batch", type=int, help="sequences of a replica and step")
    found.add_argument("--thresholds", type=float, nargs="*", default=[0.1, 0.3, 0.5, 0.7])
    found.add_argument("--intervals", type=int, nargs="*", default=[])
    found.add_argument(
        "--cell", nargs="+", action="append", default=[], metavar=("NAME", "KEY=VALUE"),
        help="one more cell, with these keys of [sync] or of the optimizer beside those of all; repeatable",
    )  # fmt: skip
    found.add_argument(
        "--match", type=float, nargs="*", default=[0.1, 0.3, 0.5, 0.7],
        help="thresholds whose sync rate a schedule is to have",
    )  # fmt: skip
    found.add_argument("--warmup", type=int, default=8, help="first steps, all of which synchronise")
    found.add_argument(
        "--local-update", choices=["orthonormal", "momentum", "gradient"], default="orthonormal"
    )
    found.add_argument("--local-lr", type=float)
    found.add_argument("--lr", type=float)
    found.add_argument("--tune", type=float, nargs="+", default=[], help="rates, the best of which is taken")
    found.add_argument("--tune-steps", type=int, default=150)
    found.add_argument("--scalar-lr", type=float, help="of AdamW for the other weights; default: --lr")
    found.add_argument("--momentum", type=float, default=0.95)
    found.add_argument("--rank-fraction", type=float, default=0.125)
    found.add_argument("--error-feedback", action="store_true")
    found.add_argument("--lr-warmup", type=int, default=10)
    found.add_argument("--decay", type=float, default=0.2, help="share of the steps in which the rate falls")
    found.add_argument("--seeds", type=int, nargs="*", default=[0])
    found.add_argument("--fit", type=float, help="as many steps as every_step takes in so many seconds")
    found.add_argument("--cell-seconds", type=float, default=1e9, help="a cell is stopped after them")
    found.add_argument("--beside", type=int, help="cells at the same time, with --mode threads on one device")
    found.add_argument(
        "--together", action="store_true",
        help="all cells at the same time, in step with each other, each in one of --beside processes "
        "(default then: as many as cells): as many steps, at most --steps, as end in --seconds",
    )  # fmt: skip
    found.add_argument(
        "--look", type=int, default=0, metavar="STEPS",
        help="validate the mean of the replicas' weights every so many steps, multiples of 10; threads alone",
    )  # fmt: skip
    found.add_argument("--compile", action="store_true", help="blocks by torch.compile; threads alone")
    found.add_argument("--graph", action="store_true", help="steps as CUDA graphs; threads on a GPU alone")
    found.add_argument("--corpus", type=Path, help="JSON Lines for threads; default: the standard library")
    found.add_argument(
        "--corpus-mib", type=int, help="of this machine's Python sources, written to --corpus if not there"
    )
    found.add_argument("--seconds", type=float, default=1e9, help="no cell is begun after them")
    found.set_defaults(pace=None)  # each cell of --together gets its own
    return found


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    gpus = torch.cuda.device_count()
    options.device = "cuda" if gpus else "cpu"
    options.replicas = options.replicas or (gpus if gpus > 1 else 4)
    if options.together and options.mode != "processes":
        options.beside = options.beside or max(len(cells(options)), len(options.tune))
    if options.beside and options.mode != "processes":
        options.mode = "threads"
    if options.mode == "auto":
        options.mode = "processes" if gpus > 1 and options.replicas <= gpus else "threads"
    if options.mode == "threads" and options.device == "cpu":
        torch.set_num_threads(1)
    of_threads = ("beside", "compile", "corpus", "corpus_mib", "graph", "look", "together")
    if options.mode == "processes" and (given := [key for key in of_threads if getattr(options, key)]):
        raise SystemExit(
            f"--mode threads alone has {', '.join('--' + key.replace('_', '-') for key in given)}"
        )
    if options.graph and options.device == "cpu":
        raise SystemExit("--graph: there is no CUDA device here")
    if options.look % 10:
        raise SystemExit(f"--look {options.look}: must be a multiple of 10")
    if options.together and (options.match or options.beside < len(cells(options))):
        raise SystemExit("--together takes no --match, and a process for each cell (--beside)")
    if options.beside and options.fit:
        raise SystemExit("--beside plans steps by --seconds; --fit is for cells one after the other")
    options.output = options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.corpus_mib:
        options.corpus = (options.corpus or options.output / "corpus.jsonl").absolute()
        if not options.corpus.exists():
            told = write_corpus(options.corpus, options.corpus_mib << 20)
            print(f"corpus: {told['documents']} files, {told['bytes'] / 2**20:.1f} MiB", flush=True)
    if options.mode == "processes":
        train_processes(go_through, options)
    elif options.beside:
        share = max(1, (os.cpu_count() or 1) // options.beside)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        return go_beside(SIZES[options.size], options)
    else:
        if options.compile or options.graph:
            ready = argparse.Namespace(**vars(options) | {"seed": 0})
            if told := get_ready(SIZES[options.size], ready):
                print(f"steps are launched as they are; {told}", flush=True)
                options.graph = False
        go_through(options, train_here)
    return sync_report.exit_code(options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
