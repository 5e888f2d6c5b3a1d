"""Tables and pictures of what scripts/bench/kernels.py measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def totals(
    results: list[dict[str, Any]], layer: Sequence[tuple[tuple[int, int], int]], layers: int
) -> list[dict[str, Any]]:
    """Sums over all linears of a model, where every shape of its layer was measured.

    layer: (shape, how many of it) of one layer.
    """
    summed = []
    for recipe, tokens in dict.fromkeys((r["recipe"], r["tokens"]) for r in results):
        by_shape = {
            tuple(r["shape"]): r
            for r in results
            if r["rule"] == "adamw" and r["recipe"] == recipe and r["tokens"] == tokens
        }
        if all(shape in by_shape for shape, _ in layer):
            line: dict[str, Any] = {"recipe": recipe, "tokens": tokens}
            for key in ("floor_ms", "ms", "standard_ms", "cublas_ms"):
                line[key] = layers * sum(count * by_shape[shape][key] for shape, count in layer)
            summed.append(line)
    return summed


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    lines = [
        f"# Fused update kernels on {report['device']}",
        "",
        f"{report['seconds']:.0f} s. Errors are relative "
        "rms against fp64 after one step (weight, states). Standard: cuBLAS G in bf16 + torch fused AdamW in "
        "bf16; its error is that of an exact update from a bf16 gradient, stored in bf16.",
        "",
        "| rule | storage | N x K | tokens | form | us | x floor | x standard | T0 | error | "
        "standard's error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in report["cells"]:
        errors = " ".join(f"{value:.1e}" for value in r["errors"])
        standard = " ".join(f"{value:.1e}" for value in r["standard_errors"])
        t0 = "exact" if r["t0"] else "DIFFERS"
        lines.append(
            f"| {r['rule']} | {r['recipe']} | {_by(r['shape'])} | {r['tokens']} | {r['config']['form']} "
            f"| {r['ms'] * 1e3:.0f} | {r['times_floor']:.2f} | {r['times_standard']:.2f} | {t0} | {errors} "
            f"| {standard} |"
        )
    lines += ["", "All linears of a Llama-3.1-8B step, ms:", ""]
    lines += ["| storage | tokens | floor | fused | standard | cuBLAS |", "|---|---|---|---|---|---|"]
    for r in report["totals"]:
        lines.append(
            f"| {r['recipe']} | {r['tokens']} | {r['floor_ms']:.1f} | {r['ms']:.1f} | {r['standard_ms']:.1f} "
            f"| {r['cublas_ms']:.1f} |"
        )
    for name, r in report["others"].items():
        beside = f", torch fused AdamW {r['standard_ms'] * 1e3:.0f} us" if "standard_ms" in r else ""
        lines += ["", f"{name}: {r['ms'] * 1e3:.0f} us, {r['ms'] / r['floor_ms']:.2f} x floor{beside}"]
    for problem in report["failures"]:
        lines += ["", f"FAILED {problem['what']}: {problem['error']}"]
    if report["left_out"]:
        lines += ["", f"Left out for want of time: {report['left_out']}"]
    return "\n".join([*lines, "", *_facts(report)]) + "\n"


def forms_markdown(report: dict[str, Any]) -> str:
    """What `kernels.py --forms` measured, as tables."""
    right = sum(check["right"] for check in report["checks"].values())
    lines = [
        f"# Forms of the fused update kernel on {report['device']}",
        "",
        f"{right} of {len(report['checks'])} checks right. Standard: cuBLAS's gradient in bf16 and torch's "
        "fused AdamW in bf16.",
        "",
        "| form | geometry | rows of tiles | rule | storage | N x K | tokens | us | x floor | x standard |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    standards = {(tuple(one["shape"]), one["tokens"]): one["standard_ms"] for one in report["standards"]}
    for r in report["cells"]:
        standard = standards.get((tuple(r["shape"]), r["tokens"]))
        beside = "–" if standard is None else f"{r['ms'] / standard:.2f}"
        lines.append(
            f"| {r['form']} | {r['geometry'] or '–'} | {r['config']['group']} | {r['rule']} | {r['recipe']} "
            f"| {_by(r['shape'])} | {r['tokens']} | {r['ms'] * 1e3:.1f} | {r['ms'] / r['floor_ms']:.2f} "
            f"| {beside} |"
        )
    lines += ["", *report["totals"]]
    for problem in report["failures"]:
        lines += ["", f"FAILED {problem}"]
    return "\n".join([*lines, "", *_facts(report)]) + "\n"


def plot(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars: each cell's time over its floor; of cells that differ in geometry alone, the fastest one's.

    cells: with shape, tokens, rule, recipe, ms and floor_ms, and the form in `form` or in their `config`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    best: dict[str, float] = {}
    for r in cells:
        form = r.get("form") or r["config"]["form"]
        name = f"{r['rule']} {r['recipe']}  {_by(r['shape'])}  {r['tokens']} tokens  {form}"
        best[name] = min(best.get(name, float("inf")), r["ms"] / r["floor_ms"])
    if not best:
        return
    figure, axis = plt.subplots(figsize=(9, 0.22 * len(best) + 1.2))
    axis.bar_label(axis.barh(list(best), list(best.values())), fmt="%.2f", padding=2, fontsize="x-small")
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.tick_params(axis="y", labelsize="x-small")
    axis.set_xlabel("time over the floor of bytes and operations")
    axis.margins(x=0.1, y=0.01)
    axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _facts(report: dict[str, Any]) -> list[str]:
    return [f"- {key}: {value}" for key, value in report["machine"].items()]
