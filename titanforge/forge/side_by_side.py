"""Parts of one matrix's columns, and their gradients laid side by side again.

Autograd's own way back from `split` is `cat`. Inductor makes one kernel of a `cat` of computed parts, in
which every element of the result computes what all parts would have there, each under a mask: of a SwiGLU's
two gradients everything is read and computed twice. Where parts have one width it is better to write each to
its place in the kernel that makes it, and so it is of parts of any width whose gradients a reduction of their
own (a norm's) forms in memory: a `cat` would copy them. Inductor has that too, but which one it takes is a
constant of its own, so this op asks for it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_library = torch.library.Library("titanforge", "FRAGMENT")
_library.define("side_by_side(Tensor[] parts, int dim) -> Tensor")
_library.impl("side_by_side", torch.cat, "CompositeExplicitAutograd")
torch.library.register_fake("titanforge::side_by_side", torch.cat, lib=_library)


class SplitColumns(torch.autograd.Function):
    """[..., N] to parts [..., width] that share its memory.

    head: width of the pieces, of which all parts have whole ones, in which each part's gradient is formed in
    memory; None: it is computed by elements alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: list[int], head: int | None) -> tuple[Tensor, ...]:
        ctx.one_width, ctx.head = len(set(widths)) == 1, head
        return x.split(widths, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        parts = list(grad_outputs)
        if ctx.head is not None:
            # In the shape in which they are formed, else inductor copies them all the same.
            heads = [part.unflatten(-1, (-1, ctx.head)) for part in parts]
            return torch.ops.titanforge.side_by_side(heads, -2).flatten(-2), None, None
        if ctx.one_width:
            return torch.ops.titanforge.side_by_side(parts, -1), None, None
        return torch.cat(parts, dim=-1), None, None


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
    def lower(parts: list[Any], dim: int) -> Any:
        return TensorBox(ConcatKernel.create(parts, len(parts[0].get_size()) + dim))
