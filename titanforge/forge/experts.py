"""Linear layers of experts, [E, N, K], whose gradient is consumed expert by expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanforge.forge.ops import consume_experts


class FusedExperts(torch.autograd.Function):
    """`Y[s] = X[s] W[e]ᵀ` for the rows s of each expert e; backward as `FusedLinear`'s.

    An expert that no row reaches takes the part of its step that is free of the gradient (FORGE, remark 1).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, handle: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends, handle)
        return _grouped(x, weight.to(dtype).transpose(-2, -1), ends)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dy = grad_outputs[0].contiguous()
        x, weight, ends, handle = ctx.saved_tensors
        dx = _grouped(dy, weight.to(dy.dtype), ends) if ctx.needs_input_grad[0] else None
        consume_experts(weight, dy, x, ends, handle)
        return dx, None, None, None, None


def fused_experts(x: Tensor, weight: Tensor, ends: Tensor, handle: Tensor, dtype: torch.dtype) -> Tensor:
    """x: [S, K], rows sorted by expert; weight: [E, N, K], as stored, detached; ends: int32 [E]. → [S, N]"""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            return FusedExperts.apply(x.to(dtype), weight, ends, handle, dtype)  # pyright: ignore[reportReturnType]
    return FusedExperts.apply(x, weight, ends, handle, dtype)  # pyright: ignore[reportReturnType]


def _grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """`x matrices[e]` for the rows of each group. On CUDA in bfloat16 one product, else a loop."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, matrices, offs=ends)
    return _grouped_loop(x, matrices, ends)


# An operator of its own: reading the groups' ends inside a compiled block would break its graph.
@torch.library.custom_op("titanforge::forge_grouped_loop", mutates_args=())
def _grouped_loop(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], matrices.shape[-1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(x[begin:end], matrices[expert], out=y[begin:end])
        begin = end
    return y


@_grouped_loop.register_fake
def _(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], matrices.shape[-1])
