"""The plan is a table: rule, placement, mesh and schedule decide the granule, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from titanforge.forge import Granule, Placement, Schedule, plan, plan_report
from titanforge.forge.report import PlanLine
from titanforge.optim.registry import RULES, build_rule

LINEAR = Placement("linear", (128, 64))
VECTOR = Placement("vector", (64,))
FOUR = Schedule(micro_batches=4, tokens=32)

# Rule → regime, granule on one device, granule with four micro-batches, a word of the reason.
TABLE: dict[str, tuple[int, Granule, Granule, str]] = {
    "sgd": (1, Granule.TILE, Granule.STATE, "one coordinate"),
    "adagrad": (1, Granule.TILE, Granule.ACCUMULATOR, "one coordinate"),
    "rmsprop": (1, Granule.TILE, Granule.ACCUMULATOR, "one coordinate"),
    "adam": (1, Granule.TILE, Granule.ACCUMULATOR, "one coordinate"),
    "adamw": (1, Granule.TILE, Granule.ACCUMULATOR, "one coordinate"),
    "adamax": (1, Granule.TILE, Granule.ACCUMULATOR, "one coordinate"),
    "nadam": (1, Granule.TILE, Granule.ACCUMULATOR, "one coordinate"),
    "radam": (1, Granule.TILE, Granule.ACCUMULATOR, "one coordinate"),
    "lion": (1, Granule.TILE, Granule.ACCUMULATOR, "one coordinate"),
    "lamb": (2, Granule.TILE, Granule.ACCUMULATOR, "U follows"),
    "muon": (2, Granule.STATE, Granule.STATE, "A is affine"),
    "scion": (2, Granule.STATE, Granule.STATE, "A is affine"),
    "rmnp": (2, Granule.STATE, Granule.STATE, "A is affine"),
    "dion": (2, Granule.STATE, Granule.STATE, "and writes the state"),
    "dobb": (2, Granule.STATE, Granule.STATE, "A is affine"),
    "adam_mini": (3, Granule.LAYER, Granule.LAYER, "statistic of the layer"),
    "adafactor": (3, Granule.LAYER, Granule.LAYER, "statistic of the layer"),
    "adalomo": (3, Granule.LAYER, Granule.LAYER, "statistic of the layer"),
    "sm3": (3, Granule.LAYER, Granule.LAYER, "statistic of the layer"),
    "lars": (3, Granule.LAYER, Granule.LAYER, "statistic of the layer"),
}


def test_table_names_every_rule() -> None:
    assert set(TABLE) == set(RULES)


@pytest.mark.parametrize("name", TABLE)
def test_one_device(name: str) -> None:
    regime, granule, joined, word = TABLE[name]
    rule = build_rule(name)
    decided = plan(rule, LINEAR, {}, Schedule())
    assert (rule.regime, decided.granule) == (regime, granule)
    assert word in decided.why
    assert decided.deferred == (regime == 2)
    assert decided.reduce_axes == () and decided.join == ""
    assert plan(rule, LINEAR, {}, FOUR).granule is joined
    assert plan(rule, Placement("linear", (128, 64), "tied"), {}, FOUR).granule is Granule.MODEL


@pytest.mark.parametrize(
    ("change", "granule", "join", "word"),
    [
        ({}, Granule.STATE, "state", "added to the state"),
        ({"state_keeps_sums": False}, Granule.ACCUMULATOR, "buffer", "drown"),
        ({"needs_norm": True}, Granule.ACCUMULATOR, "buffer", "norm"),
        ({"undo": True}, Granule.ACCUMULATOR, "buffer", "refused step"),
        ({"accumulation": "stash"}, Granule.ACCUMULATOR, "stash", "operands"),
        ({"accumulation": "buffer"}, Granule.ACCUMULATOR, "buffer", "fp32 sum"),
        ({"undo": True, "tokens": 8}, Granule.ACCUMULATOR, "stash", "operands"),
    ],
)
def test_micro_batches_of_an_affine_rule(change: Any, granule: Granule, join: str, word: str) -> None:
    schedule = Schedule(**{"micro_batches": 4, "tokens": 64, **change})
    decided = plan(build_rule("sgd"), LINEAR, {}, schedule)
    assert (decided.granule, decided.join) == (granule, join)
    assert word in decided.why


def test_cheaper_join_is_chosen_by_bytes() -> None:
    """128 x 64 fp32 is 32768 bytes; four micro-batches' operands 4 T 192 2 = 1536 T."""
    rule = build_rule("adamw")
    few, many = Schedule(micro_batches=4, tokens=21), Schedule(micro_batches=4, tokens=22)
    assert plan(rule, LINEAR, {}, few).join == "stash"
    assert plan(rule, LINEAR, {}, many).join == "buffer"
    assert plan(rule, Placement("embedding", (9, 8)), {}, many).join == "stash"
    assert plan(rule, Placement("head", (9, 8)), {}, many).join == "stash"
    assert plan(rule, Placement("tied", (9, 8)), {}, many).join == "stash"
    assert plan(rule, VECTOR, {}, few).join == "buffer"


