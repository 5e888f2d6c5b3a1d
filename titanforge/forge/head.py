"""The last linear with its cross-entropy, a chunk of vocabulary rows at a time.

Chunks of tokens, as the ordinary loss takes them, would leave each tile of the head's gradient partial to the
end. A chunk of rows sees all tokens: its logits are formed again in backward from the log-sum-exp that
forward has kept, its share of the hidden states' gradient is taken from the rows before their update, and its
tiles are complete. Four matrix products instead of three; neither the gradient [V, D] nor all logits exist at
any time. With `keep_logits` forward keeps them all and backward turns them into their gradient where they
lie: three products, and N V numbers more at the peak.

N tokens, D model width, V vocabulary, R rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanforge.forge.ops import sink_of
from titanforge.forge.plan import Granule
from titanforge.forge.sinks import Sink
from titanforge.forge.sources import Product

IGNORE_INDEX = -100
CHUNK_LOGITS = 2**23
"""Most logits held at once: 16 MiB in bf16."""
_ROWS = 256  # chunks are whole tiles of the update


def rows_per_chunk(tokens: int, vocab_size: int) -> int:
    """R for N tokens."""
    return min(vocab_size, max(_ROWS, CHUNK_LOGITS // max(tokens, 1) // _ROWS * _ROWS))


def _chunks(tokens: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each chunk."""
    rows = rows_per_chunk(tokens, vocab_size)
    for first in range(0, vocab_size, rows):
        yield first, min(rows, vocab_size - first)


def turn_into_gradient(logits_NR: Tensor, lse_N1: Tensor, column_N1: Tensor, scale_N1: Tensor) -> None:
    """The gradient of `scale · loss` by a chunk's logits, in their own place.

    column: the label's column in this chunk; outside of 0 … R-1 it is in another. scale: 0 for a token that
    is not counted. The label's own `p - 1` is formed by expm1, so that a confident token keeps its gradient:
    for all elements, as in place no element may read another's, and compiled this reads and writes each once.
    """
    log_p_NR = logits_NR.float() - lse_N1
    own_NR = torch.arange(logits_NR.shape[1], device=logits_NR.device) == column_N1
    gradient_NR = torch.where(own_NR, torch.expm1(log_p_NR), log_p_NR.exp()) * scale_N1
    logits_NR.copy_(torch.where(scale_N1 == 0, 0.0, gradient_NR))


def logits_summary(
    logits_NR: Tensor, column_N1: Tensor, lse_N1: Tensor, own_N1: Tensor
) -> tuple[Tensor, Tensor]:
    """A chunk's logits added to (log-sum-exp so far, the label's own logit so far), both fp32.

    column: as for `turn_into_gradient`.
    """
    logits_NR = logits_NR.float()
    inside_N1 = (column_N1 >= 0) & (column_N1 < logits_NR.shape[1])
    picked_N1 = logits_NR.gather(1, column_N1.clamp(0, logits_NR.shape[1] - 1))
    lse_N1 = torch.logaddexp(lse_N1, torch.logsumexp(logits_NR, dim=-1, keepdim=True))
    return lse_N1, torch.where(inside_N1, picked_N1, own_N1)


