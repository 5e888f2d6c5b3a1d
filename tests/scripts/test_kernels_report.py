"""The report of the kernel benchmarks, from cells as a GPU's run leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from scripts.bench.harness import machine_facts
from scripts.bench.kernel_cells import tuned_shapes
from scripts.bench.kernels_report import forms_markdown, markdown, plot
from titanforge.models.registry import build_model

CONFIG = {"form": "pp2", "group": 8}
CELL: dict[str, Any] = {
    "rule": "adamw", "recipe": "bf16", "shape": [4096, 4096], "tokens": 512, "ms": 0.071, "floor_ms": 0.05,
    "config": CONFIG,
}  # fmt: skip


def test_a_cell_has_its_form_and_the_report_its_machine(tmp_path: Path) -> None:
    checked = {"t0": True, "errors": [1e-3], "standard_errors": [2e-3], "standard_ms": 0.1, "cublas_ms": 0.03}
    ratios = {"times_floor": 1.42, "times_standard": 0.71}
    report = {
        "device": "a card", "machine": machine_facts(), "seconds": 3.0,
        "cells": [{**CELL, **checked, **ratios}], "totals": [], "others": {}, "failures": [], "left_out": [],
    }  # fmt: skip
    text = markdown(report)
    assert "| adamw | bf16 | 4096 x 4096 | 512 | pp2 | 71 | 1.42 | 0.71 | exact |" in text
    assert f"- torch: {torch.__version__}" in text and "- command:" in text
    plot(report["cells"], tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 0
    plot([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_forms_stand_beside_the_standard_path_of_their_shape(tmp_path: Path) -> None:
    def cell(form: str, shape: list[int]) -> dict[str, Any]:
        return {**CELL, "form": form, "geometry": "" if form == "portable" else "turns", "shape": shape}

    report = {
        "device": "a card", "machine": machine_facts(),
        "checks": {"pp2 turns": {"right": True}, "coop 32x4": {"right": False}},
        "cells": [cell("pp2", [4096, 4096]), cell("portable", [128, 768, 2048])],
        "standards": [{"shape": [4096, 4096], "tokens": 512, "standard_ms": 0.142}],
        "totals": ["Llama-8B linears"], "failures": ["coop 32x4"],
    }  # fmt: skip
    text = forms_markdown(report)
    assert "1 of 2 checks right" in text and "FAILED coop 32x4" in text and "Llama-8B linears" in text
    assert "| pp2 | turns | 8 | adamw | bf16 | 4096 x 4096 | 512 | 71.0 | 1.42 | 0.50 |" in text
    assert "| portable | – | 8 | adamw | bf16 | 128 x 768 x 2048 | 512 | 71.0 | 1.42 | – |" in text
    plot(report["cells"], tmp_path / "forms.png")
    assert (tmp_path / "forms.png").stat().st_size > 0


def test_shapes_to_tune_are_those_of_launches() -> None:
    """What a fused block launches: q, k and v as one, but for recipes of which each weight has its own."""
    with torch.device("meta"):
        model: Any = build_model("llama3", "8B", vocab_size=512, seq_len=8, overrides={"n_layers": 1})[0]
    shapes = {tuple(param.shape) for name, param in model.layers["0"].named_parameters() if param.dim() == 2}
    assert set(tuned_shapes("Llama-8B", "int8_sr")) == shapes
    assert set(tuned_shapes("Llama-8B", "fp8")) == shapes
    both = {(28672, 4096), (6144, 4096)}
    assert set(tuned_shapes("Llama-8B", "bf16")) == shapes | both
