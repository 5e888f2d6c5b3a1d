"""The four recipes from scratch: one toy arm end to end, and how arms are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.papers import forge_from_scratch


def test_an_arm_trains_is_drawn_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--arms", "fused-sr", "--out", str(tmp_path)]
    assert forge_from_scratch.main(words) == 0, capsys.readouterr().out
    summary = json.loads((tmp_path / "forge_from_scratch.json").read_text())
    assert list(summary) == ["fused-sr"]
    assert summary["fused-sr"]["steps"] == 12
    assert summary["fused-sr"]["loss"] < summary["fused-sr"]["first_loss"] - 0.2, "it learns"
    assert (tmp_path / "forge_from_scratch.png").stat().st_size > 0
    log = (tmp_path / "fused-sr" / "log.txt").read_text()
    assert "forge: 100.0 %" in log

    capsys.readouterr()
    assert forge_from_scratch.main(words) == 0
    assert "done before" in capsys.readouterr().out
    assert forge_from_scratch.main([*words, "--seed", "2"]) == 1
    assert "other arguments" in capsys.readouterr().out


def test_arms_are_compared_with_the_reference() -> None:
    def records(*losses: float) -> list[dict[str, float]]:
        return [{"loss": loss} for loss in losses] + [{"validation_loss": losses[-1] + 1}]

    # Of 20 steps the last two count.
    found = forge_from_scratch.summary_of(
        {"master": records(*[5.0] * 18, 3.0, 2.0), "fused": records(*[5.0] * 18, 3.5, 2.5)}
    )
    assert found["master"]["loss"] == 2.5 and found["master"]["loss_above_reference"] == 0
    assert found["fused"]["loss_above_reference"] == 0.5
    assert found["fused"]["validation_loss_above_reference"] == 0.5
    assert found["fused"]["steps"] == 20 and found["fused"]["first_loss"] == 5.0


def test_arms_differ_in_the_recipe_alone() -> None:
    recipes = forge_from_scratch.ARMS.values()
    assert {key for recipe in recipes for key in recipe} == {
        "training.dtype",
        "optimizer.state_dtype",
        "optimizer.master_weights",
        "forge.enable",
    }
    assert {recipe["training.dtype"] for recipe in recipes} == {"bfloat16"}
