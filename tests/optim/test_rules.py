"""What each rule declares: the regime follows from it (FORGE, appendices A and I)."""

from __future__ import annotations

import pytest
import torch

from titanforge.kernels.references import HYPER_NAMES, REFERENCES, STATE_SLOTS
from titanforge.optim.registry import RULES, build_rule
from titanforge.optim.rule import Reach, StateGlobalRule, UpdateRule

COORDINATE, LAYER = Reach.COORDINATE, Reach.LAYER
OPTIONS = {"lr": 0.1, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "momentum": 0.9}

# name, structure: regime, A reads, A is affine, U reads, U looks at the gradient, slots of a matrix
TABLE = [
    ("sgd", {"momentum": 0.0}, 1, COORDINATE, True, COORDINATE, True, ()),
    ("sgd", {}, 1, COORDINATE, True, COORDINATE, False, ("m",)),
    ("sgd", {"nesterov": True}, 1, COORDINATE, True, COORDINATE, True, ("m",)),
    ("adagrad", {}, 1, COORDINATE, False, COORDINATE, True, ("v",)),
    ("rmsprop", {}, 1, COORDINATE, False, COORDINATE, True, ("v",)),
    ("adam", {}, 1, COORDINATE, False, COORDINATE, False, ("m", "v")),
    ("adamw", {}, 1, COORDINATE, False, COORDINATE, False, ("m", "v")),
    ("adamax", {}, 1, COORDINATE, False, COORDINATE, False, ("m", "u")),
    ("nadam", {}, 1, COORDINATE, False, COORDINATE, True, ("m", "v")),
    ("radam", {}, 1, COORDINATE, False, COORDINATE, False, ("m", "v")),
    ("lion", {}, 1, COORDINATE, True, COORDINATE, True, ("m",)),
    ("lamb", {}, 2, COORDINATE, False, LAYER, False, ("m", "v")),
    ("muon", {}, 2, COORDINATE, True, LAYER, False, ("m",)),
    ("muon", {"nesterov": True}, 2, COORDINATE, True, LAYER, True, ("m",)),
    ("rmnp", {}, 2, COORDINATE, True, LAYER, False, ("m",)),
    ("dion", {}, 2, COORDINATE, True, LAYER, False, ("m",)),
    ("dobb", {}, 2, COORDINATE, True, LAYER, False, ("m",)),
    ("scion", {}, 2, COORDINATE, True, LAYER, False, ("m",)),
    ("adam_mini", {}, 3, LAYER, False, LAYER, False, ("m", "v")),
    ("adafactor", {}, 3, LAYER, False, LAYER, True, ("rows", "columns")),
    ("adalomo", {}, 3, LAYER, False, LAYER, True, ("rows", "columns")),
    ("sm3", {}, 3, LAYER, False, LAYER, True, ("rows", "columns")),
    ("lars", {}, 3, LAYER, False, COORDINATE, False, ("m",)),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0] + "".join(f"-{k}" for k in row[1]))
def test_declarations(row: tuple) -> None:
    name, structure, regime, a_reads, a_affine, u_reads, u_reads_gradient, slots = row
    rule = build_rule(name, **structure)
    assert rule.regime == regime
    assert (rule.a_reads, rule.a_affine) == (a_reads, a_affine)
    assert (rule.u_reads, rule.u_reads_gradient) == (u_reads, u_reads_gradient)
    assert tuple(slot.name for slot in rule.slots) == slots


def test_the_table_is_complete() -> None:
    assert {row[0] for row in TABLE} == set(RULES)


def one_step(rule: UpdateRule, g: torch.Tensor, w: torch.Tensor, state: tuple) -> tuple:
    return rule.update(g, w, state, torch.tensor(rule.hyperparameters(OPTIONS, 3)))


def state_after(rule: UpdateRule, g: torch.Tensor, w: torch.Tensor, state: tuple) -> tuple:
    """What A leaves; U may write more (Dion)."""
    if isinstance(rule, StateGlobalRule):
        return rule.state_update(g, w, state, torch.tensor(rule.hyperparameters(OPTIONS, 3)))
    return one_step(rule, g, w, state)[1]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0] + "".join(f"-{k}" for k in row[1]))
