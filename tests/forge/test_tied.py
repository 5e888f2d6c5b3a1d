"""A table that the embedding and the head share: consumed once, when both of its parts are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
from titanforge.forge.tied import TiedSink
from titanforge.models.layers.loss import OutputHead

CASES = [
    ("adamw", {}, 1),
    ("adamw", {"keep_logits": True}, 1),
    ("adamw", {}, 3),
    ("adamw", {"state_dtype": "int8"}, 3),
    ("adamw", {"state_dtype": "fp8"}, 1),
    ("sgd", {}, 1),
    ("sgd", {}, 3),
    ("lamb", {}, 3),
    ("adafactor", {}, 1),
]


@pytest.mark.parametrize(("name", "recipe", "micro_batches"), CASES, ids=str)
def test_the_table_is_fused_and_exact(
    name: str, recipe: dict[str, Any], micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK_LOGITS", 1)  # 300 rows in chunks of 256 and 44
    fused, plain = llama(tie_embeddings=True), llama(tie_embeddings=True)
    keep_logits = recipe.get("keep_logits", False)
    recipe = {key: value for key, value in recipe.items() if key != "keep_logits"}
    options = options_of(name, **recipe)
    optimizer = fuse(fused, options, micro_batches=micro_batches, tokens=32, keep_logits=keep_logits)
    assert all(line.plan.fused for line in optimizer.plan)
    losses = train(fused, optimizer, 0, 6, micro_batches=micro_batches)
    expected = train(plain, ordinary(plain, options), 0, 6, micro_batches=micro_batches)
    assert losses == pytest.approx(expected, abs=2e-5 if not recipe else 2e-3)
    assert largest_difference(weights(fused), weights(plain)) < (3e-5 if not recipe else 2e-3)


@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [
        ("float32", {"state_dtype": "fp8"}),
        ("bfloat16", {"master_weights": "float32"}),
        ("bfloat16", {"state_dtype": "int8", "master_weights": "stochastic_rounding"}),
    ],
    ids=str,
)
def test_fused_is_formed_bit_for_bit(dtype: str, recipe: dict[str, Any]) -> None:
    fused, formed = (llama(getattr(torch, dtype), tie_embeddings=True) for _ in range(2))
    options = options_of(**recipe)
    optimizer, other = fuse(fused, options, dtype), fuse_materialised(formed, options, dtype)
    assert train(fused, optimizer, 0, 4) == train(formed, other, 0, 4)
    assert same(weights(fused), weights(formed)) and same(states(optimizer), states(other))


def test_it_changes_in_the_embeddings_backward_and_has_no_gradient() -> None:
    model = llama(tie_embeddings=True)
    optimizer = fuse(model, options_of())
    before = model.output.weight.detach().clone()
    unchanged: list[bool] = []
    model.layers["0"].register_full_backward_hook(
        lambda *_: unchanged.append(torch.equal(model.output.weight, before))
    )
    optimizer.begin_step(1)
    loss = llama_loss(model, 0)
    optimizer.before_backward(0)
    loss.backward()
    assert unchanged == [True]
    assert not torch.equal(model.output.weight, before)
    assert model.output.weight is model.tok_embeddings.weight and model.output.weight.grad is None
    optimizer.step()


def test_a_compiled_head() -> None:
    """What lies between its products is compiled, as without a tie."""
    plain, compiled = llama(tie_embeddings=True), llama(tie_embeddings=True)
    compiled.output.compile(backend="eager")
    first, second = fuse(plain, options_of()), fuse(compiled, options_of())
    sink = second._sinks["tok_embeddings.weight"]
    assert isinstance(sink, TiedSink) and sink.turn is not head.turn_into_gradient
    assert train(plain, first, 0, 2) == pytest.approx(train(compiled, second, 0, 2), abs=1e-6)
    assert largest_difference(weights(plain), weights(compiled)) < 2e-6


class Partly(nn.Module):
    """Calls its embedding, its head, or both, as `way` says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8, padding_idx=3)
        self.linear = nn.Linear(8, 8, bias=False)
        self.head = OutputHead(8, 20)
        nn.init.normal_(self.embed.weight)
        self.head.weight = self.embed.weight
        self.way = ""

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.ones(*ids.shape, 8) if self.way == "head alone" else self.embed(ids)
        x = self.linear(x)
        return x.square().mean() if self.way == "embedding alone" else self.head(x, (ids + 1) % 20) / 6


def partly_loss(model: nn.Module, number: int) -> Tensor:
    assert isinstance(model, Partly)
    # Never in the probe, which sees number 0.
    model.way = ("", "head alone", "embedding alone", "", "embedding alone", "head alone")[number % 6]
    return model((torch.arange(6).view(2, 3) + number) % 20)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_either_part_may_be_missing(name: str, micro_batches: int) -> None:
    """Also where it is the last micro-batch's: what waits is consumed at the end of the step."""
    fused, plain = Partly(), Partly()
    options = options_of(name)
    steps = {"micro_batches": micro_batches, "tokens": 6, "max_norm": 0.0 if name == "sgd" else 1e9}
    optimizer = fuse(fused, options, loss=partly_loss, **steps)
    assert all(line.plan.fused for line in optimizer.plan)
    train(fused, optimizer, 0, 7, loss=partly_loss, micro_batches=micro_batches)
    train(plain, ordinary(plain, options), 0, 7, loss=partly_loss, micro_batches=micro_batches)
    for ours, theirs in zip(fused.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6)


def test_a_head_called_without_labels_says_so() -> None:
    model = llama(tie_embeddings=True)
    optimizer = fuse(model, options_of())
    optimizer.begin_step(1)
    loss = model(torch.arange(8).unsqueeze(0), logits_at=-1).square().mean()
    optimizer.before_backward(0)
    with pytest.raises(RuntimeError, match="called without labels: hand it the labels"):
        loss.backward()


def test_a_head_with_a_bias_is_not_fused() -> None:
    """Its forward takes what the fused one has no place for."""

    class Biased(nn.Linear):
        owns_loss = True

        def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
            logits = super().forward(input)
            if labels is None:
                return logits
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss(model: nn.Module, number: int) -> Tensor:
        ids = torch.arange(6).view(2, 3) + number
        return model.head(model.embed(ids % 20), (ids + 1) % 20)  # pyright: ignore

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module()
        model.embed, model.head = nn.Embedding(20, 8), Biased(8, 20)
        return model

    fused, plain = build(), build()
    optimizer = fuse(fused, options_of(), loss=loss)
    whys = {line.name: line.plan.why for line in optimizer.plan if not line.plan.fused}
    assert whys == {"head.weight": "a head that owns its loss, with a bias"}
    losses = train(fused, optimizer, 0, 3, loss=loss)
    assert losses == pytest.approx(train(plain, ordinary(plain, options_of()), 0, 3, loss=loss), abs=1e-5)
