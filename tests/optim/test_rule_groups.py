"""Groups from a rule alone are those that the trainer would make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.forge.toy import llama
from titanforge.config.sections import Optimizer, ScalarOptimizer
from titanforge.optim import RULES, build_groups, build_rule, groups_of_rule
from titanforge.optim.rule_groups import DEFAULT_OPTIONS, SCALAR_WEIGHT_DECAY


def told(groups: Any) -> list[tuple[str, str, dict[str, float], list[str], dict[str, int]]]:
    return [(one.name, one.rule.name, one.options, one.names, one.parts) for one in groups]


def test_defaults_are_those_of_the_configuration() -> None:
    section, scalar = Optimizer(), ScalarOptimizer()
    assert {name: getattr(section, name) for name in DEFAULT_OPTIONS} == DEFAULT_OPTIONS
    assert scalar.name == "AdamW" and scalar.lr is None and scalar.weight_decay == SCALAR_WEIGHT_DECAY
    for name in ("beta1", "beta2", "eps"):
        assert getattr(scalar, name) == DEFAULT_OPTIONS[name]


@pytest.mark.parametrize("name", RULES)
def test_groups_are_those_of_the_configuration(name: str) -> None:
    model = llama()
    assert told(groups_of_rule(model, build_rule(name))) == told(build_groups(model, Optimizer(name=name)))
    changed = groups_of_rule(model, build_rule(name), {"lr": 1e-3, "weight_decay": 0.5})
    assert told(changed) == told(build_groups(model, Optimizer(name=name, lr=1e-3, weight_decay=0.5)))


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(8, 24)


def test_a_matrix_rule_takes_fused_projections_apart() -> None:
    """And leaves biases to AdamW, at its learning rate."""
    matrix, scalar = groups_of_rule(FusedAttention(), build_rule("muon"), {"lr": 0.02, "momentum": 0.95})
    assert matrix.parts == {"wqkv.weight": 3} and matrix.options["momentum"] == 0.95
    assert scalar.names == ["wqkv.bias"] and scalar.options["lr"] == 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"options\['lr'\] must be at least 0 and finite, not -1"),
        ({"lr": float("nan")}, r"options\['lr'\] must be at least 0 and finite, not nan"),
        ({"momentum": 1.0}, r"options\['momentum'\] must be at least 0 and below 1, not 1"),
        ({"beta1": 0.9}, r"options\['beta1'\]: muon has none; it has lr, weight_decay, momentum"),
    ],
)
def test_options_that_the_rule_cannot_take(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups_of_rule(FusedAttention(), build_rule("muon"), options)


def test_a_frozen_model_is_refused() -> None:
    model = FusedAttention().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        groups_of_rule(model, build_rule("adamw"))
    wrong: Any = torch.zeros(2)
    with pytest.raises(TypeError, match="an update rule is wanted, not a Tensor"):
        groups_of_rule(model, wrong)
