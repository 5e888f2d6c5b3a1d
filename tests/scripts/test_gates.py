"""The exactness gates on two processes: they pass, and each fails where what it guards is broken."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts import gates
from scripts.exactness import runs
from scripts.exactness.registry import GATES, Gate, Reading, World, at_least, multiple_of
from tests.distributed_harness import run_distributed
from titanforge.config import validate_config
from titanforge.config.sections import Comm
from titanforge.layout import build_dims, check_model
from titanforge.optim import RuleOptimizer
from titanforge.parallelisms import init_distributed
from titanforge.sync import EveryStep

SHOWN = ["T0 by ranks", "T2", "CP1", "bf16", "SR", "fidelity"]


def broken(world: World) -> Iterator[Reading]:
    """Ends on one rank alone."""
    yield Reading("before", 0.0, 0.0)
    if world.rank == 1:
        raise RuntimeError("no such kernel")


def on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    world = World(init_distributed(Comm(), "cpu"))
    found = {"good": [gates.run_gate(GATES[name], world) for name in SHOWN]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EveryStep, "reduce_gradients", lambda self: None)
        found["replicas that do not talk"] = [gates.run_gate(GATES[name], world) for name in ("T1",)]
    step = RuleOptimizer.step
    with pytest.MonkeyPatch.context() as patch:

        def slower(self: RuleOptimizer, flag: Tensor | None = None, scale: Tensor | None = None) -> None:
            step(self, flag, torch.tensor(0.5 if runs.distributed(self) else 1.0))

        patch.setattr(RuleOptimizer, "step", slower)
        found["half the gradient"] = [gates.run_gate(GATES[name], world) for name in ("F1", "TP", "bf16")]
    found["one rank fails"] = [gates.run_gate(Gate("broken", lambda _: "", broken), world)]
    found["too few"] = [gates.run_gate(GATES["TP by CP by FSDP"], world)]
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    return run_distributed(on_two_ranks, 2)[0]


def test_gates_pass(outcomes: dict[str, Any]) -> None:
    for outcome in outcomes["good"]:
        assert gates.passed(outcome), outcome
        assert "skipped" not in outcome and outcome["readings"]


@pytest.mark.parametrize("fault", ["replicas that do not talk", "half the gradient", "one rank fails"])
def test_a_fault_is_seen(fault: str, outcomes: dict[str, Any]) -> None:
    for outcome in outcomes[fault]:
        assert not gates.passed(outcome), outcome
    if fault == "one rank fails":
        (outcome,) = outcomes[fault]
        assert "rank 1" in outcome["error"] and "no such kernel" in outcome["error"]


def test_what_a_world_cannot_run_says_why(outcomes: dict[str, Any]) -> None:
    assert outcomes["too few"][0]["skipped"] == "needs a multiple of 8 ranks, 2 started"
    world: Any = SimpleNamespace(size=3)
    assert at_least(2)(world) == "" and at_least(4)(world) == "needs 4 ranks, 3 started"
    assert multiple_of(3)(world) == ""


@pytest.mark.parametrize("ranks", [3, 5, 8, 16])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_jobs_of_the_gates_can_be_dealt_to_any_number_of_ranks(ranks: int, on_gpu: bool) -> None:
    world: Any = SimpleNamespace(size=ranks, on_gpu=on_gpu)
    layouts = {
        "tp": runs.Layout(tp=ranks),
        "ring": runs.Layout(cp=ranks),
        "ulysses": runs.Layout(cp=ranks, method="ulysses"),
        "fsdp": runs.Layout(dp_shard=ranks),
        "replicas": runs.Layout(dp_replicate=ranks),
    }
    for layout in layouts.values():
        config = runs.job(world, layout)
        validate_config(config, ranks, "cpu")
        check_model(config, build_dims(config, ranks))


def test_ranks_that_do_not_answer_end_the_run() -> None:
    def silence(_: object) -> None:
        raise RuntimeError("timed out")

    runtime: Any = SimpleNamespace(all_gather_object=silence, world_size=2, rank=0)
    gate = Gate("quiet", lambda _: "", lambda _: iter([Reading("x", 0.0, 0.0)]))
    with pytest.raises(gates.LostRanks, match="ranks do not answer: timed out") as lost:
        gates.run_gate(gate, World(runtime))
    assert not gates.passed(lost.value.outcome)


def test_not_a_number_passes_nothing() -> None:
    assert not Reading("x", math.nan, 1.0).passed
    assert runs.largest([0.0, math.nan]) == math.inf == runs.largest([])
    assert runs.losses_apart([1.0, 2.0], [1.0, 2.0, 3.0]) == math.inf
    assert runs.losses_apart([2.0, 2.0], [2.0, 2.0]) == math.inf  # nothing happened between the steps
    assert runs.tensors_apart({"a": torch.zeros(2)}, {"b": torch.zeros(2)}) == math.inf


def test_script_lists_runs_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gates.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in GATES)
    assert gates.main(["--device", "cpu", "--gates", "SR", "T1", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "gates.md").read_text()
    assert "| SR | rounded at random" in text and "| T1 | needs 2 ranks, 1 started |" in text
    assert (tmp_path / "gates.json").stat().st_size > 0
