"""An embedding whose gradient never exists as a table: its rows are summed over their tokens in registers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanforge.forge.ops import consume_rows


class FusedEmbedding(torch.autograd.Function):
    """`Y = W[ids]`; backward hands (dY, ids) to the weight's sink. Rows are cast to `dtype` after."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, handle: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(weight, ids, handle)
        return F.embedding(ids, weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        weight, ids, handle = ctx.saved_tensors
        consume_rows(weight, grad_outputs[0], ids, handle)
        return None, None, None, None
