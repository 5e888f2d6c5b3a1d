"""`sync_quality.py`: captured steps, cells that go together, and how many steps are settled on."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import sync_quality
from scripts.bench.sync_pace import ENDED, LEAD, Pace, Planner
from scripts.bench.sync_threads import train_threads
from tests.trainer.recorded import RecordedGraph

STATES = {"policy": "every_step", "reduce": "states"}
GRADIENT = {"policy": "scheduled", "interval": 9, "local_update": "gradient", "local_lr": 1e-3}


@pytest.fixture(autouse=True)
def one_thread():
    """Of torch, as the script has it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _options(tmp_path: Path, **changes: Any) -> Any:
    words = ["--size=tiny", "--mode=threads", "--replicas=2", "--batch=1", "--steps=14", "-o", str(tmp_path)]
    options = sync_quality.parser().parse_args(words)
    keys = {"device": "cpu", "seed": 0, "pace": None, "lr": 1e-2, "lr_warmup": 2}
    vars(options).update(keys | changes)
    return options


@pytest.mark.parametrize(
    "sync",
    [
        {"policy": "every_step"},
        STATES,
        {"policy": "scheduled", "interval": 8},
        {"policy": "rmmc", "threshold": 1e9, "local_update": "momentum"},
        GRADIENT,
        {**STATES, "exchange_dtype": "int4"},
    ],
    ids=["gradients", "states", "scheduled", "rmmc", "gradient", "int4"],
)
def test_captured_steps_train_as_others_do(tmp_path: Path, sync: dict[str, Any]) -> None:
    graphs: list[RecordedGraph] = []

    def new_graph() -> RecordedGraph:
        graphs.append(RecordedGraph(torch.device("cpu")))
        return graphs[-1]

    size = sync_quality.SIZES["tiny"]
    plain = train_threads(size, sync, _options(tmp_path))
    captured = train_threads(size, sync, _options(tmp_path, graph=True), new_graph)
    assert captured["losses"] == plain["losses"]
    assert captured["validation_loss"] == plain["validation_loss"]
    assert captured["bytes"] == plain["bytes"] and captured["syncs"] == plain["syncs"]
    # Of each replica: gradients, then one update, or A and where it may be a local U.
    kinds = 2 + ("threshold" in sync or sync.get("interval") == 8)
    assert len(graphs) == 2 * kinds
    assert all(graph.captures == 1 and graph.replays >= 3 for graph in graphs)


def test_a_look_on_the_way_changes_nothing(tmp_path: Path) -> None:
    sync, size = {"policy": "scheduled", "interval": 6}, sync_quality.SIZES["tiny"]
    without = train_threads(size, sync, _options(tmp_path))
    looking = train_threads(size, sync, _options(tmp_path, look=10))
    assert looking["losses"] == without["losses"] and looking["bytes"] == without["bytes"]
    ((step, loss),) = looking["looks"]
    assert step == 10 and loss == pytest.approx(without["validation_loss"], rel=0.2)


def test_number_of_steps_follows_the_slowest_cell(tmp_path: Path) -> None:
    now = [0.0]
    pace = Pace(tmp_path / "pace", 3, create=True)
    theirs = Pace(tmp_path / "pace", 3)
    planner = Planner(pace, 1000.0, 5000, 0.2, lambda: now[0])
    for now[0] in range(0, 600, 50):  # two steps a second, the others ahead
        for cell, ahead in enumerate((0, LEAD // 2, LEAD)):
            theirs.note(cell, int(2 * now[0]) + ahead)
        assert planner.look() == 0
    now[0] = 600.0
    theirs.note(0, 1200)
    steps = planner.look()
    assert 0.9 * 2000 < steps < 2000 and theirs.settled == steps
    theirs.note(0, 1300)
    assert planner.look() == steps  # once and for all


def test_decay_has_not_begun_when_steps_are_settled(tmp_path: Path) -> None:
    """Though the rest of the time would allow for less."""
    now = [0.0]
    pace = Pace(tmp_path / "pace", 1, create=True)
    planner = Planner(pace, 1000.0, 5000, 0.5, lambda: now[0])
    for now[0] in (30.0, 600.0):
        pace.note(0, int(now[0]) * 2)
        steps = planner.look()
    assert steps * 0.5 >= 1200 + LEAD


def test_few_steps_are_settled_at_once_and_none_waits_for_a_cell_that_left(tmp_path: Path) -> None:
    pace = Pace(tmp_path / "pace", 2, create=True)
    assert Planner(pace, 1000.0, 30, 0.2).look() == 30
    pace.leave(1)
    pace.wait(0, 500, float("inf"))
    assert pace.slowest == 500
    pace.leave(0)
    assert pace.slowest == ENDED


def test_cells_go_together(tmp_path: Path, capsys) -> None:
    words = ["--size=tiny", "--together", "--replicas=2", "--batch=1", "--warmup=2", "--lr=1e-2"]
    words += ["--steps=50", "--seconds=250", "--look=20", "--match", "-o", str(tmp_path)]
    assert sync_quality.main([*words, "--thresholds", "--intervals", "5"]) == 0
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [cell["cell"] for cell in cells] == ["every_step", "scheduled 5"]
    assert all(cell["finished"] for cell in cells) and {cell["steps"] for cell in cells} == {50}
    told = capsys.readouterr().out
    assert "50 steps of each of 2 cells" in told
    assert "| scheduled 5 | 0 | " in told and "| cell | seed | 20 | 40 |" in told


def test_refuses_options_that_nothing_would_heed(tmp_path: Path) -> None:
    main = functools.partial(sync_quality.main)
    for words in (
        ["--mode=processes", "--look=10"],
        ["--look=15", "--mode=threads"],
        ["--graph", "--mode=threads"],
        ["--together", "--match=0.3"],
        ["--together", "--match", "--beside=2"],
    ):
        with pytest.raises(SystemExit, match="--"):
            main([*words, "-o", str(tmp_path)])
