"""Where each weight's gradient is consumed: a pure function of rule, placement, mesh and schedule.

The granule is the smallest unit in which a weight's gradient is complete on this rank (FORGE, appendix A). It
follows from what the rule's A and U read; nothing here looks at a tensor.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from titanforge.optim.rule import Reach, UpdateRule


class Granule(enum.Enum):
    """The unit in which a gradient is consumed, smallest first."""

    TILE = "tile"
    """A register tile of the weight-gradient product; no gradient is stored."""
    STATE = "state"
    """Folded into an affine rule's state, micro-batch by micro-batch or rank by rank."""
    SHARD = "shard"
    """The rank's reduce-scattered shard."""
    BUCKET = "bucket"
    """An all-reduced bucket."""
    ACCUMULATOR = "accumulator"
    """A sum over the micro-batches of a step, or their operands, until the last one."""
    LAYER = "layer"
    """The gradient of one layer, formed, consumed and freed within that layer's backward."""
    MODEL = "model"
    """After backward, from `.grad`: the ordinary engine."""


Kind = Literal["linear", "embedding", "head", "tied", "experts", "vector", "other"]
"""What reads a weight: `head` is a linear that also owns the loss, `tied` an embedding and such a head,
`vector` a norm's weight or a bias."""


@dataclass(frozen=True)
class Placement:
    """What a weight is and where it lies.

    excluded: why its gradient cannot be consumed where it is made; empty if it can. It matters to no unit
        that is complete only after its gradient was summed over ranks: by then all of its readers are.
    split: it is a DTensor, of which this rank holds a part or a copy: what reads it there is no plain module.
    """

    kind: Kind
    shape: tuple[int, ...]
    excluded: str = ""
    split: bool = False


@dataclass(frozen=True)
class Schedule:
    """How a step runs.

    micro_batches: per step. tokens: per micro-batch on this rank. accumulation: `forge.accumulation`.
    state_keeps_sums: many small additions to a state do not drown in its rounding: it is float32, or rounds
        stochastically.
    needs_norm: the norm of the whole gradient is needed (lagged clipping).
    undo: a step may be refused after some of its micro-batches, and must then leave the states as they were.
    reduce: what replicas sum, `sync.reduce`.
    """

    micro_batches: int = 1
    tokens: int = 0
    accumulation: str = "auto"
    state_keeps_sums: bool = True
    needs_norm: bool = False
    undo: bool = False
    reduce: Literal["gradients", "states"] = "gradients"


Join = Literal["", "state", "stash", "buffer"]
"""How micro-batches are joined: in the state; as operands kept to the last; in an fp32 sum."""


@dataclass(frozen=True)
class ParamPlan:
    """Where one weight's gradient is consumed.

    reduce_axes: mesh axes over which something is reduced first. why: one line for a person.
    deferred: U follows by itself, on states alone: with the weight's block in backward, or after it where
        ranks share the weight or its tokens (`by_hook`).
    """

    granule: Granule
    why: str
    reduce_axes: tuple[str, ...] = ()
    join: Join = ""
    deferred: bool = False

    @property
    def fused(self) -> bool:
        """Whether the gradient is consumed during backward."""
        return self.granule is not Granule.MODEL

    @property
    def by_hook(self) -> bool:
        """Whether it is consumed when autograd, or the reduction over ranks, hands it over."""
        return self.granule in (Granule.SHARD, Granule.BUCKET)


def plan(rule: UpdateRule, placement: Placement, mesh: Mapping[str, int], schedule: Schedule) -> ParamPlan:
    """The granule of one weight.

    mesh: sizes of the mesh axes; those of size 1 may be left out. FSDP shards over dp_shard x cp. tp and ep
    split the weight itself, leave its gradient complete on the rank, and change nothing by themselves; a
    pipeline hands a stage its micro-batches one by one.
    """
    if rule.regime == 4:
        return ParamPlan(Granule.MODEL, f"{rule.name} reads every gradient before any update")
    if rule.u_statistic_of_gradient:
        return ParamPlan(Granule.MODEL, f"bases of {rule.name} follow from the whole gradient")
    if rule.u_reads_capture and rule.u_reads_gradient:
        why = f"U of {rule.name} reads the gradient and bases that are complete after backward"
        return ParamPlan(Granule.MODEL, why)
    sharded = tuple(axis for axis in ("dp_shard", "cp") if mesh.get(axis, 1) > 1)
    if placement.kind == "experts" and mesh.get("ep", 1) > 1:
        sharded = _shared_by_experts(mesh)
    replicated = ("dp_replicate",) if mesh.get("dp_replicate", 1) > 1 else ()
    if sharded or placement.split:
        return _shard(rule, schedule, sharded, replicated)
    if replicated:
        return _bucket(rule, placement, schedule, replicated)
    if placement.excluded:
        return ParamPlan(Granule.MODEL, placement.excluded)
    if schedule.micro_batches > 1 or mesh.get("pp", 1) > 1:
        return _joined(rule, placement, schedule, folds_into_state(rule))
    return _at_once(rule, placement)


def keeps_logits(kind: Kind, decided: ParamPlan) -> bool:
    """Whether `forge.keep_logits` has an effect on a weight: on a head's, but not where micro-batches are
    joined by their tokens, whose logits are formed again anyway, nor where ranks hand over the gradient.
    """
    return kind in ("head", "tied") and decided.fused and not decided.by_hook and decided.join != "stash"


