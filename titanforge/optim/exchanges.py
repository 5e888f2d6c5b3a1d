"""What a run's rules of matrices will send, for printing: the accounting of the papers over a whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titanforge.optim.accounting import ShardedAxis, cross_shard_payload, second_moment_entries
from titanforge.optim.dobb.rule import Dobb
from titanforge.optim.matrix import MatrixRule
from titanforge.optim.param_groups import ParamGroupSpec


def exchange_lines(groups: Sequence[ParamGroupSpec], shards: int) -> list[str]:
    """One line for each rule of matrices that sends anything: scalars a step between shards, as
    `accounting` has them, and Dobb's second moments.

    groups: of the whole model, on any device. shards: that each weight is cut into.
    """
    rules = {id(group.rule): group.rule for group in groups if isinstance(group.rule, MatrixRule)}
    lines = []
    for key, rule in rules.items():
        members = [group for group in groups if id(group.rule) == key]
        weights = [
            (param.shape, group.parts.get(name, 1))
            for group in members
            for name, param in zip(group.names, group.params)
        ]
        sent = sum(step_payload(rule, shape, parts, shards) for shape, parts in weights)
        told = [f"{sent:,} scalars a step between {shards} shards"] if shards > 1 else []
        if isinstance(rule, Dobb) and rule.dobb.source == "activation":
            moments = sum(refresh_payload(rule, shape, parts) for shape, parts in weights)
            told.append(f"second moments, {moments:,} scalars, every {rule.dobb.period} steps")
        if told:
            lines.append(f"{rule.name} sends {'; '.join(told)}")
    return lines


def step_payload(rule: MatrixRule, shape: torch.Size, parts: int, shards: int) -> int:
    """Scalars that shards of one weight exchange in a step. parts: matrices that an [m, n] is made of."""
    if shards == 1 or len(shape) > 2:  # experts lie whole on a rank
        return 0
    axis: ShardedAxis = "input" if rule.shard_dim(shape) == 1 else "output"
    options = rule.options
    return parts * cross_shard_payload(
        rule.name,
        shape[0] // parts,
        shape[1],
        axis,
        rank_fraction=options.dion.rank_fraction,
        dobb=options.dobb,
    )


def refresh_payload(rule: Dobb, shape: torch.Size, parts: int) -> int:
    """Entries of one weight's second moments. With side A its parts share them."""
    count = shape[:-2].numel() if len(shape) > 2 else parts if rule.dobb.side == "G" else 1
    return count * second_moment_entries(shape[-2] // parts, shape[-1], rule.dobb)
