"""A linear layer whose weight gradient is consumed where it is made."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanforge.forge.ops import consume_product


class FusedLinear(torch.autograd.Function):
    """`Y = X Wᵀ + b`; backward takes `dX = dY W` from the weight before its update, then hands (dY, X) to the
    weight's sink (FORGE, remark 2).

    weight: the stored one detached, on the same memory: what is changed in backward must not require grad, or
    torch 2.11 does not compile it. The handle requires it instead, so that a first layer gets a backward too;
    its gradient is None. `dtype` is what the product is computed in: a weight stored wider is cast on each
    use, since a kept copy would be a second model.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight, handle)
        return F.linear(x, weight.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        x, weight, handle = ctx.saved_tensors
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        bias_gradient = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        consume_product(weight, dy, x, handle)
        return dx, None, bias_gradient, None, None


def fused_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, dtype: torch.dtype
) -> Tensor:
    """The linear in `dtype`, or in autocast's where that is on.

    x: [..., K]; weight: [N, K], as stored, detached; bias: [N] or None; handle: of the weight's sink.
    """
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(device_type, enabled=False):
            return FusedLinear.apply(x, weight, bias, handle, dtype)  # pyright: ignore[reportReturnType]
    return FusedLinear.apply(x, weight, bias, handle, dtype)  # pyright: ignore[reportReturnType]
