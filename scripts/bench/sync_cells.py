"""Cells of `sync_quality.py`: their names and `[sync]`, what is stored of each."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench import sync_report
from titanforge.config.sections import Sync

OF_A_CELL = ("lr", "momentum", "rank_fraction", "error_feedback")
"""Options that a cell may have of its own."""
_NOT_SETTINGS = (
    "output", "fit", "tune", "tune_steps", "cell_seconds", "seconds", "thresholds", "intervals", "cell",
    "match", "seed", "seeds", "beside", "compile", "graph", "together", "pace", "look",
    "corpus_mib",
)  # fmt: skip


def local_keys(options: argparse.Namespace) -> dict[str, Any]:
    """`[sync]` of all cells with local steps."""
    return {
        "warmup_steps": options.warmup,
        "local_update": options.local_update,
        "local_lr": options.local_lr,
    }


def cells(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """`[sync]` of each cell that is known beforehand, in the order of their turns."""
    local = local_keys(options)
    named = {
        name: ({} if keys.get("policy") == "every_step" else local) | keys
        for name, keys in map(cell_of, options.cell)
    }
    return {
        "every_step": {"policy": "every_step"},
        **named,
        **{f"rmmc {tau}": {"policy": "rmmc", "threshold": tau, **local} for tau in options.thresholds},
        **{f"scheduled {h}": {"policy": "scheduled", "interval": h, **local} for h in options.intervals},
    }


def cell_of(words: list[str]) -> tuple[str, dict[str, Any]]:
    """NAME KEY=VALUE ... of `--cell`; values as in JSON, or text without quotes."""
    name, keys = words[0], {}
    for word in words[1:]:
        key, found, value = word.partition("=")
        if not found or key not in (*Sync.__dataclass_fields__, *OF_A_CELL):
            raise SystemExit(
                f"--cell {name}: {word!r} is no KEY=VALUE of [sync] nor of {', '.join(OF_A_CELL)}"
            )
        try:
            keys[key] = json.loads(value)
        except json.JSONDecodeError:
            keys[key] = value
    return name, keys


def matched(result: dict[str, Any], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The schedule with the sync rate, after the warm-up, that an rmmc cell of `--match` came to."""
    if result["sync"].get("threshold") not in options.match or not result["finished"]:
        return {}
    later = [step for step, *_ in result["syncs"] if step >= options.warmup]
    interval = max(1, round((options.steps - options.warmup) / max(len(later), 1)))
    if interval == 1:  # every_step on states
        return {}
    sync = {key: value for key, value in result["sync"].items() if key not in ("threshold", "max_interval")}
    return {f"scheduled {interval}": sync | {"policy": "scheduled", "interval": interval}}


def own_options(
    keys: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, Any], argparse.Namespace]:
    """A cell's `[sync]`, and the options with its own among them."""
    own = {key: value for key, value in keys.items() if key in OF_A_CELL}
    sync = {key: value for key, value in keys.items() if key not in OF_A_CELL}
    return sync, argparse.Namespace(**vars(options) | own)


def cell_file(name: str, options: argparse.Namespace) -> Path:
    return options.output / "cells" / f"{name.replace(' ', '_')}_seed{options.seed}.json"


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    found = {key: value for key, value in vars(options).items() if key not in _NOT_SETTINGS}
    return found | {"corpus": str(options.corpus) if options.corpus else None}


def store(
    name: str, sync: dict[str, Any], options: argparse.Namespace, result: dict[str, Any], seconds: float
) -> None:
    whole = {
        "cell": name, "seed": options.seed, "sync": sync, **result,
        "seconds": seconds, "settings": settings_of(options),
    }  # fmt: skip
    path = cell_file(name, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole))
    print(sync_report.line(whole), file=sys.stderr, flush=True)


def done(name: str, sync: dict[str, Any], options: argparse.Namespace) -> dict[str, Any] | None:
    """A cell's result, if it has one of the same `[sync]` and settings."""
    path = cell_file(name, options)
    stored = json.loads(path.read_text()) if path.exists() else {}
    same = stored.get("settings") == settings_of(options) and stored.get("sync") == sync
    return stored if same else None


def with_seed(name: str, options: argparse.Namespace) -> str:
    return f"{name} (seed {options.seed})"
