"""Expert weights, [E, out, in]: each expert's gradient is consumed by itself, also when it is zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.forge.toy import (
    SIZES,
    TOKENS,
    VOCAB,
    batch,
    fuse,
    fuse_materialised,
    largest_difference,
    options_of,
    ordinary,
    same,
    states,
    train,
    weights,
)
from titanforge.models.initialization import initialize_weights
from titanforge.models.registry import build_model
from titanforge.parallelisms import apply_activation_checkpoint, apply_compile


def experts() -> Any:
    """16 experts of which a token takes 4: with the few tokens below, some get none."""
    sizes = {**SIZES, "hidden_dim": 24}
    model, _ = build_model("qwen3", "debugmodel_moe", vocab_size=VOCAB, seq_len=TOKENS, overrides=sizes)
    initialize_weights(model, 0)
    return model


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon", "adafactor"])
def test_experts_are_exact(name: str) -> None:
    fused, formed, plain = experts(), experts(), experts()
    options = options_of(name)
    optimizer, other = fuse(fused, options), fuse_materialised(formed, options)
    assert all(line.plan.fused for line in optimizer.plan)
    losses = train(fused, optimizer, 0, 5)
    assert losses == train(formed, other, 0, 5)
    assert same(weights(fused), weights(formed))
    assert same(states(optimizer), states(other))
    reference = ordinary(plain, options)
    assert losses == pytest.approx(train(plain, reference, 0, 5), abs=1e-5)
    assert largest_difference(weights(fused), weights(plain)) < 2e-5


def few_tokens(model: Any, number: int) -> Tensor:
    """Two tokens, four experts each: at least eight of a layer's sixteen get none."""
    tokens, labels = (part[1:, :2] for part in batch(number))
    return model(tokens, None, None, labels) / 2


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon"])
def test_an_expert_without_tokens_takes_the_part_of_its_step_without_gradient(name: str) -> None:
    fused, plain = experts(), experts()
    options = options_of(name, weight_decay=0.0)  # SGD's would enter its momentum
    optimizer, reference = fuse(fused, options), ordinary(plain, options)
    train(fused, optimizer, 0, 3)
    train(plain, reference, 0, 3)
    before, momentum = weights(fused), states(optimizer)
    loads: dict[str, Tensor] = {}
    for layer, block in fused.layers.items():
        block.feed_forward.register_forward_hook(
            lambda _module, _inputs, made, layer=layer: loads.update({layer: made[1].load_E})
        )
    train(fused, optimizer, 3, 4, loss=few_tokens)
    train(plain, reference, 3, 4, loss=few_tokens)
    after, expected, kept = weights(fused), weights(plain), states(optimizer)
    decay = options.beta2 if name == "lion" else options.beta1 if name == "adamw" else options.momentum
    checked = 0
    for key in (key for key in before if ".experts." in key):
        load = loads[key.split(".")[1]]
        assert load.sum() == 8
        for expert in (load == 0).nonzero().flatten().tolist():
            assert not torch.equal(before[key][expert], after[key][expert]), (key, expert)
            torch.testing.assert_close(after[key][expert], expected[key][expert], rtol=0, atol=2e-5)
            m = f"{key}.m"
            torch.testing.assert_close(kept[m][expert], decay * momentum[m][expert], rtol=1e-6, atol=0)
            checked += 1
    assert checked >= 2 * 3 * 8


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_micro_batches(name: str) -> None:
    fused, plain = experts(), experts()
    options = options_of(name)
    optimizer = fuse(fused, options, micro_batches=3, tokens=2 * TOKENS)
    train(fused, optimizer, 0, 3, micro_batches=3)
    train(plain, ordinary(plain, options), 0, 3, micro_batches=3)
    assert largest_difference(weights(fused), weights(plain)) < 2e-5


def test_recomputed_and_compiled() -> None:
    torch._dynamo.reset()  # compiled code of other tests counts against its limit
    plain, compiled = experts(), experts()
    apply_activation_checkpoint(compiled, "full")
    apply_compile(compiled, "aot_eager")
    options = options_of()
    first, second = fuse(plain, options), fuse(compiled, options)
    losses = train(compiled, second, 0, 2)
    assert train(plain, first, 0, 2) == pytest.approx(losses, abs=1e-5)
    assert largest_difference(weights(plain), weights(compiled)) < 5e-6
