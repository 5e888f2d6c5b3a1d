"""The table that embedding and head share: one gradient, complete in the embedding's backward.

The head comes first in backward. It hands on the gradient of its hidden states and keeps those, [N, D], with
labels and log-sum-exp. When the embedding's rows arrive, the gradient of a chunk of the table's rows is

    G = dlogitsᵀ hidden + onehot(ids)ᵀ dy,

and that is one product over twice the tokens: `[dlogits; onehot]ᵀ [hidden; dy]`. The logits' gradient is
formed once more, from the table that nothing has changed yet, or with `keep_logits` was kept. So the gradient
[V, D] never exists, every kernel and epilogue is the head's, and 1 is exact in any dtype. It costs one
product to form the logits again and one for the embedding's half.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from titanforge.forge.head import HeadSink, Tokens
from titanforge.forge.sources import Product, Rows


@dataclass(eq=False)
class TiedSink(HeadSink):
    """The sink of an embedding's weight that a head with its loss reads too."""

    _arrived: list[Rows] = field(default_factory=list)
    _beside: Rows | None = None

    def loss(self, weight_VD: Tensor, tokens: Tokens, kept_NV: Tensor | None = None) -> Tensor:
        """The head's part of a micro-batch, which waits for the embedding's."""
        self.check_running()
        waiting = tokens.copy()
        self._waiting.append(waiting)
        if kept_NV is None:
            return self._walk(weight_VD, tokens, tokens.hidden.shape[0], consume=False)
        grad_hidden = self.turned(weight_VD, tokens, kept_NV)
        waiting.gradient = kept_NV.clone()
        return grad_hidden

    def product(self, dy: Tensor, x: Tensor) -> None:
        raise RuntimeError(
            f"{self.name!r}: a fused head that shares its weight with the embedding was called without "
            "labels: hand it the labels, or set forge.enable = false"
        )

    def rows(self, dy: Tensor, ids: Tensor) -> None:
        """The embedding's part. dy: [T, D]; ids: [T]."""
        self.begin()
        self._arrived.append(self.own_rows(dy, ids).copy())
        if self.plan.join != "stash" or self.clock.last:
            self._consume_both()
        self._tell()

    def _consume_both(self) -> None:
        rows = self._arrived[0].joined(self._arrived[1:]) if self._arrived else None
        waiting, self._waiting = self._waiting, []
        self._arrived.clear()
        if not waiting:
            assert rows is not None
            self.keep_norms({0})
            (self.add_to_state if self.plan.join == "state" else self.consume)(rows)
            return
        item, self._beside = self.item(), rows
        self._walk(item.weight if item.copy is None else item.copy, Tokens.joined(waiting), 0, consume=True)
        self._beside = None

    def operand_tokens(self, hidden: Tensor) -> int:
        return hidden.shape[0] + (0 if self._beside is None else self._beside.ids.shape[0])

    def operands(self, gradient_NR: Tensor, hidden: Tensor, first: int) -> Product:
        if self._beside is None:
            return Product(gradient_NR, hidden)
        dy, ids = self._beside.dy, self._beside.ids
        dtype = torch.promote_types(hidden.dtype, dy.dtype)
        columns = torch.arange(first, first + gradient_NR.shape[1], device=ids.device)
        onehot_TR = ids[:, None] == columns
        return Product(
            torch.cat((gradient_NR.to(dtype), onehot_TR.to(dtype))),
            torch.cat((hidden.to(dtype), dy.to(dtype))),
        )

    def finish(self) -> None:
        """Also what the head has left if nothing reached the embedding after it."""
        if not self.done and (self._waiting or self._arrived):
            self.touched += 1
            self._consume_both()
        super().finish()

    def forget(self) -> None:
        super().forget()
        self._arrived.clear()
