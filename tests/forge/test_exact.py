"""Fused is unfused: bit for bit against the same gradient formed, to round-off against the ordinary one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.forge.toy import (
    fuse,
    fuse_materialised,
    largest_difference,
    llama,
    llama_loss,
    options_of,
    ordinary,
    same,
    states,
    train,
    weights,
)
from titanforge.forge import head
from titanforge.optim.registry import RULES

# The head sums its logits' gradient in another order than the ordinary loss: the last bits of fp32 differ,
# and a rule that divides by a root of a sum of few squares multiplies that.
# Dion's power iteration turns such bits within the space of singular values that lie close together.
# Dobb's basis is stored in bf16, where they decide how a value halfway is rounded.
TOLERANCE = {"adagrad": 1e-4, "rmsprop": 1e-4, "dion": 2e-3, "dobb": 1e-4}


@pytest.mark.parametrize("name", sorted(RULES))
def test_twenty_steps_of_every_rule(name: str) -> None:
    fused, formed, plain = llama(), llama(), llama()
    options = options_of(name)
    optimizer, other, reference = (
        fuse(fused, options),
        fuse_materialised(formed, options),
        ordinary(plain, options),
    )
    losses = train(fused, optimizer, 0, 20)
    assert losses == train(formed, other, 0, 20)
    assert same(weights(fused), weights(formed))
    assert same(states(optimizer), states(other))

    expected = train(plain, reference, 0, 20)
    assert losses == pytest.approx(expected, abs=2e-5)
    assert int(optimizer.step_count) == 20
    assert states(optimizer).keys() == states(reference).keys()
    if (
        name == "lion"
    ):  # a sign near zero may turn, which moves a weight by twice the rate; but of few weights
        ours, theirs = weights(fused), weights(plain)
        turned = sum(((ours[n] - theirs[n]).abs() > 1e-5).sum().item() for n in ours)
        assert turned < 0.01 * sum(w.numel() for w in ours.values())
    else:
        assert largest_difference(weights(fused), weights(plain)) < TOLERANCE.get(name, 2e-5)


RECIPES = [
    ("float32", {"state_dtype": "bfloat16"}),
    ("float32", {"state_dtype": "int8"}),
    ("float32", {"state_dtype": "fp8"}),
    ("bfloat16", {"state_dtype": "bfloat16"}),
    ("bfloat16", {"master_weights": "float32"}),
    ("bfloat16", {"state_dtype": "bfloat16", "master_weights": "stochastic_rounding"}),
    ("bfloat16", {"state_dtype": "int8", "master_weights": "stochastic_rounding"}),
    ("bfloat16", {"state_dtype": "fp8", "master_weights": "float32"}),
]


@pytest.mark.parametrize(("dtype", "recipe"), RECIPES, ids=str)
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_recipes(name: str, dtype: str, recipe: dict[str, Any]) -> None:
    """Every storage, fused and formed, bit for bit; and the losses of the ordinary engine."""
    torch_dtype = getattr(torch, dtype)
    fused, formed, plain = llama(torch_dtype), llama(torch_dtype), llama(torch_dtype)
    options = options_of(name, **recipe)
    optimizer, other = fuse(fused, options, dtype), fuse_materialised(formed, options, dtype)
    losses = train(fused, optimizer, 0, 8)
    train(formed, other, 0, 8)
    assert same(weights(fused), weights(formed))
    assert same(states(optimizer), states(other))
    expected = train(plain, ordinary(plain, options, dtype), 0, 8)
    assert losses == pytest.approx(expected, abs=0.02)


def test_no_gradient_of_any_parameter_ever_exists() -> None:
    """Looked at while backward runs, after each module and each weight."""
    model = llama()
    optimizer = fuse(model, options_of())
    seen: list[str] = []
    looks = 0

    def look(*_: object) -> None:
        nonlocal looks
        looks += 1
        seen.extend(name for name, param in model.named_parameters() if param.grad is not None)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(look)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    train(model, optimizer, 0, 2)
    assert seen == []
    assert looks > 20
    assert all(line.plan.fused for line in optimizer.plan)


def test_all_weights_and_states_move_during_backward() -> None:
    model = llama()
    optimizer = fuse(model, options_of())
    before, empty = weights(model), states(optimizer)
    optimizer.begin_step(1)
    value = llama_loss(model, 0)
    optimizer.before_backward(0, torch.tensor(True))
    value.backward()
    after = weights(model)
    assert not [name for name in before if torch.equal(before[name], after[name])]
    assert not [name for name, state in states(optimizer).items() if torch.equal(state, empty[name])]
    optimizer.step()
    assert same(weights(model), after)


def test_input_gradient_is_of_the_weight_before_its_update() -> None:
    """With a huge rate the two would differ at once."""
    fused, plain = llama(), llama()
    options = options_of("sgd", momentum=0.0, lr=10.0)
    train(fused, fuse(fused, options), 0, 1)
    train(plain, ordinary(plain, options), 0, 1)
    ours, theirs = weights(fused), weights(plain)
    for name, theirs_now in theirs.items():
        torch.testing.assert_close(ours[name], theirs_now, rtol=1e-4, atol=1e-4)


def test_evaluation_needs_no_step() -> None:
    model, plain = llama(), llama()
    fuse(model, options_of())
    with torch.no_grad():
        assert llama_loss(model, 1) == llama_loss(plain, 1)
        tokens = torch.arange(8).unsqueeze(0)
        assert torch.equal(model(tokens, logits_at=-1), plain(tokens, logits_at=-1))


def test_a_detached_model_is_an_ordinary_one_again() -> None:
    model, plain = llama(), llama()
    optimizer = fuse(model, options_of())
    train(model, optimizer, 0, 2)
    optimizer.detach()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        llama_loss(each, 5).backward()
    assert all(
        torch.equal(ours.grad, theirs.grad)  # pyright: ignore[reportArgumentType]
        for ours, theirs in zip(model.parameters(), plain.parameters())
    )


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("adamw", {}),
        ("adamw", {"state_dtype": "int8"}),
        ("adamw", {"state_dtype": "fp8"}),
        ("sgd", {}),
        ("lamb", {}),
        ("adafactor", {}),
    ],
    ids=str,
)
def test_head_in_chunks_of_rows(
    name: str, recipe: dict[str, Any], micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 rows of vocabulary in chunks of 256 and 44, against one chunk."""
    options = options_of(name, **recipe)
    whole, chunked = llama(), llama()
    steps = {"micro_batches": micro_batches, "tokens": 32}
    first, second = fuse(whole, options, **steps), fuse(chunked, options, **steps)
    losses = train(whole, first, 0, 4, micro_batches=micro_batches)
    monkeypatch.setattr(head, "CHUNK_LOGITS", 1)
    assert list(head._chunks(32, 300)) == [(0, 256), (256, 44)]
    assert train(chunked, second, 0, 4, micro_batches=micro_batches) == pytest.approx(losses, abs=1e-5)
    assert largest_difference(weights(whole), weights(chunked)) < (2e-5 if not recipe else 2e-3)