def _shared_by_experts(mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Axes over which experts are sharded: what expert parallelism leaves of dp_shard x cp x tp."""
    ranks = mesh.get("dp_shard", 1) * mesh.get("cp", 1) * mesh.get("tp", 1)
    return ("dp_shard",) if ranks > mesh["ep"] else ()


def _shard(
    rule: UpdateRule, schedule: Schedule, sharded: tuple[str, ...], replicated: tuple[str, ...]
) -> ParamPlan:
    """Each rank's part of the summed gradient, when it arrives."""
    if rule.a_reads is Reach.LAYER or (rule.regime == 2 and not rule.matrix_only):
        return ParamPlan(Granule.MODEL, f"{rule.name} reads whole layers, and a rank holds parts of them")
    if rule.regime == 2 and rule.u_reads_gradient:
        return ParamPlan(Granule.MODEL, f"U of {rule.name} gathers the gradient and the state after backward")
    why = "each rank owns a shard of the summed gradient" if sharded else "this rank's part of a split weight"
    return _summed(Granule.SHARD, why, rule, schedule, (*sharded, *replicated))


def _bucket(
    rule: UpdateRule, placement: Placement, schedule: Schedule, replicated: tuple[str, ...]
) -> ParamPlan:
    """Replicas: the state is reduced where A allows it and the run asks for it, else buckets of gradients."""
    if schedule.reduce == "states" and folds_into_state(rule) and placement.kind != "vector":
        why = "A is affine: the state is reduced, not the gradient"
        join: Join = "state" if schedule.micro_batches > 1 else ""
        return ParamPlan(Granule.STATE, why, replicated, join, deferred=True)
    why = f"{rule.name} takes the gradient summed over replicas, a bucket at a time"
    return _summed(Granule.BUCKET, why, rule, schedule, replicated)


def _summed(
    granule: Granule, why: str, rule: UpdateRule, schedule: Schedule, axes: tuple[str, ...]
) -> ParamPlan:
    join: Join = "buffer" if schedule.micro_batches > 1 else ""
    if join:
        why += f"; {schedule.micro_batches} micro-batches are summed first"
    return ParamPlan(granule, why, axes, join, deferred=rule.regime == 2 and not rule.u_reads_gradient)


def folds_into_state(rule: UpdateRule) -> bool:
    """Whether A is affine and U blind to G: partial gradients may then be added to the state one by one."""
    return rule.a_affine and rule.a_reads is Reach.COORDINATE and not rule.u_reads_gradient


def _at_once(rule: UpdateRule, placement: Placement) -> ParamPlan:
    if rule.a_reads is Reach.LAYER:
        return ParamPlan(Granule.LAYER, f"A of {rule.name} reads a statistic of the layer's gradient")
    if rule.regime == 2:
        if rule.u_reads_gradient:
            return ParamPlan(Granule.LAYER, f"U of {rule.name} reads the layer's state and the gradient")
        if folds_into_state(rule):
            writes = " and writes the state" if rule.u_writes_state else ""
            why = f"A is affine: the product accumulates into the state; U follows with its block{writes}"
            return ParamPlan(Granule.STATE, why, deferred=True)
        return ParamPlan(Granule.TILE, "A reads one coordinate; U follows with its block", deferred=True)
    if placement.kind == "vector":
        return ParamPlan(Granule.TILE, "a vector is one tile, consumed in its layer's backward")
    if placement.kind == "embedding":
        return ParamPlan(Granule.TILE, "each row is summed over its tokens in registers")
    if placement.kind == "head":
        return ParamPlan(Granule.TILE, "a chunk of vocabulary rows sees all tokens")
    if placement.kind == "tied":
        return ParamPlan(Granule.TILE, "a tied head's rows are formed again in the embedding's backward")
    return ParamPlan(Granule.TILE, "A and U read one coordinate")


def _joined(rule: UpdateRule, placement: Placement, schedule: Schedule, folds: bool) -> ParamPlan:
    count = f"{schedule.micro_batches} micro-batches"
    deferred = rule.regime == 2 and not rule.u_reads_gradient
    granule = Granule.LAYER if rule.a_reads is Reach.LAYER else Granule.ACCUMULATOR
    if placement.kind == "vector":
        return ParamPlan(granule, f"a vector, summed over {count}", join="buffer", deferred=deferred)
    if folds and schedule.accumulation == "auto":
        if schedule.needs_norm:
            reason = "the norm of their sum is needed"
        elif schedule.undo:
            reason = "a refused step must leave the state as it was"
        elif not schedule.state_keeps_sums:
            reason = "sums drown in the state's rounding"
        else:
            why = f"A is affine: {count} are added to the state"
            return ParamPlan(Granule.STATE, why, join="state", deferred=deferred)
        count += f" ({reason})"
    join = _cheaper(placement, schedule)
    what = "their operands are kept to the last" if join == "stash" else "an fp32 sum is kept"
    return ParamPlan(granule, f"{count}: {what}", join=join, deferred=deferred)


def _cheaper(placement: Placement, schedule: Schedule) -> Join:
    if placement.kind == "experts":
        return "buffer"  # tokens move between experts from one micro-batch to the next
    if placement.kind in ("head", "embedding", "tied"):
        return "stash"  # hidden states or token ids: always far less than the weight
    if schedule.accumulation == "stash":
        return "stash"
    if schedule.accumulation == "buffer":
        return "buffer"
    # Operands in the 16-bit dtype of training, against a sum in fp32.
    rows, columns = placement.shape[-2:]
    experts = placement.shape[0] if len(placement.shape) == 3 else 1
    stash = schedule.micro_batches * schedule.tokens * (rows + columns) * 2
    return "stash" if stash <= experts * rows * columns * 4 else "buffer"
