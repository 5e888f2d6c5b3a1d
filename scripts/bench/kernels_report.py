"""Tables of what scripts/bench/kernels.py measured."""

from __future__ import annotations

from collections.abc import Sequence
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
        f"torch {report['torch']}, triton {report['triton']}, {report['seconds']:.0f} s. Errors are relative "
        "rms against fp64 after one step (weight, states). Standard: cuBLAS G in bf16 + torch fused AdamW in "
        "bf16; its error is that of an exact update from a bf16 gradient, stored in bf16.",
        "",
        "| rule | storage | N x K | tokens | us | x floor | x standard | T0 | error | standard's error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in report["cells"]:
        errors = " ".join(f"{value:.1e}" for value in r["errors"])
        standard = " ".join(f"{value:.1e}" for value in r["standard_errors"])
        t0 = "exact" if r["t0"] else "DIFFERS"
        lines.append(
            f"| {r['rule']} | {r['recipe']} | {r['shape'][0]} x {r['shape'][1]} | {r['tokens']} "
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
    return "\n".join(lines) + "\n"
