"""Hyperparameters of a family of groups on the device, and what micro-batches need beside a rule's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titanforge.optim.rule import LocalStateRule, UpdateRule


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of a family of groups, [groups, H] on the device; storage that never moves.

    first, later: for adding a micro-batch to the state of an affine rule, `momentum_state`'s six. closing:
    the rule's own, where the state has already decayed in this step.
    """

    table: Tensor
    first: Tensor
    later: Tensor
    closing: Tensor


def hyper_of(table: Tensor) -> Hyper:
    """Room for the vectors that micro-batches need, beside the rule's own."""
    groups = table.shape[0]
    first, later = (torch.zeros(groups, 6, device=table.device) for _ in range(2))
    return Hyper(table, first, later, torch.zeros_like(table))


def fill_folding(hyper: Hyper, rule: UpdateRule) -> None:
    """`momentum_state`'s (apply, -, -, scale, decay, gain) from the vectors of a rule that folds into its
    state.
    """
    if (
        not isinstance(rule, LocalStateRule)
        or "m" not in {slot.name for slot in rule.slots}
        or not rule.a_affine
    ):
        return
    if rule.kernel_name == "momentum_state":
        hyper.first.copy_(hyper.table[:, :6])
    elif rule.kernel_name == "sgd_momentum":
        hyper.first[:, :5].copy_(hyper.table)
        hyper.first[:, 5] = 1.0
        hyper.closing.copy_(hyper.table)
        hyper.closing[:, 4] = 1.0
    hyper.later.copy_(hyper.first)
    hyper.later[:, 4] = 1.0
