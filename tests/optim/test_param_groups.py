"""Owners, roles, decay and patterns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanforge.config.sections import Optimizer, ParamGroup
from titanforge.optim.build import build_groups
from titanforge.optim.param_groups import (
    RuleOptions,
    build_param_groups,
    clean_name,
    named_trainable_parameters,
    role_of,
)
from titanforge.optim.registry import build_rule


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(8, 8)
        self.attention_norm = nn.RMSNorm(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.RMSNorm(8)
        self.output = nn.Linear(8, 16, bias=False)


def owners(options: Optimizer) -> dict[str, tuple[str, dict[str, float]]]:
    model = Model()
    groups = build_groups(model, options)
    owned = {name: (group.rule.name, group.options) for group in groups for name in group.names}
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    assert sum(group.num_parameters for group in groups) == sum(p.numel() for p in model.parameters())
    assert sum(len(group.names) for group in groups) == len(owned)
    return owned


def test_roles() -> None:
    named, roles = named_trainable_parameters(Model())
    assert roles == {
        "tok_embeddings.weight": "embedding",
        "layers.0.wq.weight": "matrix",
        "layers.0.wq.bias": "bias",
        "layers.0.attention_norm.weight": "norm",
        "layers.1.wq.weight": "matrix",
        "layers.1.wq.bias": "bias",
        "layers.1.attention_norm.weight": "norm",
        "norm.weight": "norm",
        "output.weight": "head",
    }
    assert [name for name, _ in named] == list(roles)
    assert role_of("transformer.wte.weight", 2) == "embedding"
    assert role_of("transformer.h.0.ln_1.weight", 1) == "norm"
    assert role_of("lm_head.weight", 2) == "head"
    assert role_of("layers.0.feed_forward.output.weight", 2) == "head"


def test_no_decay_on_norms_biases_embeddings() -> None:
    owned = owners(Optimizer(weight_decay=0.1))
    decayed = {name for name, (_, options) in owned.items() if options["weight_decay"] == 0.1}
    assert decayed == {"layers.0.wq.weight", "layers.1.wq.weight", "output.weight"}


def test_first_matching_pattern_wins_and_inherits_the_rest() -> None:
    owned = owners(
        Optimizer(
            lr=1e-3,
            param_groups=[
                ParamGroup(pattern="norm", weight_decay=0.5),
                ParamGroup(pattern=r"^layers\.0\.", lr=2e-3),
            ],
        )
    )
    assert owned["layers.0.attention_norm.weight"][1] == {
        "lr": 1e-3,
        "weight_decay": 0.5,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
    }
    assert owned["layers.0.wq.weight"][1]["lr"] == 2e-3
    assert owned["layers.0.wq.weight"][1]["weight_decay"] == 0.1
    assert owned["layers.0.wq.bias"][1]["weight_decay"] == 0.0
    assert owned["layers.1.wq.weight"][1]["lr"] == 1e-3


def test_matrix_rule_and_scalar_rule() -> None:
    options = Optimizer(name="Muon", lr=1e-3, nesterov=True)
    options.scalar.lr = 5e-4
    options.scalar.weight_decay = 0.01
    owned = owners(options)
    assert {name for name, (rule, _) in owned.items() if rule == "muon"} == {
        "layers.0.wq.weight",
        "layers.1.wq.weight",
    }
    assert owned["output.weight"] == (
        "adamw",
        {"lr": 5e-4, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    )
    assert owned["norm.weight"][1]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([ParamGroup(pattern="wz")], r"param_groups\[0\]\.pattern = 'wz' matches no trainable parameter"),
        ([ParamGroup(pattern="norm"), ParamGroup(pattern="attention_norm")], r"\[1\].*earlier groups own"),
        ([ParamGroup(pattern="(")], r"param_groups\[0\]\.pattern = '\(' is no regular expression"),
        ([ParamGroup(lr=1.0)], r"param_groups\[0\]\.pattern is empty"),
        ([ParamGroup(pattern="wq", lr=-1.0)], r"param_groups\[0\]\.lr must be at least 0, not -1"),
        ([ParamGroup(pattern="wq", beta1=1.0)], r"param_groups\[0\]\.beta1 must be .* below 1"),
    ],
)
def test_errors_name_the_group(patterns: list[ParamGroup], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_groups(Model(), Optimizer(param_groups=patterns))


def test_option_without_effect_is_refused() -> None:
    options = Optimizer(name="SGD", param_groups=[ParamGroup(pattern="wq", beta2=0.9)])
    with pytest.raises(ValueError, match=r"param_groups\[0\]\.beta2 has no effect.*sgd"):
        build_groups(Model(), options)


def test_scalar_rule_must_take_vectors() -> None:
    options = Optimizer(name="Muon")
    options.scalar.name = "Scion"
    with pytest.raises(ValueError, match=r"optimizer\.scalar\.name = 'Scion'"):
        build_groups(Model(), options)


def test_each_parameter_once() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    main = RuleOptions(build_rule("sgd"), {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.9})
    with pytest.raises(ValueError, match="'b' was given twice"):
        build_param_groups([("a", weight), ("b", weight)], main)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_param_groups([("a", nn.Parameter(torch.zeros(2), requires_grad=False))], main)


def test_tied_and_frozen_weights() -> None:
    model = Model()
    model.output.weight = model.tok_embeddings.weight
    model.norm.weight.requires_grad_(False)
    names = [name for name, _ in named_trainable_parameters(model)[0]]
    assert "tok_embeddings.weight" in names
    assert "output.weight" not in names and "norm.weight" not in names


def test_wrapper_names_are_removed() -> None:
    assert clean_name("layers.0._orig_mod._checkpoint_wrapped_module.wq.weight") == "layers.0.wq.weight"
    model = Model()
    model.layers[0] = torch.compile(model.layers[0])  # pyright: ignore[reportArgumentType]
    assert "layers.0.wq.weight" in dict(named_trainable_parameters(model)[0])
