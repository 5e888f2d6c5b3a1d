"""Gradients of a split laid side by side: eager, and in inductor's code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from titanforge.forge.side_by_side import SplitColumns, teach_inductor


def gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = SplitColumns.apply(x @ weight, [weight.shape[1] // 2] * 2, None)
    return F.silu(gate) * up


def gradients(function, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    function(x, weight).square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    return x.grad, weight.grad


@pytest.mark.parametrize(
    ("widths", "head"), [([8, 8], None), ([5, 8, 3], None), ([16], None), ([8, 4, 4], 4), ([8, 8], 2)]
)
def test_gradients_of_parts_are_those_of_split(widths: list[int], head: int | None) -> None:
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(2, 3, width, dtype=torch.float64) for width in widths]
    parts = SplitColumns.apply(x, widths, head)
    assert [part.shape[-1] for part in parts] == widths
    for part, own in zip(parts, x.split(widths, dim=-1)):
        assert torch.equal(part, own)
    sum((part * weight).sum() for part, weight in zip(parts, weights)).backward()
    assert torch.equal(x.grad, torch.cat(weights, dim=-1))


def test_a_part_that_nothing_reads_has_no_gradient() -> None:
    x = torch.randn(3, 16, requires_grad=True)
    SplitColumns.apply(x, [8, 8], None)[1].sum().backward()
    assert torch.equal(x.grad, torch.cat((torch.zeros(3, 8), torch.ones(3, 8)), dim=-1))


def test_inductor_writes_both_parts_where_they_belong() -> None:
    teach_inductor()
    x, weight = torch.randn(4, 32), torch.randn(32, 128)
    found, code = run_and_get_code(gradients, torch.compile(gated, fullgraph=True), x, weight)
    for one, other in zip(found, gradients(gated, x, weight)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    # Nobody calls the op, nor copies parts together: views of one buffer are written instead.
    backward = code[-1]
    assert "torch.ops.titanforge" not in backward and "aten.cat" not in backward
    assert "reinterpret_tensor" in backward
