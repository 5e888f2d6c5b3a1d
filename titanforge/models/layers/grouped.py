"""One matrix per group of rows: the linear layers of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def grouped_linear(x_SD: torch.Tensor, weight_EFD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """``x weight[e]ᵀ`` for the rows of each group e → [S, F].

    Args:
        x_SD: rows sorted by group.
        weight_EFD: one matrix [out, in] per group.
        ends_E: int32, the row after each group's last; non-decreasing, the last is S. Groups may be empty.

    bfloat16 on CUDA is one grouped matrix product without a host wait; anything else a loop over groups,
    which waits for ``ends_E``.
    """
    if x_SD.is_cuda and x_SD.dtype == torch.bfloat16 and x_SD.shape[0]:
        return F.grouped_mm(x_SD, weight_EFD.transpose(-2, -1), offs=ends_E)
    return _grouped_loop(x_SD, weight_EFD, ends_E)


# The loop is an operator of its own: reading the groups' ends inside a compiled block would break its graph.


@torch.library.custom_op("titanforge::grouped_loop", mutates_args=())
def _grouped_loop(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(x.shape[0], weight.shape[1])
    for e, (start, end) in enumerate(_ranges(ends)):
        torch.mm(x[start:end], weight[e].t(), out=y[start:end])
    return y


@torch.library.custom_op("titanforge::grouped_loop_backward", mutates_args=())
def _grouped_loop_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    for e, (start, end) in enumerate(_ranges(ends)):
        torch.mm(grad[start:end], weight[e], out=grad_x[start:end])
        torch.mm(grad[start:end].t(), x[start:end], out=grad_weight[e])  # an empty group's is 0
    return grad_x, grad_weight


def _ranges(ends: torch.Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


@_grouped_loop.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_grouped_loop_backward.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    return (*_grouped_loop_backward(grad.contiguous(), x, weight, ends), None)


_grouped_loop.register_autograd(_backward, setup_context=_setup)
