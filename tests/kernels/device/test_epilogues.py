"""Every rule's Triton form against its torch reference, through the flat kernel."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import RECIPES, Weight, assert_near_reference, assert_same_bits, hyper_vector
from titanforge.kernels.codecs import decode
from titanforge.kernels.epilogues import EPILOGUES, get_epilogue
from titanforge.kernels.flat import flat_update


@pytest.mark.parametrize("name", EPILOGUES)
def test_rule_equals_its_reference(name: str, device: torch.device) -> None:
    rule = EPILOGUES[name]
    case = Weight(rule, "fp32", (5, 70), device)
    hyper = hyper_vector(rule)
    gradient = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    gradient[0, 0] = 0.0  # sign(0) in Lion
    before = [decode(part).cpu().clone() for part in (case.weight, *case.states)]
    expected = rule.reference(gradient, *before, hyper)

    flat_update(rule, [case.weight], [gradient.to(device)], [case.states], hyper.to(device))

    weight, *states = expected
    assert_near_reference(case.weight.values, weight, before[0])
    assert_same_bits([part.values for part in case.states], states)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_that_is_not_applied_changes_no_bit(recipe: str, device: torch.device) -> None:
    rule = get_epilogue("adamw")
    case = Weight(rule, recipe, (3, 130), device)
    before = [tensor.clone() for tensor in case.tensors()]
    gradient = torch.full((3, 130), float("nan"), device=device)

    flat_update(
        rule, [case.weight], [gradient], [case.states], hyper_vector(rule, device, apply=0.0),
        masters=[case.master],
        rng=torch.tensor([1, 2], device=device),
    )  # fmt: skip

    assert_same_bits(case.tensors(), before)


@pytest.mark.parametrize("recipe", ["bf16", "int8", "fp8"])
def test_a_chunk_with_a_gradient_that_is_not_finite_is_left_and_counted(
    recipe: str, device: torch.device
) -> None:
    rule = get_epilogue("adamw")
    # 70 rows of one block each: chunks of 32, 32 and 6 rows.
    case = Weight(rule, recipe, (70, 64), device)
    before = [decode(part).clone() for part in (case.weight, *case.states)]
    gradient = torch.ones(70, 64, device=device)
    gradient[40, 3] = float("inf")
    counter = torch.zeros(1, dtype=torch.int32, device=device)

    flat_update(rule, [case.weight], [gradient], [case.states], hyper_vector(rule, device), nonfinite=counter)

    assert counter.item() == 1
    for part, old in zip((case.weight, *case.states), before):
        new = decode(part)
        assert torch.equal(new[32:64], old[32:64])
        assert not torch.equal(new[:32], old[:32])
        assert not torch.equal(new[64:], old[64:])
        assert torch.isfinite(new).all()
