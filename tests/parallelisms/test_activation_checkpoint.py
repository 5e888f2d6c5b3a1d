"""Recomputation changes memory and time, never values, names or what is called a matrix product twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallelisms.toy import backward, global_batch, make_toy
from titanforge.parallelisms import apply_activation_checkpoint


class _CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def _run(mode: str, option: str = "op"):
    model = make_toy(layers=4)
    checkpointed = apply_activation_checkpoint(model, mode, option)
    with _CountOperators() as counter:
        loss = backward(model, *global_batch(), 40)
    return checkpointed, loss, model, counter.calls


@pytest.mark.parametrize(
    ("mode", "option", "blocks"), [("full", "op", 4), ("selective", "op", 4), ("selective", "2", 2)]
)
def test_values_and_names_stay(mode, option, blocks):
    _, loss, plain, _ = _run("none")
    checkpointed, same_loss, model, _ = _run(mode, option)
    assert checkpointed == blocks
    assert torch.equal(loss, same_loss)
    for (name, p), (other, q) in zip(plain.named_parameters(), model.named_parameters()):
        assert name == other and torch.equal(p.grad, q.grad)


def test_per_operator_keeps_products_and_attention_and_recomputes_the_rest():
    *_, plain = _run("none")
    *_, selective = _run("selective", "op")
    *_, full = _run("full")
    aten = torch.ops.aten
    products = [op for op in plain if "mm.default" in str(op) or "attention" in str(op)]
    assert len(products) >= 3, "mm, addmm and attention are in the model"
    for op in products:
        assert selective[op] == plain[op]
    assert full[aten.mm.default] > plain[aten.mm.default]
    assert selective[aten.silu.default] == full[aten.silu.default] == 2 * plain[aten.silu.default]


@pytest.mark.parametrize(("mode", "option"), [("selective", "0"), ("selective", "mm"), ("some", "op")])
def test_wrong_words_name_their_key(mode, option):
    with pytest.raises(ValueError, match="activation_checkpoint"):
        apply_activation_checkpoint(make_toy(), mode, option)
