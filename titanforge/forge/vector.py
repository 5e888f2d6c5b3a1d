"""Norms' weights and biases: their gradients are complete, small vectors when backward makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanforge.forge.ops import consume_gradient


class Tap(torch.autograd.Function):
    """The weight itself, given detached (see `linear`); backward hands its gradient to the weight's sink.

    Everything that reads the weight in backward has run by then: autograd completes a tensor's gradient
    before it passes it on.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, handle: Tensor) -> Tensor:
        ctx.save_for_backward(weight, handle)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        weight, handle = ctx.saved_tensors
        consume_gradient(weight, grad_outputs[0], handle)
        return None, None
