"""Micro-batches: one of four or four of one give the same step, however they are joined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.forge.toy import (
    TOKENS,
    batch,
    fuse,
    largest_difference,
    llama,
    options_of,
    ordinary,
    same,
    states,
    train,
    weights,
)

SUM = 2 * TOKENS - 1


def small_loss(model: nn.Module, number: int) -> Tensor:
    tokens, labels = batch(number)
    return model(tokens, None, None, labels) / SUM


def large_loss(model: nn.Module, number: int) -> Tensor:
    """The mean of the four small ones."""
    parts = [batch(4 * number + index) for index in range(4)]
    tokens, labels = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    return model(tokens, None, None, labels) / (4 * SUM)


@pytest.mark.parametrize("accumulation", ["auto", "stash", "buffer"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "muon", "lamb", "adafactor", "nadam"])
def test_four_micro_batches_are_one_batch(name: str, accumulation: str) -> None:
    joined, whole, plain = llama(), llama(), llama()
    options = options_of(name, lr=3e-3 if name == "sgd" else 1e-3)
    four = fuse(
        joined, options, loss=small_loss, micro_batches=4, tokens=2 * TOKENS, accumulation=accumulation
    )
    train(joined, four, 0, 6, loss=small_loss, micro_batches=4)
    train(whole, fuse(whole, options, loss=large_loss), 0, 6, loss=large_loss)
    train(plain, ordinary(plain, options), 0, 6, loss=small_loss, micro_batches=4)
    if name == "lion":
        ours = weights(joined)
        for other in (weights(whole), weights(plain)):
            turned = sum(((ours[n] - other[n]).abs() > 1e-5).sum().item() for n in ours)
            assert turned < 0.01 * sum(w.numel() for w in ours.values())
        return
    assert largest_difference(weights(joined), weights(whole)) < 2e-5
    assert largest_difference(weights(joined), weights(plain)) < 2e-5


def test_affine_rules_hold_no_buffer() -> None:
    model = llama()
    optimizer = fuse(model, options_of("sgd"), loss=small_loss, micro_batches=4, tokens=2 * TOKENS)
    assert {line.plan.join for line in optimizer.plan} == {"state", "buffer"}
    train(model, optimizer, 0, 1, loss=small_loss, micro_batches=4)
    for name, sink in optimizer._sinks.items():
        assert (sink._sum is not None) == (sink.placement.kind == "vector"), name
        assert not sink._stash


def test_stash_is_exactly_the_concatenated_tokens() -> None:
    """One product over all tokens: the same bits as one large batch, for the linears of one layer."""
    torch.manual_seed(0)
    x, t = torch.randn(4, 6, 8), torch.randn(4, 6, 5)

    def small(model: nn.Module, number: int) -> Tensor:
        return (model(x[number % 4]) * t[number % 4]).sum() * 4  # `train` divides by four

    def large(model: nn.Module, number: int) -> Tensor:
        return (model(x.flatten(0, 1)) * t.flatten(0, 1)).sum()

    a, b = nn.Linear(8, 5, bias=False), nn.Linear(8, 5, bias=False)
    b.load_state_dict(a.state_dict())
    options = options_of()
    four = fuse(a, options, loss=small, micro_batches=4, tokens=6, accumulation="stash")
    train(a, four, 0, 3, loss=small, micro_batches=4)
    train(b, fuse(b, options, loss=large), 0, 3, loss=large)
    assert torch.equal(a.weight, b.weight)


def test_small_sums_survive_stochastic_rounding() -> None:
    """64 micro-batches added to a bfloat16 momentum: unbiased with stochastic rounding, where the plain form
    would lose most of them; the plan does not choose it.
    """
    torch.manual_seed(0)
    x = torch.randn(64, 2, 64)

    def loss(model: nn.Module, number: int) -> Tensor:
        return model(x[number % 64]).sum() * 64

    def momentum(state_dtype: str, accumulation: str, sr: bool) -> tuple[Tensor, set[str]]:
        torch.manual_seed(1)
        model = nn.Linear(64, 64, bias=False).bfloat16() if sr else nn.Linear(64, 64, bias=False)

        def own(model: nn.Module, number: int) -> Tensor:
            value = x[number % 64].to(next(model.parameters()).dtype)
            return model(value).float().sum() * 64

        options = options_of(
            "sgd", state_dtype=state_dtype, master_weights="stochastic_rounding" if sr else "none"
        )
        optimizer = fuse(
            model,
            options,
            "bfloat16" if sr else "float32",
            loss=own,
            micro_batches=64,
            tokens=2,
            accumulation=accumulation,
        )
        train(model, optimizer, 0, 1, loss=own, micro_batches=64)
        return states(optimizer)["weight.m"].float(), {line.plan.join for line in optimizer.plan}

    exact, joins = momentum("float32", "auto", False)
    assert joins == {"state"}
    rounded, joins = momentum("bfloat16", "auto", True)
    assert joins == {"state"}
    _, joins = momentum("bfloat16", "auto", False)
    assert joins != {"state"}
    error = (rounded - exact).norm() / exact.norm()
    assert error < 0.02


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_a_refused_step_changes_nothing(name: str) -> None:
    """With `undo`, also when the third of four micro-batches is the one that fails."""
    model, plain = llama(), llama()
    options = options_of(name)
    optimizer = fuse(model, options, loss=small_loss, micro_batches=4, tokens=2 * TOKENS, undo=True)
    train(model, optimizer, 0, 2, loss=small_loss, micro_batches=4)
    before, kept = weights(model), states(optimizer)

    def bad_loss(model: nn.Module, number: int) -> Tensor:
        return small_loss(model, number) * (torch.nan if number % 4 == 2 else 1.0)

    train(model, optimizer, 2, 3, loss=bad_loss, micro_batches=4)
    assert same(before, weights(model))
    assert same(kept, states(optimizer))
    assert int(optimizer.step_count) == 2
    train(model, optimizer, 3, 4, loss=small_loss, micro_batches=4)
    twin = fuse(plain, options, loss=small_loss, micro_batches=4, tokens=2 * TOKENS, undo=True)
    train(plain, twin, 0, 2, loss=small_loss, micro_batches=4)
    train(plain, twin, 3, 4, loss=small_loss, micro_batches=4)
    assert same(weights(plain), weights(model))