@pytest.mark.parametrize(
    ("name", "recipe", "micro_batches"),
    [
        ("adamw", {}, 1),
        ("adamw", {"state_dtype": "fp8"}, 1),
        ("lamb", {}, 1),
        ("adamw", {}, 3),
        ("sgd", {}, 3),
    ],
    ids=str,
)
def test_head_that_keeps_its_logits(
    name: str, recipe: dict[str, Any], micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run as with logits that are formed again, with one product of the vocabulary's width less."""
    monkeypatch.setattr(head, "CHUNK_LOGITS", 1)
    options = options_of(name, **recipe)
    again, kept = llama(), llama()
    steps = {"micro_batches": micro_batches, "tokens": 32}
    first, second = fuse(again, options, **steps), fuse(kept, options, **steps, keep_logits=True)
    formed: dict[str, int] = {}

    def count(model: Any, optimizer: Any, label: str) -> list[float]:
        linear = head.F.linear

        def counted(x: Any, weight: Any, *rest: Any) -> Any:
            formed[label] = formed.get(label, 0) + weight.shape[0]
            return linear(x, weight, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(head.F, "linear", counted)
            return train(model, optimizer, 0, 3, micro_batches=micro_batches)

    losses = count(again, first, "again")
    assert count(kept, second, "kept") == pytest.approx(losses, abs=1e-5)
    assert largest_difference(weights(again), weights(kept)) < (2e-5 if not recipe else 2e-3)
    stashed = second._plans["output.weight"].join == "stash"
    assert (formed["kept"] < formed["again"]) != stashed
    assert ("keep_logits = true has no effect" in second.report()) == stashed
