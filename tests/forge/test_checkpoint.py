"""A checkpoint of a fused run loads in an unfused one and back; a resumed run is the uninterrupted one."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from tests.forge.toy import fuse, llama, options_of, ordinary, same, states, train, weights
from titanforge.optim.registry import RULES

RECIPES: list[tuple[str, dict[str, Any]]] = [
    ("float32", {}),
    ("float32", {"state_dtype": "int8"}),
    ("float32", {"state_dtype": "fp8"}),
    ("bfloat16", {"state_dtype": "bfloat16", "master_weights": "stochastic_rounding"}),
    ("bfloat16", {"state_dtype": "int8", "master_weights": "stochastic_rounding"}),
    ("bfloat16", {"master_weights": "float32"}),
]


def through_a_file(*parts: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(parts, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resumed(model: Any, optimizer: Any, make: Any, options: Any, dtype: str) -> tuple[Any, Any]:
    """A new process' model and optimizer, filled from what the old one saved."""
    saved_model, saved = through_a_file(model.state_dict(), optimizer.state_dict())
    fresh = llama(getattr(torch, dtype))
    fresh.load_state_dict(saved_model)
    again = make(fresh, options, dtype)
    again.load_state_dict(saved)
    return fresh, again


@pytest.mark.parametrize(("dtype", "recipe"), RECIPES, ids=str)
def test_resume_is_bit_exact(dtype: str, recipe: dict[str, Any]) -> None:
    options = options_of("adamw", **recipe)
    model = llama(getattr(torch, dtype))
    optimizer = fuse(model, options, dtype)
    train(model, optimizer, 0, 3)
    fresh, again = resumed(model, optimizer, fuse, options, dtype)
    train(model, optimizer, 3, 6)
    train(fresh, again, 3, 6)
    assert same(weights(model), weights(fresh))
    assert same(states(optimizer), states(again))
    assert int(again.step_count) == 6


@pytest.mark.parametrize(("dtype", "recipe"), RECIPES, ids=str)
def test_fused_to_unfused_and_back(dtype: str, recipe: dict[str, Any]) -> None:
    """Keys, shapes and dtypes are the same, and nothing is lost in passing through."""
    options = options_of("adamw", **recipe)
    model = llama(getattr(torch, dtype))
    optimizer = fuse(model, options, dtype)
    train(model, optimizer, 0, 2)
    plain, ordinary_one = resumed(model, optimizer, ordinary, options, dtype)
    assert same(states(optimizer), states(ordinary_one))
    back, again = resumed(plain, ordinary_one, fuse, options, dtype)
    train(model, optimizer, 2, 5)
    train(back, again, 2, 5)
    assert same(weights(model), weights(back))
    assert same(states(optimizer), states(again))
    losses = train(plain, ordinary_one, 2, 5)
    assert losses == pytest.approx(train(*resumed(model, optimizer, fuse, options, dtype), 2, 5), abs=0.1)


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_resumes_across(name: str) -> None:
    """Fused for two steps, ordinary for two, fused again: as the ordinary engine throughout, to round-off."""
    options = options_of(name)
    model, plain = llama(), llama()
    optimizer, reference = fuse(model, options), ordinary(plain, options)
    train(model, optimizer, 0, 2)
    model, optimizer = resumed(model, optimizer, ordinary, options, "float32")
    train(model, optimizer, 2, 4)
    model, optimizer = resumed(model, optimizer, fuse, options, "float32")
    losses = train(model, optimizer, 4, 6)
    train(plain, reference, 0, 4)
    assert losses == pytest.approx(train(plain, reference, 4, 6), abs=1e-4)
    assert int(optimizer.step_count) == 6


def test_a_checkpoint_of_another_rule_is_named() -> None:
    saved = fuse(llama(), options_of("adamw")).state_dict()
    with pytest.raises(ValueError, match=r"optimizer rule \['adamw'\]"):
        fuse(llama(), options_of("lion")).load_state_dict(saved)
