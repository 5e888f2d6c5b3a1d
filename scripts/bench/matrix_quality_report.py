"""Table and curves of what `matrix_quality.py` trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.harness import machine_facts, markdown_table, write_report
from scripts.bench.peak_rates import at_edge, losses_of_rates
from scripts.bench.sync_report import COLOURS
from titanforge.metrics.sinks.jsonl import read_metrics

# Table 4 of the Dobb paper, column Small: 10,000 steps of 491,520 tokens of OpenWebText.
PAPER = {
    "adamw": 3.044, "muon": 3.004, "rmnp": 3.083, "dion-1": 3.002, "dion-1-16": 3.108,
    "dobb-1": 3.017, "dobb-16": 3.026, "dobb-1-cholesky": 3.016,  # the last of Table 16
}  # fmt: skip
# (ahead, behind) where the paper's difference is several times its seed noise of 0.003.
EXPECTED = (
    ("muon", "adamw"), ("dion-1", "adamw"), ("dobb-1", "adamw"), ("dobb-16", "adamw"),
    ("dobb-16", "dion-1-16"), ("adamw", "rmnp"), ("adamw", "dion-1-16"),
)  # fmt: skip


def order(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The paper's order pair by pair: how far the one that should be ahead is ahead here, in nats."""
    return [
        {
            "ahead": ahead,
            "behind": behind,
            "paper": PAPER[behind] - PAPER[ahead],
            "here": results[behind]["validation_loss"] - results[ahead]["validation_loss"],
        }
        for ahead, behind in EXPECTED
        if ahead in results
        and behind in results
        and results[ahead]["finished"]
        and results[behind]["finished"]
    ]


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    header = [
        "arm", "peak lr", "validation loss", "from AdamW", "training loss, last tenth", "steps", "Mtokens",
        "paper, Small",
    ]  # fmt: skip
    base = results.get("adamw")
    rows = []
    for arm, one in results.items():
        comparable = base is not None and base["finished"] and one["finished"]
        rows.append(
            [
                arm,
                f"{one['lr']:.3g}",
                f"{one['validation_loss']:.4f}" if one["finished"] else "stopped",
                f"{one['validation_loss'] - base['validation_loss']:+.4f}" if comparable and base else None,
                f"{one['loss']:.4f}",
                one["trained_steps"],
                one["tokens"] / 1e6,
                f"{PAPER[arm]:.3f}" if arm in PAPER else None,
            ]
        )
    return markdown_table(header, rows)


def tried(probes: Sequence[Mapping[str, Any]]) -> str:
    """Arms by the rates of their short runs."""
    losses = losses_of_rates(probes)
    rates = sorted({rate for found in losses.values() for rate in found})
    rows = [
        [arm, *(f"{found[rate]:.4f}" if rate in found else None for rate in rates)]
        for arm, found in losses.items()
    ]
    return markdown_table(["arm", *(f"{rate:.3g}" for rate in rates)], rows)


def write(out: Path, results: Mapping[str, Mapping[str, Any]], plan: Mapping[str, Any], took: float) -> None:
    """matrix_quality.json, .md and .png in `out`; `took`: seconds of this call."""
    pairs = order(results)
    report = {
        "plan": plan,
        "seconds_of_this_call": took,
        "arms": dict(results),
        "order": pairs,
        "machine": machine_facts(),
    }
    text = [table(results), "", markdown_table(
        ["ahead", "behind", "nats, paper", "nats, here"],
        [[p["ahead"], p["behind"], f"{p['paper']:+.3f}", f"{p['here']:+.4f}"] for p in pairs],
    )]  # fmt: skip
    text += ["", "Validation loss of the runs that chose the peak rates:" if plan["probes"] else "One rate."]
    text += ["", tried(plan["probes"]), ""] if plan["probes"] else []
    for arm, losses in losses_of_rates(plan["probes"]).items():
        text += [f"{arm}: {told}"] if (told := at_edge(losses)) else []
    write_report(out, "matrix_quality", report, "\n".join(text))
    draw(out, results)


def draw(out: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Training losses (means over a fiftieth of the run), validation losses, and the last of these by arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    training, validation, final = figure.subplots(1, 3, width_ratios=(2, 2, 1.3))
    for index, (arm, one) in enumerate(results.items()):
        colour = COLOURS[index]
        records = read_metrics(out / "runs" / arm / "metrics.jsonl")
        per_step = one["tokens"] / one["trained_steps"] / 1e6
        losses = [(r["step"] * per_step, r["loss"]) for r in records if "loss" in r]
        window = max(1, len(losses) // 50)
        smooth = [
            sum(loss for _, loss in losses[max(0, i - window + 1) : i + 1]) / min(window, i + 1)
            for i in range(len(losses))
        ]
        training.plot([tokens for tokens, _ in losses], smooth, color=colour, linewidth=1.3, label=arm)
        points = [(r["step"] * per_step, r["validation_loss"]) for r in records if "validation_loss" in r]
        label = f"{arm} ({one['validation_loss']:.4f})"
        validation.plot(*zip(*points), "o-", color=colour, linewidth=1.3, markersize=4, label=label)
        final.plot(one["validation_loss"], arm, "o", color=colour)  # no bar: the axis does not begin at 0
    training.set_ylabel("training loss (nats per token)")
    validation.set_ylabel("validation loss (nats per token)")
    for axes in (training, validation):
        axes.set_xlabel("million tokens")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.25, linewidth=0.6, which="both")
    found = [one["validation_loss"] for one in results.values()]
    span = max(found) - min(found)
    final.set_xlim(min(found) - 0.25 * span - 1e-3, max(found) + 0.1 * span + 1e-3)
    final.set_xlabel("validation loss after the last step")
    final.grid(alpha=0.25, linewidth=0.6)
    final.invert_yaxis()
    figure.savefig(out / "matrix_quality.png", dpi=120)
