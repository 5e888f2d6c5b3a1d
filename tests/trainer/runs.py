"""Small runs of train.py: their arguments, how to run several in one group of processes, what they left."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.distributed_harness import REPOSITORY, run_distributed

SMALL = {
    "job.config_file": str(REPOSITORY / "train_configs" / "debug_model.toml"),
    "job.description": "test",
    "model.dim": 32,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.n_kv_heads": 1,
    "training.dataset": "jsonl",
    "training.seq_len": 64,
    "data.num_streams": 4,
    "lr_scheduler.warmup_steps": 2,
    "metrics.enable_plot": False,  # drawing takes longer than training
}


def argv(folder: Path | str, corpus: Path | str, **overrides: Any) -> list[str]:
    """Arguments of train.py; ``training__steps=3`` overrides ``training.steps``, None leaves a key out."""
    keys = {**SMALL, "job.dump_folder": folder, "training.dataset_path": corpus}
    keys |= {name.replace("__", "."): value for name, value in overrides.items()}
    return [f"--{key}={_text(value)}" for key, value in keys.items() if value is not None]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)


def write_corpus(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """JSON Lines of short documents of very different lengths, so that ranks count different tokens."""
    chooser = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "of", "the", "in", "a", "loop", "=", "return", "\n"]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(documents):
            text, length = "", chooser.choice([1] * 12 + [20] * 3 + [700])
            while len(text) < length:
                text += chooser.choice(words) + " "
            file.write(json.dumps({"text": text}) + "\n")
    return path


def _train_each(rank: int, world_size: int, runs: list[list[str]]) -> list[tuple[int, str]]:
    from train import main

    results = []
    for arguments in runs:
        gc.freeze()  # a run begins with a collection, which need not look at what the last one left
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code = main(arguments)
        results.append((code, errors.getvalue()))
    return results


def train_each(world_size: int, runs: list[list[str]], timeout: float = 240) -> list[list[tuple[int, str]]]:
    """Run train.py's ``main`` once per list of arguments, one after the other, in one group of processes.

    Returns:
        For every run, each rank's exit code and what it wrote to stderr.
    """
    by_rank = run_distributed(_train_each, world_size, runs, timeout=timeout)
    return [list(each) for each in zip(*by_rank, strict=True)]


def train_all(world_size: int, runs: list[list[str]], timeout: float = 240) -> list[str]:
    """``train_each`` for runs that must succeed; returns rank 0's stderr of each."""
    results = train_each(world_size, runs, timeout)
    for arguments, ranks in zip(runs, results, strict=True):
        assert [code for code, _ in ranks] == [0] * world_size, (arguments, ranks)
    return [ranks[0][1] for ranks in results]


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def training_lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if "loss" in line]


def column(folder: Path, key: str) -> list[Any]:
    """One metric over the run's steps, which must be 1, 2, 3 … without gap or repetition."""
    found = training_lines(folder)
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return [line[key] for line in found]


def assert_same_steps(folder: Path, wanted: Path, steps: int | None = None) -> None:
    """Loss, gradient norm, learning rate and tokens of every step, bit for bit."""
    for key in ("loss", "grad_norm", "lr", "tokens_seen"):
        assert column(folder, key) == column(wanted, key)[:steps], key


def greatest_difference(folder: Path, wanted: Path, key: str = "loss") -> float:
    ours, theirs = column(folder, key), column(wanted, key)
    assert len(ours) == len(theirs)
    return max(abs(a - b) for a, b in zip(ours, theirs))


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint by flat name, read without titanforge."""
    tensors: dict[str, Any] = {}
    _load_state_dict(
        tensors, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    flat = dict(_flatten(tensors, ""))
    assert any(name.startswith("model.") for name in flat), sorted(flat)
    state = json.loads((folder / "state.json").read_text())
    # Which collectives it took, an interruption included, is no part of what is trained.
    (state.get("train_state") or {}).pop("comm", None)
    return flat | {f"json:{name}": json.dumps(value, sort_keys=True) for name, value in state.items()}


def _flatten(value: Any, prefix: str):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def assert_same_checkpoint(folder: Path, wanted: Path, parts: tuple[str, ...] = ("",)) -> None:
    """Weights, optimizer states, counters and data position, bit for bit."""
    ours, theirs = read_checkpoint(folder), read_checkpoint(wanted)
    assert ours.keys() == theirs.keys()
    different = [
        name
        for name, value in theirs.items()
        if name.startswith(parts)
        and not (torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value)
    ]
    assert not different


def distance(folder: Path, wanted: Path) -> float:
    """Greatest difference between the weights of two checkpoints."""
    ours, theirs = read_checkpoint(folder), read_checkpoint(wanted)
    names = [name for name in theirs if name.startswith("model.")]
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in names)
