"""The fidelity benchmark on a CPU at a toy size, and what its figures must be there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts.bench import fidelity
from scripts.exactness.one_linear import relative_rms


def test_report_compares_paths_of_one_storage_with_fp32(tmp_path: Path) -> None:
    tiny = ["--device", "cpu", "--tiny", "--lr", "1e-3", "--out", str(tmp_path)]
    assert fidelity.main([*tiny, "--storage", "bf16", "fp32 master"]) == 0
    report = json.loads((tmp_path / "fidelity.json").read_text())
    cells = {(cell["storage"], cell["path"]): cell for cell in report["cells"]}
    assert set(cells) == {
        ("bf16", "standard"), ("bf16", "torch fused AdamW"), ("bf16", "fused, auto"),
        ("fp32 master", "standard"), ("fp32 master", "fused, auto"),
    }  # fmt: skip
    for cell in cells.values():
        assert len(cell["rms_by_step"]) == 20
        assert 0 < cell["rms_by_step"][0] < cell["rms"] < 0.02, cell
    # Storing weights in bf16 costs more than products and gradients in it.
    assert cells["bf16", "standard"]["rms"] > 1.5 * cells["fp32 master", "standard"]["rms"]
    assert cells["fp32 master", "fused, auto"]["times_standard"] == pytest.approx(1, abs=0.05)
    assert "times_standard" not in cells["fp32 master", "standard"]
    assert report["machine"]["torch"] == torch.__version__
    assert "| fp32 master | 0.001 | fused, auto |" in (tmp_path / "fidelity.md").read_text()
    assert (tmp_path / "fidelity.png").stat().st_size > 0


def test_a_form_that_cannot_run_fails_alone(tmp_path: Path) -> None:
    tiny = ["--device", "cpu", "--tiny", "--lr", "1e-3", "--out", str(tmp_path), "--storage", "bf16"]
    assert fidelity.main([*tiny, "--forms", "coop", "auto"]) == 1
    cells = {cell["path"]: cell for cell in json.loads((tmp_path / "fidelity.json").read_text())["cells"]}
    assert "forge.kernel = 'coop' cannot run here" in cells["fused, coop"]["error"]
    assert cells["fused, auto"]["rms"] > 0


def test_error_is_relative_to_the_whole() -> None:
    assert relative_rms(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