@torch.library.custom_op("titanforge::forge_head_loss", mutates_args=())
def head_loss(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, handle: Tensor, keep_logits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of the token losses, fp32 scalar; log-sum-exp of each token's logits, fp32 [N]; the logits, in the
    hidden states' dtype, [N, V] or empty).
    """
    sink = sink_of(handle)
    assert isinstance(sink, HeadSink)
    N, V = hidden_ND.shape[0], weight_VD.shape[0]
    lse_N1 = torch.full((N, 1), -torch.inf, device=hidden_ND.device)
    own_N1 = torch.zeros(N, 1, device=hidden_ND.device)
    labels_N1 = labels_N.unsqueeze(1)
    kept = F.linear(hidden_ND, weight_VD.to(hidden_ND.dtype)) if keep_logits else hidden_ND.new_empty(0)
    for first, rows in _chunks(N, V):
        # Unnamed: a name would keep one chunk's logits while the next one's are made.
        lse_N1, own_N1 = sink.summary(
            kept[:, first : first + rows]
            if keep_logits
            else F.linear(hidden_ND, weight_VD[first : first + rows].to(hidden_ND.dtype)),
            labels_N1 - first, lse_N1, own_N1,
        )  # fmt: skip
    loss = torch.where(labels_N1 == IGNORE_INDEX, 0.0, lse_N1 - own_N1).sum()
    return loss, lse_N1.squeeze(1), kept


@head_loss.register_fake
def _(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, handle: Tensor, keep_logits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    N = hidden_ND.shape[0]
    kept = (N, weight_VD.shape[0]) if keep_logits else (0,)
    return (
        hidden_ND.new_empty((), dtype=torch.float32),
        hidden_ND.new_empty(N, dtype=torch.float32),
        hidden_ND.new_empty(kept),
    )


@torch.library.custom_op("titanforge::forge_head", mutates_args=("weight_VD", "logits_NV"))
def consume_head(
    weight_VD: Tensor, hidden_ND: Tensor, labels_N: Tensor, lse_N: Tensor, logits_NV: Tensor,
    grad_loss: Tensor, handle: Tensor,
) -> Tensor:  # fmt: skip
    """The hidden states' gradient [N, D]; the weight's goes to its sink. logits_NV: as `head_loss` kept them;
    used up.
    """
    sink = sink_of(handle)
    assert isinstance(sink, HeadSink)
    kept = logits_NV if logits_NV.numel() else None
    with sink.writing_to(weight_VD):
        return sink.loss(weight_VD, Tokens(hidden_ND, labels_N, lse_N, grad_loss), kept)


@torch.library.custom_op("titanforge::forge_tied_head", mutates_args=("logits_NV",))
def hand_on_head(
    weight_VD: Tensor, hidden_ND: Tensor, labels_N: Tensor, lse_N: Tensor, logits_NV: Tensor,
    grad_loss: Tensor, handle: Tensor,
) -> Tensor:  # fmt: skip
    """The same of a head whose weight changes later, in the backward of the embedding that has it too."""
    sink = sink_of(handle)
    assert isinstance(sink, HeadSink)
    kept = logits_NV if logits_NV.numel() else None
    return sink.loss(weight_VD, Tokens(hidden_ND, labels_N, lse_N, grad_loss), kept)


@consume_head.register_fake
@hand_on_head.register_fake
def _(
    weight_VD: Tensor, hidden_ND: Tensor, labels_N: Tensor, lse_N: Tensor, logits_NV: Tensor,
    grad_loss: Tensor, handle: Tensor,
) -> Tensor:  # fmt: skip
    return torch.empty_like(hidden_ND)


class Tokens:
    """What the loss of some tokens left for backward.

    scale [N, 1]: gradient of each token's loss. gradient [N, V]: of their logits, where it is kept.
    """

    gradient: Tensor | None = None

    def __init__(self, hidden_ND: Tensor, labels_N: Tensor, lse_N: Tensor, grad_loss: Tensor) -> None:
        self.hidden = hidden_ND
        self.labels = labels_N.unsqueeze(1)
        self.lse = lse_N.unsqueeze(1)
        scale = grad_loss.float().reshape(1, 1).expand_as(self.lse)
        self.scale = torch.where(self.labels == IGNORE_INDEX, 0.0, scale)

    def copy(self) -> Tokens:
        twin = object.__new__(Tokens)
        twin.__dict__ = {name: tensor.clone() for name, tensor in vars(self).items()}
        return twin

    @staticmethod
    def joined(parts: list[Tokens]) -> Tokens:
        whole = object.__new__(Tokens)
        whole.__dict__ = {name: torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0])}
        return whole


@dataclass(eq=False)
class HeadSink(Sink):
    """The sink of a linear that owns the loss.

    summary, turn: `logits_summary` and `turn_into_gradient`, or their compiled forms.
    """

    summary: Callable[..., tuple[Tensor, Tensor]] = logits_summary
    turn: Callable[..., None] = turn_into_gradient
    _waiting: list[Tokens] = field(default_factory=list)

    def compile_like(self, head: nn.Module) -> None:
        """Compile what lies between the products if the head itself was asked to."""
        options = getattr(head, "compile_options", None)
        if options is not None:
            self.summary = torch.compile(logits_summary, *options[0], **options[1])
            self.turn = torch.compile(turn_into_gradient, *options[0], **options[1])

    def product(self, dy: Tensor, x: Tensor) -> None:
        if self.plan.join == "stash":
            raise RuntimeError(
                f"{self.name!r}: a fused head joins micro-batches by their labels, and was called without: "
                "hand it the labels, or set training.global_batch_size for one micro-batch"
            )
        super().product(dy, x)

    def loss(self, weight_VD: Tensor, tokens: Tokens, kept_NV: Tensor | None = None) -> Tensor:
        """One micro-batch: returns the gradient of its hidden states. kept: its logits."""
        self.begin()
        if self.plan.join == "stash" and not self.clock.last:
            self._waiting.append(tokens.copy())
            return self._walk(weight_VD, tokens, tokens.hidden.shape[0], consume=False)
        if kept_NV is not None:
            return self._at_once(weight_VD, tokens, kept_NV)
        own = tokens.hidden.shape[0]
        joined = Tokens.joined([tokens, *self._waiting]) if self._waiting else tokens
        self._waiting.clear()
        return self._walk(weight_VD, joined, own, consume=True)

    def _at_once(self, weight_VD: Tensor, tokens: Tokens, kept_NV: Tensor) -> Tensor:
        """From the logits of all rows, which become their gradient."""
        grad_hidden = self.turned(weight_VD, tokens, kept_NV)
        self._take(Product(kept_NV, tokens.hidden))
        return grad_hidden

    def turned(self, weight_VD: Tensor, tokens: Tokens, kept_NV: Tensor) -> Tensor:
        """Turn kept logits into their gradient; returns the hidden states'."""
        for first, rows in _chunks(*kept_NV.shape):
            self.turn(kept_NV[:, first : first + rows], tokens.lse, tokens.labels - first, tokens.scale)
        return kept_NV @ weight_VD.to(kept_NV.dtype)  # before the update

    def _walk(self, weight_VD: Tensor, tokens: Tokens, own: int, consume: bool) -> Tensor:
        """Over the chunks of rows. own: the first tokens, whose hidden states get their gradient here."""
        V, hidden = weight_VD.shape[0], tokens.hidden
        grad_hidden = torch.zeros(own, hidden.shape[1], device=hidden.device)
        whole = None
        if consume and self.plan.granule is Granule.LAYER:
            whole = torch.empty(weight_VD.shape, dtype=torch.float32, device=hidden.device)
        chunks = list(_chunks(self.operand_tokens(hidden) if consume else hidden.shape[0], V))
        if consume:
            self.keep_norms({first for first, _ in chunks})
            if self.clock.observe and whole is None:
                for first, rows in chunks:
                    gradient_NR, _ = self._logits(weight_VD, tokens, first, rows)
                    self.look(self.operands(gradient_NR, hidden, first), first, rows)
        for first, rows in chunks:
            gradient_NR, weight_RD = self._logits(weight_VD, tokens, first, rows)
            if own:
                _add_product(grad_hidden, gradient_NR[:own], weight_RD)
            if not consume:
                del gradient_NR
                continue
            product = self.operands(gradient_NR, hidden, first)
            if whole is not None:
                whole[first : first + rows] = product.form(self.rows_of(first, rows))
            elif self.plan.join == "state":
                self.add_to_state(product, first, rows)
            else:
                self.consume(product, first, rows)
            del gradient_NR, product  # before the next chunk's
        if whole is not None:
            self.update_whole(whole)
        return grad_hidden.to(hidden.dtype)

    def operand_tokens(self, hidden: Tensor) -> int:
        """Tokens of the product that `operands` returns."""
        return hidden.shape[0]

    def operands(self, gradient_NR: Tensor, hidden: Tensor, first: int) -> Product:
        """What the gradient of a chunk's rows, from `first` on, is made of."""
        return Product(gradient_NR, hidden)

    def _logits(self, weight_VD: Tensor, tokens: Tokens, first: int, rows: int) -> tuple[Tensor, Tensor]:
        """The gradient of a chunk's logits, and the chunk's rows as they are before their update."""
        weight_RD = weight_VD[first : first + rows].to(tokens.hidden.dtype)
        if tokens.gradient is not None:
            return tokens.gradient[:, first : first + rows], weight_RD
        logits_NR = F.linear(tokens.hidden, weight_RD)
        self.turn(logits_NR, tokens.lse, tokens.labels - first, tokens.scale)
        return logits_NR, weight_RD

    def finish(self) -> None:
        if not self.done and self._waiting:
            joined = Tokens.joined(self._waiting)
            self._waiting.clear()
            item = self.item()
            self._walk(item.weight if item.copy is None else item.copy, joined, 0, consume=True)
        super().finish()

    def forget(self) -> None:
        super().forget()
        self._waiting.clear()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a b` in fp32: on CUDA within the matrix product, before it is rounded."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class FusedHeadLoss(torch.autograd.Function):
    """Sum of the cross-entropies of `hidden Wᵀ`; see the module's text."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        handle: Tensor,
        keep_logits: bool,
        tied: bool,
    ) -> Tensor:
        ctx.backward_op = hand_on_head if tied else consume_head
        loss, lse_N, logits_NV = head_loss(hidden_ND, weight_VD, labels_N, handle, keep_logits)
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, lse_N, logits_NV, handle)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N, lse_N, logits_NV, handle = ctx.saved_tensors
        grad_hidden_ND = ctx.backward_op(
            weight_VD, hidden_ND, labels_N, lse_N, logits_NV, grad_outputs[0], handle
        )
        return grad_hidden_ND, None, None, None, None, None


def fused_head_loss(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    handle: Tensor,
    dtype: torch.dtype,
    keep_logits: bool = False,
    tied: bool = False,
) -> Tensor:
    """Summed loss, fp32 scalar, of the tokens whose label is not -100. hidden: [..., D]; labels: [...].

    tied: the embedding reads the same weight.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    if labels.numel() == 0:
        raise ValueError("no tokens: the loss of an empty batch has no meaning")
    with torch.autocast(device_type, enabled=False):
        hidden_ND = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
        loss = FusedHeadLoss.apply(hidden_ND, weight_VD, labels.reshape(-1), handle, keep_logits, tied)
    assert isinstance(loss, Tensor)
    return loss
