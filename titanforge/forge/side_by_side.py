"""Parts of one matrix's columns, and their gradients laid side by side again.

Autograd's own way back from `split` is `cat`. Inductor makes one kernel of a `cat` of computed parts, in
which every element of the result computes what all parts would have there, each under a mask: of a SwiGLU's
two gradients everything is read and computed twice. Where parts have one width it is better to write each to
its place in the kernel that makes it. Inductor has that too, but which one it takes is a constant of its own,
so this op asks for it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_library = torch.library.Library("titanforge", "FRAGMENT")
_library.define("side_by_side(Tensor[] parts) -> Tensor")
_library.impl("side_by_side", lambda parts: torch.cat(parts, dim=-1), "CompositeExplicitAutograd")
torch.library.register_fake("titanforge::side_by_side", lambda parts: torch.cat(parts, dim=-1), lib=_library)


class SplitColumns(torch.autograd.Function):
    """[..., N] to parts [..., width] that share its memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        ctx.one_width = len(set(widths)) == 1
        return x.split(widths, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        parts = list(grad_outputs)
        if ctx.one_width:
            return torch.ops.titanforge.side_by_side(parts), None
        return torch.cat(parts, dim=-1), None


@functools.cache
def teach_inductor() -> None:
    """Have inductor write the parts of `side_by_side` where they belong. Without its internals, it copies
    them.
    """
    try:
        from torch._inductor.ir import ConcatKernel, TensorBox
        from torch._inductor.lowering import register_lowering
    except ImportError as error:
        logger.warning(
            "gradients of merged projections take a copy more: inductor has other parts here (%s)",
            error,
        )
        return

    @register_lowering(torch.ops.titanforge.side_by_side.default, type_promotion_kind=None)
    def lower(parts: list[Any]) -> Any:
        return TensorBox(ConcatKernel.create(parts, len(parts[0].get_size()) - 1))
