"""The multi-tensor pass: tensors of every shape in one call."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import (
    RECIPES,
    Weight,
    assert_near_reference,
    assert_same_state,
    hyper_vector,
)
from titanforge.kernels import flat
from titanforge.kernels.epilogues import get_epilogue
from titanforge.kernels.flat import flat_update
from titanforge.kernels.step import make_target, reference_update

ADAMW = get_epilogue("adamw")
SHAPES = [(70,), (3, 64), (40, 128), (2, 5, 67), (4, 2, 3, 3), (), (0, 8), (1, 1)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_many_tensors_equal_the_reference_one_by_one(recipe: str, device: torch.device) -> None:
    cases = [Weight(ADAMW, recipe, shape, device, seed) for seed, shape in enumerate(SHAPES)]
    expected = [Weight(ADAMW, recipe, shape, "cpu", seed) for seed, shape in enumerate(SHAPES)]
    before = [case.weight.values.clone() for case in expected]
    grads = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed, shape in enumerate(SHAPES)
    ]
    hyper = torch.stack([hyper_vector(ADAMW, lr=0.01), hyper_vector(ADAMW, lr=0.5, weight_decay=0.0)])
    rows = [index % 2 for index in range(len(SHAPES))]
    rng = torch.tensor([7, 3])
    flat_update(
        ADAMW, [case.weight for case in cases], [grad.to(device) for grad in grads], [case.states for case in
        cases],
        hyper.to(device), masters=[case.master for case in cases], hyper_rows=rows, rng=rng.to(device),
        tensor_ids=list(range(len(SHAPES))),
    )  # fmt: skip
    for index, (case, grad) in enumerate(zip(expected, grads)):
        if grad.numel():
            target = make_target(ADAMW, case.weight, case.states, master=case.master, tensor_id=index)
            reference_update(ADAMW, grad, target, hyper[rows[index]], rng)
        found = cases[index]
        assert_near_reference(found.weight.values, case.weight.values, before[index])
        for state, wanted in zip(found.states, case.states):
            assert_same_state(state, wanted)


def test_low_precision_gradients_and_unaligned_views(device: torch.device) -> None:
    base = torch.randn(65 * 64 + 1, generator=torch.Generator().manual_seed(0)).to(device)
    grads = [torch.randn(65, 64, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)] * 2
    rule = get_epilogue("sgd")
    hyper = hyper_vector(rule, device)
    shifted, aligned = base[1:].view(65, 64), base[1:].clone().view(65, 64)
    flat_update(rule, [shifted, aligned], grads, [[], []], hyper)
    assert torch.equal(shifted, aligned)


def test_tables_are_built_once_for_the_same_tensors(device: torch.device) -> None:
    case = Weight(ADAMW, "bf16", (8, 64), device)
    grad = torch.ones(8, 64, device=device)
    flat_update(ADAMW, [case.weight], [grad], [case.states], hyper_vector(ADAMW, device))
    known = dict(flat._tables)
    flat_update(ADAMW, [case.weight], [grad], [case.states], hyper_vector(ADAMW, device, lr=1.0))
    assert flat._tables.keys() == known.keys()