REPLICAS, SHARDS = {"dp_replicate": 2}, {"dp_shard": 8}
STATES = Schedule(reduce="states")


@pytest.mark.parametrize(
    ("name", "mesh", "schedule", "granule", "axes", "join", "deferred"),
    [
        # Axes that split the weight leave its gradient complete.
        ("adamw", {"tp": 4, "ep": 2}, Schedule(), Granule.TILE, (), "", False),
        ("adamw", {"dp_shard": 1, "dp_replicate": 1}, Schedule(), Granule.TILE, (), "", False),
        # Replicas: a bucket of gradients, or the state where A allows it and the run asks for it.
        ("adamw", REPLICAS, Schedule(), Granule.BUCKET, ("dp_replicate",), "", False),
        ("adamw", REPLICAS, STATES, Granule.BUCKET, ("dp_replicate",), "", False),
        ("adamw", REPLICAS, FOUR, Granule.BUCKET, ("dp_replicate",), "buffer", False),
        ("lion", REPLICAS, STATES, Granule.BUCKET, ("dp_replicate",), "", False),
        ("muon", REPLICAS, Schedule(), Granule.BUCKET, ("dp_replicate",), "", True),
        ("muon", REPLICAS, STATES, Granule.STATE, ("dp_replicate",), "", True),
        ("sgd", REPLICAS, STATES, Granule.STATE, ("dp_replicate",), "", True),
        ("muon", REPLICAS, Schedule(4, 32, reduce="states"), Granule.STATE, ("dp_replicate",), "state", True),
        # A bucket holds whole gradients: rules that read a layer's statistic take them so.
        ("adafactor", REPLICAS, Schedule(), Granule.BUCKET, ("dp_replicate",), "", False),
        # Shards, also over contexts and beside replicas; matrix rules gather the state afterwards.
        ("adamw", SHARDS, Schedule(), Granule.SHARD, ("dp_shard",), "", False),
        ("adamw", SHARDS, FOUR, Granule.SHARD, ("dp_shard",), "buffer", False),
        ("adamw", {"cp": 2}, Schedule(), Granule.SHARD, ("cp",), "", False),
        ("muon", SHARDS, STATES, Granule.SHARD, ("dp_shard",), "", True),
        (
            "adamw",
            {**SHARDS, **REPLICAS, "cp": 2, "tp": 2},
            Schedule(),
            Granule.SHARD,
            ("dp_shard", "cp", "dp_replicate"),
            "",
            False,
        ),
        # Parts of a layer show no statistic of it.
        ("adafactor", SHARDS, Schedule(), Granule.MODEL, (), "", False),
        ("lars", SHARDS, Schedule(), Granule.MODEL, (), "", False),
        ("lamb", SHARDS, Schedule(), Granule.MODEL, (), "", False),
        ("lamb", REPLICAS, Schedule(), Granule.BUCKET, ("dp_replicate",), "", True),
        # A pipeline's stage sees its micro-batches one by one, however few.
        ("adamw", {"pp": 2}, Schedule(tokens=10**6), Granule.ACCUMULATOR, (), "buffer", False),
        ("muon", {"pp": 2}, FOUR, Granule.STATE, (), "state", True),
    ],
)
def test_meshes(
    name: str,
    mesh: dict[str, int],
    schedule: Schedule,
    granule: Granule,
    axes: tuple[str, ...],
    join: str,
    deferred: bool,
) -> None:
    decided = plan(build_rule(name), LINEAR, mesh, schedule)
    found = (decided.granule, decided.reduce_axes, decided.join, decided.deferred)
    assert found == (granule, axes, join, deferred)
    assert decided.why
    assert decided.by_hook == (granule in (Granule.SHARD, Granule.BUCKET))


