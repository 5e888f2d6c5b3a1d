"""The compiled form of layer-wide updates writes what the rule says, as it is stored. (On a GPU, with the
compiler's own kernels: test_gpu.)
"""

from __future__ import annotations

import pytest
import torch

from titanforge.kernels.codecs import as_encoded
from titanforge.optim.compiled import update_layer_in_place, update_weight_in_place
from titanforge.optim.local_update import LocalWeight
from titanforge.optim.registry import build_rule

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "momentum": 0.9}


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("name", ["adam_mini", "adafactor", "adalomo", "sm3", "lars", "lamb"])
def test_writes_what_the_rule_says(name: str, applied: bool) -> None:
    rule = build_rule(name)
    generator = torch.Generator().manual_seed(0)
    shape = torch.Size((29, 17))
    weight, gradient = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    states = [
        torch.rand(slot.shape_for(shape), generator=generator).to(
            torch.bfloat16 if slot.shape == "weight" else torch.float32
        )
        for slot in rule.slots_for(shape)
    ]
    h = torch.tensor(rule.hyperparameters(OPTIONS, 3))
    h[0] = float(applied)
    old = weight.clone(), [state.clone() for state in states]
    item = LocalWeight(weight, gradient, tuple(as_encoded(state) for state in states))
    wide = tuple(state.float() for state in old[1])
    if name == "lamb":
        update_weight_in_place(rule, item, h, backend="aot_eager")
        expected, new = rule.weight_update(old[0].float(), wide, h), wide  # pyright: ignore
    else:
        update_layer_in_place(rule, item, h, backend="aot_eager")
        expected, new = rule.update(gradient.float(), old[0].float(), wide, h)
    assert torch.equal(weight, expected.bfloat16())
    assert all(torch.equal(state, value.to(state.dtype)) for state, value in zip(states, new))
    assert torch.equal(weight, old[0]) is not applied
