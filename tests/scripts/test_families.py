"""The table of optimizer families, end to end on a CPU with a toy shape; its times are not looked at."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import families
from scripts.bench.forge_appendix_i import APPENDIX_I


def quick(out: Path, *more: str) -> int:
    return families.main(["--quick", "--out", str(out), "--families", "sgd", "muon", "adafactor", *more])


def test_quick_report_then_nothing_is_left_to_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert quick(tmp_path) == 0
    cells = json.loads((tmp_path / "families.json").read_text())["cells"]
    assert list(cells) == [f"{f}/{e}" for f in ("sgd", "muon", "adafactor") for e in ("native", "forge")]
    assert [cells[f"{name}/forge"]["regime"] for name in ("sgd", "muon", "adafactor")] == [1, 2, 3]
    for cell in cells.values():
        assert cell["finite"] and 0 < cell["moved"] <= 1 and len(cell["step_ms"]) == 2
    assert cells["sgd/forge"]["states_gib"] == 0 < cells["muon/forge"]["states_gib"]
    assert "| sgd | 1 |" in (tmp_path / "families.md").read_text()

    again = tmp_path / "again"
    capfd.readouterr()
    assert quick(again, "--resume", str(tmp_path / "families.json")) == 0
    assert "[sgd/" not in capfd.readouterr().out  # no cell ran
    assert json.loads((again / "families.json").read_text())["cells"] == cells


def test_every_family_stands_beside_the_paper() -> None:
    assert set(families.FAMILIES) == set(APPENDIX_I)
    row = APPENDIX_I["adamw"]
    assert (row.base_gb, row.forge_gb, row.base_ms, row.forge_ms) == (75.0, 48.8, 379.0, 236.0)


# A worker that writes what it is told to: `die` ends the process, `hang` never ends.
WORKER = """
import json, sys, time
result, names = sys.argv[sys.argv.index("--result") + 1], sys.argv[sys.argv.index("--worker") + 1:]
with open(result, "a") as report:
    for name in names:
        print(json.dumps({"kind": "start", "name": name}), file=report, flush=True)
        if name == "die": sys.exit("no such kernel")
        if name == "hang": time.sleep(60)
        print(json.dumps({"kind": "done", "name": name, "value": 1}), file=report, flush=True)
        if name == "leak": break
"""


def test_a_cell_that_fails_ends_its_worker_and_not_the_others(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    args = argparse.Namespace(budget=60.0, cell_timeout=1.5)
    names = ["first", "die", "leak", "hang", "last"]
    command = [sys.executable, "-c", WORKER]
    families.run_workers(command, names, args, kept.__setitem__, tmp_path / "log")
    assert list(kept) == names
    assert [kept[name] for name in ("first", "leak", "last")] == [{"value": 1}] * 3
    assert "exit code 1" in kept["die"]["error"] and "no such kernel" in kept["die"]["error"]
    assert "within 2 s" in kept["hang"]["error"]

    late: dict[str, Any] = {}
    families.run_workers(
        command,
        names[:1],
        argparse.Namespace(budget=0.0, cell_timeout=1.0),
        late.__setitem__,
        tmp_path / "log",
    )
    assert late["first"]["error"] == "not run: out of time"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"finite": False}, ["sgd/forge"]),
        ({"moved": 0.0}, ["sgd/forge"]),
        ({"losses": [2.0, 1.0]}, ["sgd: the engines' losses are 0.500 apart"]),
        ({"losses": [2.0, float("nan")]}, ["sgd: the engines' losses are nan apart"]),
        ({"error": "no memory"}, ["sgd/forge"]),
    ],
)
def test_what_did_not_train_alike_fails_the_script(change: dict[str, Any], told: list[str]) -> None:
    good = {"finite": True, "moved": 0.5, "losses": [2.0, 1.5], "engine": "native"}
    cells = {"sgd/native": good, "sgd/forge": {**good, **change}}
    if "error" in change:
        del cells["sgd/forge"]["losses"]
    assert families.failures(cells, list(cells)) == told