def test_declarations_hold(row: tuple) -> None:
    """Change one coordinate of G: A's reach is where the state changes. And A is affine if it says so."""
    rule = build_rule(row[0], **row[1])
    generator = torch.Generator().manual_seed(0)
    w, g, other = (torch.randn(4, 5, generator=generator) for _ in range(3))
    state = tuple(torch.rand(slot.shape_for(w.shape), generator=generator) for slot in rule.slots)
    poked = g.clone()
    poked[1, 2] += 50.0  # far enough to win any maximum
    before, after = state_after(rule, g, w, state), state_after(rule, poked, w, state)
    changed = [(b != a) for b, a in zip(before, after) if b.shape == w.shape]
    if rule.a_reads is COORDINATE:
        assert all(c.sum() == 1 and c[1, 2] for c in changed)
    elif rule.name == "lars":
        assert changed[0].sum() > 1
    # A(S, (G + G') / 2) is the mean of A(S, G) and A(S, G') exactly when A is affine.
    middle, second = state_after(rule, (g + other) / 2, w, state), state_after(rule, other, w, state)
    linear = all(torch.allclose(m, (a + b) / 2, atol=1e-6) for m, a, b in zip(middle, before, second))
    assert linear == rule.a_affine


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0] + "".join(f"-{k}" for k in row[1]))
def test_a_refused_step_keeps_every_bit(row: tuple) -> None:
    rule = build_rule(row[0], **row[1])
    w = torch.randn(4, 5)
    state = tuple(torch.rand(slot.shape_for(w.shape)) for slot in rule.slots)
    state = (*state, *rule.new_auxiliary(w.shape, w.device))
    h = torch.tensor(rule.hyperparameters(OPTIONS, 3))
    h[0] = 0.0
    new_w, new_state = rule.update(torch.full_like(w, torch.nan), w, state, h)
    assert torch.equal(new_w, w)
    assert all(torch.equal(n, s) for n, s in zip(new_state, state))


@pytest.mark.parametrize(
    "name", ["adamw", "muon", "rmnp", "dion", "adafactor", "adam_mini", "sm3", "lamb", "lars"]
)
def test_leading_dims_are_a_batch_of_independent_matrices(name: str) -> None:
    rule = build_rule(name)
    w, g = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    state = tuple(torch.rand(slot.shape_for(w.shape)) for slot in rule.slots_for(w.shape))
    state = (*state, *rule.new_auxiliary(w.shape, w.device))
    together, new_state = one_step(rule, g, w, state)
    for expert in range(3):
        alone, alone_state = one_step(rule, g[expert], w[expert], tuple(s[expert] for s in state))
        torch.testing.assert_close(together[expert], alone)
        for mine, other in zip(new_state, alone_state):
            torch.testing.assert_close(mine[expert], other)


def test_kernel_tables_agree() -> None:
    assert REFERENCES.keys() == HYPER_NAMES.keys() == STATE_SLOTS.keys()
    for name, reference in REFERENCES.items():
        arguments = reference.__code__.co_varnames[: reference.__code__.co_argcount]
        assert arguments == ("g", "w", *STATE_SLOTS[name], "h")


def test_hyperparameters_fill_their_names() -> None:
    for name, structure, *_ in TABLE:
        rule = build_rule(name, **structure)
        for step in (1, 2, 1000):
            assert len(rule.hyperparameters(OPTIONS, step)) == len(rule.hyper_names)


def test_unknown_rule_and_needless_nesterov_are_named() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.name = 'AdmaW'.*did you mean 'adamw'"):
        build_rule("AdmaW")
    with pytest.raises(ValueError, match=r"optimizer\.nesterov = true has no effect.*'AdamW'"):
        build_rule("AdamW", nesterov=True)
    with pytest.raises(ValueError, match=r"optimizer\.nesterov = true needs optimizer\.momentum"):
        build_rule("SGD", momentum=0.0, nesterov=True)
    assert build_rule("Adam-Mini").name == "adam_mini"
