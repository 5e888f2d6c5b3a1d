"""The quality run of the matrix optimizers: toy arms end to end, its text, its budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.bench import matrix_quality, matrix_quality_report
from tests.trainer.runs import write_corpus


def test_arms_share_data_and_the_rate_that_was_best_for_adamw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--tiny", "--steps", "6", "--out", str(tmp_path)]
    words += ["--corpus", str(write_corpus(tmp_path / "corpus.jsonl"))]
    assert matrix_quality.main([*words, "--arms", "adamw", "dobb-16"]) == 0, capsys.readouterr().out
    plan = json.loads((tmp_path / "plan.json").read_text())
    tried = {probe["lr"]: probe["validation_loss"] for probe in plan["probes"]}
    assert len(tried) == 2 and set(plan["lrs"].values()) == {min(tried, key=tried.__getitem__)}
    report = json.loads((tmp_path / "matrix_quality.json").read_text())
    assert set(report["arms"]) == {"adamw", "dobb-16"} and [p["ahead"] for p in report["order"]] == [
        "dobb-16"
    ]
    first = {arm: one["first_loss"] for arm, one in report["arms"].items()}
    assert first["adamw"] == first["dobb-16"], "the same weights and the same first batch"
    for one in report["arms"].values():
        assert one["trained_steps"] == 6 and one["tokens"] == 6 * 64
        assert one["validation_loss"] < one["first_loss"] - 0.2, "it learns"
    assert (tmp_path / "matrix_quality.png").stat().st_size > 0

    capsys.readouterr()  # goes on: what is done stays, and stays in the table
    assert matrix_quality.main([*words, "--arms", "adamw"]) == 0
    told = capsys.readouterr().out
    assert "[adamw] done before" in told and "[probe" not in told
    assert "| dobb-16 |" in (tmp_path / "matrix_quality.md").read_text()
    with pytest.raises(SystemExit, match="other settings"):
        matrix_quality.main([*words, "--seed", "2"])


def test_text_is_of_installed_packages_without_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("one", "two"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "same.py").write_text("same = 1\n" * 100)
        (tmp_path / package / f"{package}.py").write_text(f"{package} = 1\n" * 100)
        (tmp_path / package / "latin.py").write_bytes("# é\n".encode("latin-1") * 200)
        (tmp_path / package / "short.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(matrix_quality.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "one")})
    told = matrix_quality.write_corpus(tmp_path / "corpus.jsonl", 1 << 20)
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert sorted(text.split()[0] for text in texts) == ["one", "same", "two"]
    assert told == {"documents": 3, "bytes": sum(map(len, texts))}


def test_steps_fit_into_the_time_that_is_left() -> None:
    probes = [
        {"step_ms": 100.0, "trained_steps": 100, "seconds": 40.0},  # 30 s beside its steps
        {"step_ms": 100.0, "trained_steps": 100, "seconds": 30.0},
    ]
    steps = matrix_quality.steps_that_fit(probes, left=420.0, rounds=7)
    assert steps == int((60 - 20) / (matrix_quality.SLOWER * 0.1))


def test_the_order_of_pairs_counts_finished_arms_alone() -> None:
    losses = {"adamw": 3.0, "muon": 2.9, "dobb-16": 2.8, "dion-1-16": 3.1}
    results = {arm: {"validation_loss": loss, "finished": arm != "muon"} for arm, loss in losses.items()}
    found = {(p["ahead"], p["behind"]): p["here"] for p in matrix_quality_report.order(results)}
    assert found == pytest.approx(
        {("dobb-16", "adamw"): 0.2, ("dobb-16", "dion-1-16"): 0.3, ("adamw", "dion-1-16"): 0.1}
    )
