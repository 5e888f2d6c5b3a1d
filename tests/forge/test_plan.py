"""The plan is a table: rule, placement, mesh and schedule decide the granule, and why."""

from __future__ import annotations

from typing import Any

import pytest

from titanforge.forge import Granule, Placement, Schedule, plan
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
    assert plan(rule, VECTOR, {}, few).join == "buffer"


@pytest.mark.parametrize(
    ("name", "mesh", "granule", "axes"),
    [
        ("adamw", {"tp": 4, "ep": 2}, Granule.TILE, ()),
        ("adamw", {"dp_replicate": 2}, Granule.BUCKET, ("dp_replicate",)),
        ("muon", {"dp_replicate": 2, "cp": 2}, Granule.STATE, ("dp_replicate", "cp")),
        ("lion", {"dp_replicate": 2}, Granule.BUCKET, ("dp_replicate",)),
        ("adamw", {"dp_shard": 8, "dp_replicate": 2}, Granule.SHARD, ("dp_shard", "dp_replicate")),
        ("adamw", {"dp_shard": 1, "dp_replicate": 1}, Granule.TILE, ()),
    ],
)
def test_meshes(name: str, mesh: dict[str, int], granule: Granule, axes: tuple[str, ...]) -> None:
    decided = plan(build_rule(name), LINEAR, mesh, Schedule())
    assert (decided.granule, decided.reduce_axes) == (granule, axes)


def test_nesterov_reads_the_gradient_after_the_state() -> None:
    assert plan(build_rule("muon", nesterov=True), LINEAR, {}, Schedule()).granule is Granule.LAYER
    # Its bases are refreshed after backward, when a formed gradient would be gone.
    assert plan(build_rule("dobb", nesterov=True), LINEAR, {}, Schedule()).granule is Granule.MODEL
    assert plan(build_rule("sgd", nesterov=True), LINEAR, {}, Schedule()).granule is Granule.TILE
    assert plan(build_rule("sgd", nesterov=True), LINEAR, {}, FOUR).granule is Granule.ACCUMULATOR
    assert plan(build_rule("sgd", momentum=0.0), LINEAR, {}, FOUR).granule is Granule.ACCUMULATOR
