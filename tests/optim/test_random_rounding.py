"""Muon and Scion with weights rounded at random: a step's mean is kept where rounding to nearest loses it."""

from __future__ import annotations

import pytest
import torch

from titanforge.kernels.codecs import CODECS, as_encoded
from titanforge.optim.local_update import LocalWeight, update_state_global
from titanforge.optim.registry import build_rule
from titanforge.optim.rule import StateGlobalRule

H = torch.tensor([1.0, 1e-3, 0.1, 1.0, 0.9, 1.0])


def _step(name: str, codec: str, shape: tuple[int, ...], parts: int = 1, h: torch.Tensor = H) -> torch.Tensor:
    """A weight of ones after one step along its own momentum."""
    rule = build_rule(name)
    assert isinstance(rule, StateGlobalRule)
    weights = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(2)]
    momenta = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    items = [
        LocalWeight(weight, None, (as_encoded(m),), codec=CODECS[codec], tensor_id=seed, parts=parts)
        for seed, (weight, m) in enumerate(zip(weights, momenta))
    ]
    update_state_global(rule, items, h, torch.tensor([5, 1]), torch.zeros(1, dtype=torch.int32))
    return torch.stack(weights).float()


@pytest.mark.parametrize("name", ["muon", "scion"])
@pytest.mark.parametrize("shape, parts", [((64, 96), 1), ((64, 96), 2), ((3, 64, 32), 1)])
def test_the_mean_of_a_step_is_kept(name: str, shape: tuple[int, ...], parts: int) -> None:
    # Decay alone is 1e-4, and below 1 neighbours are 2**-8 apart: no step of some 1e-3 survives to nearest.
    exact = 1 - H[1] * H[2]
    random = _step(name, "bf16_sr", shape, parts)
    assert set(random.unique().tolist()) <= {1 - 2.0**-7, 1 - 2.0**-8, 1.0, 1 + 2.0**-7}
    # The steps' own signs are even; 12,000 draws of a last bit: a standard error of some 2e-5.
    assert float(random.mean()) == pytest.approx(float(exact), abs=1.5e-4)
    assert bool((random != 1).any())
    assert torch.equal(random, _step(name, "bf16_sr", shape, parts)), "the draws follow from seed and step"
    assert not torch.equal(random[0], random[1])


def test_refused_step_keeps_every_bit() -> None:
    refused = H.clone()
    refused[0] = 0.0
    assert bool((_step("muon", "bf16_sr", (64, 96), h=refused) == 1).all())
