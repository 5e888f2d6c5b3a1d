"""What a run's rules of matrices will send, for printing: the accounting of the papers over a whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titanforge.optim.accounting import ShardedAxis, cross_shard_payload, second_moment_entries
from titanforge.optim.dobb.rule import Dobb
from titanforge.optim.matrix import MatrixRule, OrthogonalRule
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.placement import is_cut, local_tensor
from titanforge.optim.replica_factors import FactoredRule, pays


def exchange_lines(
    groups: Sequence[ParamGroupSpec], shards: int, experts_in_rows: int | None = None, replicas: int = 1
) -> list[str]:
    """One line for each rule of matrices that sends anything: scalars a step between shards, as
    `step_payload` has them, and Dobb's second moments.

    groups: of the whole model, on any device. shards: that each weight is cut into. experts_in_rows: experts
    of a layer whose rows are dealt to the same ranks, 0 where each lies whole on one; None: as they lie.
    replicas: of the shards, with data of their own.
    """
    rules = {id(group.rule): group.rule for group in groups if isinstance(group.rule, MatrixRule)}
    lines = []
    for key, rule in rules.items():
        members = [group for group in groups if id(group.rule) == key]
        weights = [
            (param, group.parts.get(name, 1))
            for group in members
            for name, param in zip(group.names, group.params)
        ]
        sent = sum(
            step_payload(rule, param.shape, parts, shards, _in_rows(param, experts_in_rows))
            for param, parts in weights
        )
        told = [f"{sent:,} scalars a step between {shards} shards"] if shards > 1 else []
        if isinstance(rule, Dobb) and rule.dobb.source == "activation" and shards * replicas > 1:
            moments = sum(refresh_payload(rule, param.shape, parts) for param, parts in weights)
            told.append(f"second moments, {moments:,} scalars, every {rule.dobb.period} steps")
        if told:
            lines.append(f"{rule.name} sends {'; '.join(told)}")
    return lines


def factor_values(groups: Sequence[ParamGroupSpec], experts_alone: bool = False) -> int:
    """Values that replicas average of whole weights in place of momenta (`replica_factors`): r (m + n) for
    each matrix of a rule that has factors, where these are smaller. experts_alone: of weights [E, m, n] only.
    """
    total = 0
    for group in groups:
        if not isinstance(group.rule, FactoredRule):
            continue
        for name, param in zip(group.names, group.params):
            if experts_alone and param.dim() < 3:
                continue
            parts = group.parts.get(name, 1)
            rows, columns = param.shape[-2] // parts, param.shape[-1]
            if pays(group.rule, rows, columns):
                matrices = parts * param.shape[:-2].numel()
                total += matrices * group.rule.rank(rows, columns) * (rows + columns)
    return total


def _in_rows(param: Tensor, told: int | None) -> int:
    if param.dim() < 3 or told is not None:
        return told or 0
    return local_tensor(param).shape[0] if is_cut(param, (-2, -1)) else 0


def step_payload(
    rule: MatrixRule, shape: torch.Size, parts: int, shards: int, experts_in_rows: int = 0
) -> int:
    """Scalars of one weight that a rank hands to exchanges between shards in a step, as the ledger counts
    them. parts: matrices that an [m, n] is made of.

    They are those of `accounting`, but for Muon's and Scion's lone matrices, which are dealt to the ranks:
    momenta one way and updates the other, 2 mn / shards for the mean rank, rounded up (see `dealt`).
    experts_in_rows: matrices of an [experts, m, n] of which each rank has rows; of the others it has none or
    all of one, and sends nothing.
    """
    if shards == 1 or (len(shape) > 2 and not experts_in_rows):
        return 0
    options, name = rule.options, rule.name
    if isinstance(rule, OrthogonalRule) and len(shape) == 2:
        return -(-2 * shape.numel() // shards)
    axis: ShardedAxis = "input" if rule.shard_dim(shape) == len(shape) - 1 else "output"
    if len(shape) > 2:
        parts = experts_in_rows
        name = "muon" if name == "dion" else name  # factors go between shards of lone matrices alone
    return parts * cross_shard_payload(
        name,
        shape[-2] // (parts if len(shape) == 2 else 1),
        shape[-1],
        axis,
        rank_fraction=options.dion.rank_fraction,
        dobb=options.dobb,
    )


def refresh_payload(rule: Dobb, shape: torch.Size, parts: int) -> int:
    """Entries of one weight's second moments. With side A its parts share them."""
    count = shape[:-2].numel() if len(shape) > 2 else parts if rule.dobb.side == "G" else 1
    return count * second_moment_entries(shape[-2] // parts, shape[-1], rule.dobb)