def test_a_summed_gradient_asks_nobody_who_reads_the_weight() -> None:
    tied, split = Placement("linear", (128, 64), "tied"), Placement("linear", (128, 64), "tied", split=True)
    rule = build_rule("adamw")
    assert plan(rule, tied, {}, Schedule()).granule is Granule.MODEL
    assert plan(rule, tied, REPLICAS, Schedule()).granule is Granule.BUCKET
    assert plan(rule, tied, SHARDS, Schedule()).granule is Granule.SHARD
    decided = plan(rule, split, {"tp": 2}, Schedule())
    assert (decided.granule, decided.reduce_axes) == (Granule.SHARD, ())
    assert plan(rule, split, {"tp": 2, **REPLICAS}, Schedule()).reduce_axes == ("dp_replicate",)


def test_experts_are_sharded_over_what_expert_parallelism_leaves() -> None:
    experts, rule = Placement("experts", (8, 128, 64)), build_rule("adamw")
    assert plan(rule, experts, {"dp_shard": 4, "ep": 4}, Schedule()).granule is Granule.TILE
    assert plan(rule, experts, {"dp_shard": 8, "ep": 4}, Schedule()).granule is Granule.SHARD
    both = {"dp_shard": 4, "ep": 4, "dp_replicate": 2}
    assert plan(rule, experts, both, Schedule()).granule is Granule.BUCKET
    assert plan(rule, LINEAR, {"dp_shard": 4, "ep": 4}, Schedule()).granule is Granule.SHARD


def test_nesterov_reads_the_gradient_after_the_state() -> None:
    assert plan(build_rule("muon", nesterov=True), LINEAR, {}, Schedule()).granule is Granule.LAYER
    # Its bases are refreshed after backward, when a formed gradient would be gone.
    assert plan(build_rule("dobb", nesterov=True), LINEAR, {}, Schedule()).granule is Granule.MODEL
    assert plan(build_rule("sgd", nesterov=True), LINEAR, {}, Schedule()).granule is Granule.TILE
    assert plan(build_rule("muon", nesterov=True), LINEAR, REPLICAS, Schedule()).granule is Granule.BUCKET
    assert plan(build_rule("muon", nesterov=True), LINEAR, SHARDS, Schedule()).granule is Granule.MODEL
    assert plan(build_rule("sgd", nesterov=True), LINEAR, {}, FOUR).granule is Granule.ACCUMULATOR
    assert plan(build_rule("sgd", momentum=0.0), LINEAR, {}, FOUR).granule is Granule.ACCUMULATOR


def test_report_of_ranks_says_how_long_gradients_live() -> None:
    def report(mesh: dict[str, int]) -> list[str]:
        decided = plan(build_rule("adamw"), LINEAR, mesh, FOUR)
        line = PlanLine("w", (128, 64), torch.float32, decided, "linear")
        return plan_report([line], nn.Linear(1, 1)).splitlines()

    alone, replicas, shards = report({}), report(REPLICAS), report(SHARDS)
    assert "100.0 % of 8,192 trainable parameters never have a gradient in memory" in alone[0]
    for lines, granule in ((replicas, "bucket"), (shards, "shard")):
        assert "have a gradient for a bucket's or a shard's time" in lines[0]
        assert lines[1].startswith(f"  {granule}") and "4 micro-batches are summed first" in lines[1]
