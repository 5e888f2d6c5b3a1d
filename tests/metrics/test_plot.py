from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titanforge.metrics.plot import _smooth, plot_runs, run_labels, write_run_summary


def make_run(steps: int, rate: float, resumed: int | None = None) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 1.5 + 4 * math.exp(-rate * step) + 0.05 * math.sin(step)
        records.append({"step": step, "loss": loss, "tokens_per_second": 5000 + 20 * math.cos(step)})
        if step == resumed:
            records[-1]["resumed_from"] = step - 1
        if step % 20 == 0:
            records.append({"step": step, "validation_loss": loss + 0.1, "validation_tokens": 100})
    return records


def write_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def pixels(path: Path) -> set[tuple[int, ...]]:
    import matplotlib.image

    image = matplotlib.image.imread(path)
    assert image.shape[0] > 400 and image.shape[1] > 600
    return {tuple(int(255 * c) for c in pixel[:3]) for pixel in image.reshape(-1, image.shape[-1])}


def test_summary_is_drawn(tmp_path: Path) -> None:
    records = make_run(100, 0.05, resumed=61)
    records[10]["loss"] = None  # a non-finite step
    write_run(tmp_path / "run", records)
    output = write_run_summary(tmp_path / "run")
    assert output == tmp_path / "run" / "metrics.png"
    assert (0x00, 0x72, 0xB2) in pixels(output)  # the curve's own colour


def test_syncs_are_marked(tmp_path: Path) -> None:
    records = make_run(30, 0.05)
    plain = plot_runs({"run": records}, tmp_path / "plain.png")
    syncs = [{"step": step, "sync": "rmmc", "sync/drift": 0.1} for step in (3, 17)]
    marked = plot_runs({"run": records + syncs}, tmp_path / "marked.png")
    assert plain.read_bytes() != marked.read_bytes()


def test_failure_to_draw_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert write_run_summary(tmp_path / "nothing") is None
        write_run(tmp_path / "run", [{"step": 1, "loss": None}])
        assert write_run_summary(tmp_path / "run") is None
    assert sum("could not draw" in r.message for r in caplog.records) == 2


def test_plot_refuses_runs_without_a_loss(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no loss in a"):
        plot_runs({"a": [{"step": 1}]}, tmp_path / "x.png")


def test_labels_tell_runs_apart() -> None:
    assert run_labels(["/x/a/metrics.jsonl", "/x/b/metrics.jsonl"]) == ["a", "b"]
    assert run_labels(["/a/out/metrics.jsonl", "/b/out/metrics.jsonl"]) == ["a/out", "b/out"]
    assert run_labels(["/a/metrics.jsonl", "/a/metrics.jsonl"]) == ["a (1)", "a (2)"]
    assert run_labels(["/a/metrics_rank1.jsonl"]) == ["metrics_rank1"]


def test_smoothing_keeps_a_straight_line() -> None:
    assert _smooth([1.0, 2.0, 3.0, 4.0, 5.0], 3) == pytest.approx([1, 2, 3, 4, 5])
    assert _smooth([0.0, 3.0, 0.0], 3) == pytest.approx([0, 1, 0])


def test_script_compares_runs(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "plot_run.py"
    write_run(tmp_path / "adamw", make_run(60, 0.05))
    write_run(tmp_path / "lion", make_run(60, 0.08))
    output = tmp_path / "plots" / "both.png"
    command = [
        sys.executable,
        str(script),
        str(tmp_path / "adamw"),
        str(tmp_path / "lion"),
        "-o",
        str(output),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # From elsewhere: the script finds the package by its own place.
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(output)
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= pixels(output)
    command[2] = str(tmp_path / "missing")
    failed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ") and len(failed.stderr.splitlines()) == 1
