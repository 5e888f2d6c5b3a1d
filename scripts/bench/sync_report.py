"""Tables and a plot of what `sync_quality.py` measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.harness import GIB

COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D31", "#999999")
# Over all ranks whatever the policy; the traffic of the policies is the rest.
_EVERY_STEP = ("loss", "agreement", "validation", "grad_norm")


def replica_bytes(result: dict[str, Any]) -> int:
    """What one rank handed to collectives that the policy decides about, the decisions included."""
    return sum(count for purpose, count in result["bytes"].items() if purpose not in _EVERY_STEP)


def sync_rate(result: dict[str, Any]) -> float:
    """Share of the steps that synchronised; a forced sync at the end is none of them."""
    if result["sync"]["policy"] == "every_step":
        return 1.0
    taken = [step for step, reason, _ in result["syncs"] if reason not in ("evaluation", "checkpoint")]
    return len(taken) / max(len(result["losses"]), 1)


def summary(result: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """One row; base: every_step of the same seed."""
    steps, total = len(result["losses"]), replica_bytes(result)
    tail = result["losses"][-max(1, steps // 10) :]
    row = {
        "cell": result["cell"],
        "seed": result["seed"],
        "steps": steps,
        "finished": result["finished"],
        "validation_loss": result["validation_loss"],
        "training_loss_of_last_tenth": sum(tail) / max(len(tail), 1),
        "sync_rate": sync_rate(result),
        "gib": total / GIB,
        "greatest_drift": max((drift for *_, drift in result["syncs"]), default=0.0),
        "seconds": result["seconds"],
        "looks": result.get("looks", []),
    }
    if base is not None and base["finished"]:
        row["loss_above_every_step"] = result["validation_loss"] / base["validation_loss"] - 1
        row["bytes_saved"] = 1 - total / replica_bytes(base)
    return row


def line(result: dict[str, Any]) -> str:
    row = summary(result, None)
    return (
        f"{row['cell']:<16} seed {row['seed']}  validation {row['validation_loss']:.4f}  sync rate "
        f"{row['sync_rate']:6.1%}  {row['gib']:8.3f} GiB  {row['seconds']:.0f} s"
        + ("" if row["finished"] else f"  stopped after {row['steps']} steps")
    )


def write(results: list[dict[str, Any]], folder: Path, missing: Mapping[str, str] | None = None) -> None:
    """results.json (all of it but the curves) and results.md; `missing`: cells without a result, and why."""
    base = {result["seed"]: result for result in results if result["cell"] == "every_step"}
    rows = [summary(result, base.get(result["seed"])) for result in results]
    rows.sort(key=lambda row: (row["seed"], -row["gib"]))  # cells end in any order
    settings = results[0]["settings"] if results else {}
    whole = {"settings": settings, "cells": rows, "missing": dict(missing or {})}
    (folder / "results.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / "results.md").write_text(markdown(rows, settings, whole["missing"]))


def exit_code(folder: Path) -> int:
    """0 where every cell of results.json came to its last step and none is missing, else 1."""
    told = json.loads((folder / "results.json").read_text())
    whole = told["cells"] and not told["missing"] and all(row["finished"] for row in told["cells"])
    return 0 if whole else 1


def markdown(rows: list[dict[str, Any]], settings: dict[str, Any], missing: Mapping[str, str]) -> str:
    head = (
        "| cell | seed | validation loss | above every_step | sync rate | GiB | bytes saved | drift |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    body = ""
    for row in rows:
        above, saved = row.get("loss_above_every_step"), row.get("bytes_saved")
        loss = f"{row['validation_loss']:.4f}" if row["finished"] else f"stopped after {row['steps']} steps"
        body += (
            f"| {row['cell']} | {row['seed']} | {loss} | {'' if above is None else f'{above:+.1%}'} "
            f"| {row['sync_rate']:.1%} | {row['gib']:.3f} | {'' if saved is None else f'{saved:.1%}'} "
            f"| {row['greatest_drift']:.1e} |\n"
        )
    told = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
    lacking = "; ".join(f"{cell}: {why}" for cell, why in missing.items())
    lacking = f"\nWithout a result: {lacking}.\n" if lacking else ""
    return f"{told}\n\n{head}{body}{lacking}{on_the_way(rows)}"


def on_the_way(rows: list[dict[str, Any]]) -> str:
    """How far above every_step the mean of a cell's replicas was at each look; nothing without looks."""
    base = {
        (row["seed"], step): loss
        for row in rows
        if row["cell"] == "every_step"
        for step, loss in row["looks"]
    }
    steps = sorted({step for _, step in base})
    if not steps:
        return ""
    text = "\nValidation loss of the mean weights on the way, of other cells above that of every_step:\n\n"
    text += f"| cell | seed | {' | '.join(map(str, steps))} |\n| --- | --- |{' --- |' * len(steps)}\n"
    for row in rows:
        looks, told = dict(map(tuple, row["looks"])), []
        for step in steps:
            loss, every = looks.get(step), base.get((row["seed"], step))
            if loss is None or every is None:
                told.append("")
            else:
                told.append(f"{loss:.4f}" if row["cell"] == "every_step" else f"{loss / every - 1:+.1%}")
        text += f"| {row['cell']} | {row['seed']} | {' | '.join(told)} |\n"
    return text


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Training loss of the first seed with sync events along its foot; validation loss against bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    curves, trade = figure.subplots(1, 2)
    first = [result for result in results if result["seed"] == results[0]["seed"]]
    colours = {result["cell"]: COLOURS[index % len(COLOURS)] for index, result in enumerate(first)}
    for index, result in enumerate(first):
        losses, colour = result["losses"], colours[result["cell"]]
        window = max(1, len(losses) // 50)
        smooth = [
            sum(losses[max(0, i - window) : i + 1]) / (i + 1 - max(0, i - window)) for i in range(len(losses))
        ]
        curves.plot(smooth, color=colour, linewidth=1.2, label=result["cell"])
        if result["sync"]["policy"] != "every_step":
            steps = [step for step, *_ in result["syncs"]]
            height = 0.02 + 0.025 * index
            curves.plot(
                steps, [height] * len(steps), "|", color=colour, transform=curves.get_xaxis_transform()
            )
    curves.set_yscale("log")
    curves.set_xlabel("step (marks: synchronisations)")
    curves.set_ylabel("training loss, mean of the replicas (nats per token)")
    curves.legend(fontsize=8)
    for result in results:
        if result["finished"]:
            x, y = replica_bytes(result) / GIB, result["validation_loss"]
            trade.plot(x, y, "o", color=colours.get(result["cell"], "#999999"))
            trade.annotate(result["cell"], (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    trade.set_xscale("log")
    trade.set_xlabel("GiB handed to collectives between replicas, per rank")
    trade.set_ylabel("validation loss after the last step (nats per token)")
    for axes in (curves, trade):
        axes.grid(alpha=0.25, linewidth=0.6)
    figure.savefig(path, dpi=120)
