"""Update rules, parameter groups, learning-rate schedules and the ordinary optimizer engine.

Imports `titanforge.kernels` and torch, nothing else of ours. It knows no mesh: weights and states may be
DTensors, and every update runs on their local tensors.
"""

from __future__ import annotations

from titanforge.optim.build import (
    build_groups,
    build_optimizer,
    check_storage,
    shard_dims,
    state_bytes,
    update_bytes,
)
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.exchanges import exchange_lines, factor_values
from titanforge.optim.links import DataLinks
from titanforge.optim.lr_schedule import lr_factor
from titanforge.optim.registry import RULES, build_rule
from titanforge.optim.rule import Reach, StateSlot, UpdateRule
from titanforge.optim.rule_groups import groups_of_rule
from titanforge.optim.states import Recipe

__all__ = [
    "RULES",
    "DataLinks",
    "Reach",
    "Recipe",
    "RuleOptimizer",
    "StateSlot",
    "UpdateRule",
    "build_groups",
    "build_optimizer",
    "build_rule",
    "check_storage",
    "exchange_lines",
    "factor_values",
    "groups_of_rule",
    "lr_factor",
    "shard_dims",
    "state_bytes",
    "update_bytes",
]
