"""Loss and throughput of one or several runs as a PNG."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanforge.metrics.sinks.jsonl import read_metrics

logger = logging.getLogger(__name__)

# Okabe and Ito's colours: told apart by colour-blind readers and in grey print.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999900")


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(r["step"], float(r[key])) for r in records if isinstance(r.get(key), (int, float))]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over up to ``window`` points, fewer towards the ends; does not shift the curve."""
    means = []
    for i in range(len(values)):
        half = min(window // 2, i, len(values) - 1 - i)
        span = values[i - half : i + half + 1]
        means.append(sum(span) / len(span))
    return means


def run_labels(paths: Sequence[str | Path]) -> list[str]:
    """A short name for each file: the last folder, with as many parents as it takes to tell them apart."""
    folders = [Path(path).resolve().with_suffix("") for path in paths]
    # metrics.jsonl says nothing about the run, its folder does.
    parts = [f.parts[:-1] if f.name == "metrics" else f.parts for f in folders]
    depth = 1
    while depth < max(map(len, parts)) and len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    labels = ["/".join(p[-depth:]) for p in parts]
    return [label if labels.count(label) == 1 else f"{label} ({i + 1})" for i, label in enumerate(labels)]


def plot_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]], output: str | Path, title: str = "") -> Path:
    """Draw loss (with validation points) above throughput, against the step; dotted lines mark resumes.

    Args:
        runs: label → records as ``read_metrics`` gives them.
        output: PNG file; its folder is made.

    Raises:
        ValueError: no run has a finite loss to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not any(_series(records, key)[0] for records in runs.values() for key in ("loss", "validation_loss")):
        raise ValueError(f"nothing to plot: no loss in {', '.join(runs) or 'no run'}")
    # Figure without pyplot: no global state and no display, whatever MPLBACKEND says.
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, speed_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    several = len(runs) > 1
    all_losses: list[float] = []
    all_speeds: list[float] = []
    for index, (label, records) in enumerate(runs.items()):
        color = _COLORS[index % len(_COLORS)]
        steps, losses = _series(records, "loss")
        all_losses += losses
        name = label if several else "training"
        if len(losses) >= 40:
            # The raw curve stays visible behind its mean: smoothing must not hide a spike.
            loss_axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
            loss_axes.plot(steps, _smooth(losses, len(losses) // 20), color=color, linewidth=1.6, label=name)
        elif steps:
            marker = "." if len(steps) < 3 else None
            loss_axes.plot(steps, losses, color=color, linewidth=1.4, marker=marker, label=name)
        steps, losses = _series(records, "validation_loss")
        all_losses += losses
        if steps:
            name = f"{label}, validation" if several else "validation"
            last = f" (last {losses[-1]:.4f})"
            loss_axes.plot(
                steps, losses, "o", ms=5, mfc="white", mec=color, mew=1.3, label=name + last, zorder=3
            )
        for record in records:
            if record.get("resumed_from"):
                for axes in (loss_axes, speed_axes):
                    axes.axvline(record["resumed_from"], color=color if several else "0.5", ls=":", lw=1)
        _mark_syncs(loss_axes, records, color, index)
        steps, speeds = _series(records, "tokens_per_second")
        all_speeds += speeds
        speed_axes.plot(steps, speeds, color=color, linewidth=1.2, marker="." if len(steps) < 3 else None)
    finite = [loss for loss in all_losses if math.isfinite(loss)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 20:
        loss_axes.set_yscale("log")
    loss_axes.set_ylabel("loss (nats per token)")
    loss_axes.legend(frameon=False)
    loss_axes.set_title(title or ("training loss" if several else next(iter(runs))), loc="left")
    speed_axes.set_ylabel("tokens per second")
    speed_axes.set_ylim(bottom=0, top=1.08 * max(all_speeds, default=1.0))
    speed_axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    speed_axes.set_xlabel("step (dotted: resumed from a checkpoint)" if _any_resume(runs) else "step")
    for axes in (loss_axes, speed_axes):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    return output


def _mark_syncs(axes: Any, records: Sequence[Mapping[str, Any]], color: str, row: int) -> None:
    """A tick at each step at which replicas synchronised, along the foot of the loss curves: a row a run."""
    steps = sorted({record["step"] for record in records if "sync" in record})
    if steps:
        axes.plot(
            steps, [0.02 + 0.03 * row] * len(steps), "|", ms=7, mew=0.9, color=color,
            transform=axes.get_xaxis_transform(), label=f"replicas synchronised ({len(steps)}x)",
        )  # fmt: skip


def _any_resume(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    return any(record.get("resumed_from") for records in runs.values() for record in records)


def write_run_summary(dump_folder: str | Path, title: str = "") -> Path | None:
    """Plot ``<dump_folder>/metrics.jsonl`` as ``<dump_folder>/metrics.png``.

    A run that trained well must not fail for its picture: None, with a warning, if it cannot be drawn.
    """
    folder = Path(dump_folder)
    try:
        source = folder / "metrics.jsonl"
        return plot_runs({run_labels([source])[0]: read_metrics(source)}, folder / "metrics.png", title)
    except Exception as error:
        logger.warning("could not draw %s: %s: %s", folder / "metrics.png", type(error).__name__, error)
        return None
