"""A vector's update in one launch: the bits of the pass over flat tensors, and of a product of one token."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import Weight, assert_same_bits, hyper_vector
from titanforge.kernels.epilogues import EPILOGUES, get_epilogue
from titanforge.kernels.flat import flat_update
from titanforge.kernels.step import make_target
from titanforge.kernels.vector import update_vector, vector_tile_count
from titanforge.kernels.wgrad import fused_wgrad_update

ADAMW = get_epilogue("adamw")


def _gradient(elements: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(elements)
    return torch.randn(elements, generator=generator).to(device, torch.bfloat16)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "master", "bf16_sr", "fp8"])
@pytest.mark.parametrize("elements", [1, 70, 128, 3000])
def test_a_vector_takes_the_step_of_the_flat_pass(elements: int, recipe: str, device: torch.device) -> None:
    gradient = _gradient(elements, device)
    alone, flat, product = (Weight(ADAMW, recipe, (1, elements), device) for _ in range(3))
    hyper, rng = hyper_vector(ADAMW, device), torch.tensor([8, 1], device=device)
    norms = torch.empty(vector_tile_count(elements), device=device)
    target = make_target(ADAMW, alone.weight, alone.states, master=alone.master, tensor_id=2)
    update_vector(gradient, target, ADAMW, hyper, rng=rng, norm_partials=norms)
    flat_update(
        ADAMW, [flat.weight], [gradient.float().view(1, -1)], [flat.states], hyper,
        masters=None if flat.master is None else [flat.master], rng=rng, tensor_ids=[2],
    )  # fmt: skip
    assert_same_bits(alone.tensors(), flat.tensors())
    one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    fused_wgrad_update(
        one, gradient.view(1, -1), product.weight, product.states, ADAMW, hyper, master=product.master,
        rng=rng, tensor_id=2,
    )  # fmt: skip
    assert_same_bits(alone.tensors(), product.tensors())
    torch.testing.assert_close(norms.sum(), gradient.float().square().sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", sorted(EPILOGUES))
def test_every_epilogue_updates_a_vector(name: str, device: torch.device) -> None:
    rule = get_epilogue(name)
    alone, flat = (Weight(rule, "fp32", (1, 200), device) for _ in range(2))
    gradient, hyper = _gradient(200, device), hyper_vector(rule, device)
    update_vector(gradient, make_target(rule, alone.weight, alone.states), rule, hyper)
    flat_update(rule, [flat.weight], [gradient.float().view(1, -1)], [flat.states], hyper)
    assert_same_bits(alone.tensors(), flat.tensors())


def test_a_vector_that_is_not_finite_is_left_out_and_counted(device: torch.device) -> None:
    gradient = _gradient(70, device)
    gradient[3] = torch.inf
    alone, before = (Weight(ADAMW, "bf16", (1, 70), device) for _ in range(2))
    count = torch.zeros(1, dtype=torch.int32, device=device)
    target = make_target(ADAMW, alone.weight, alone.states)
    update_vector(gradient, target, ADAMW, hyper_vector(ADAMW, device), nonfinite=count)
    assert_same_bits(alone.tensors(), before.tensors())
    assert int(count) == 1
