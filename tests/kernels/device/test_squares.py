"""Sums of squares that the momentum update leaves: of what it stored, and the same bits on repeat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import hyper_vector
from titanforge.kernels.codecs import CODECS, allocate, as_encoded
from titanforge.kernels.epilogues import get_epilogue
from titanforge.kernels.flat_plan import FlatPlan

MOMENTUM = get_epilogue("momentum_state")
# Several programs, chunks that are full, rows that are no multiple of a block, experts, one element.
SHAPES = [(64, 128), (70, 100), (3, 64), (2, 5, 7), (1,)]


def momenta(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]


def plan_of(states: list[Tensor], squares: list[Tensor] | None) -> FlatPlan:
    rows = [index % 2 for index in range(len(states))]
    own = [(as_encoded(state),) for state in states]
    none = [None] * len(states)
    return FlatPlan(MOMENTUM, states, own, none, rows, list(range(len(states))), squares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_those_of_the_stored_momentum(dtype: torch.dtype, device: torch.device) -> None:
    mine, again, plain = (momenta(dtype, device) for _ in range(3))
    squares, repeated = (list(torch.zeros(len(SHAPES), device=device).unbind(0)) for _ in range(2))
    plans = plan_of(mine, squares), plan_of(again, repeated), plan_of(plain, None)
    counts = [torch.zeros(1, dtype=torch.int32, device=device) for _ in plans]
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        grads = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
        if step == 1:
            grads[1][69, 3] = torch.nan  # its chunk is left out
        if step == 2:
            grads[2:] = [grad.bfloat16() for grad in grads[2:]]  # a launch for each dtype
        # The second group's step is not applied in the last step: its momenta stay.
        hyper = torch.stack([hyper_vector(MOMENTUM, momentum=0.9), hyper_vector(MOMENTUM)]).to(device)
        hyper[1, 0] = float(step < 3)
        before = [state.clone() for state in mine]
        for plan, count in zip(plans, counts):
            plan(grads, hyper, None, count)
        for index, (state, square) in enumerate(zip(mine, squares)):
            assert torch.equal(state, plain[index]), (step, index)  # what it stores is not touched by this
            assert torch.equal(state, before[index]) == (step == 3 and index % 2 == 1)
            expected = torch._foreach_norm([state], 2.0, dtype=torch.float32)[0].square()
            torch.testing.assert_close(square, expected, rtol=2e-6, atol=0)
            assert torch.equal(square, repeated[index]), (step, index)
    assert [int(count) for count in counts] == [1, 1, 1]


def test_squares_of_what_has_none_are_refused(device: torch.device) -> None:
    weight, total = torch.zeros(4, 64, device=device), torch.zeros((), device=device)
    adamw = get_epilogue("adamw")
    with pytest.raises(ValueError, match="adamw: squares are of rules that write one state"):
        FlatPlan(adamw, [weight], [(weight, weight)], [None], [0], [0], [total])
    codes = allocate(CODECS["int8"], weight.shape, device)
    with pytest.raises(ValueError, match="momentum_state: squares are of states in floats, not of int8"):
        FlatPlan(MOMENTUM, [weight], [(codes,)], [None], [0], [0], [total])
