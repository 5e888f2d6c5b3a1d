"""The head and its cross-entropy, a chunk of tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from titanforge.models.layers.init_spec import InitSpec, Normal

IGNORE_INDEX = -100
"""Label of a token that is not counted."""

CHUNK_LOGITS = 2**28
"""Most logits held at once: 1 GiB in float32, 2048 tokens of Llama 3's vocabulary."""


SUM_ROWS = 16384
"""Rows of the weight gradient that are summed at once."""

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
LogitsGradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], tuple[torch.Tensor, ...]]


class VocabularyPart(Protocol):
    """For a head that has some rows of the vocabulary: how the whole is put together."""

    @property
    def degree(self) -> int: ...  # how many share the rows
    def local(self, weight_VD: torch.Tensor, /) -> torch.Tensor: ...
    def gather(self, logits: torch.Tensor, /) -> torch.Tensor: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def loss_and_gradient(self) -> LogitsGradient: ...


def loss_of_logits(
    logits_CV: torch.Tensor, target_C1: torch.Tensor, ignored_C1: torch.Tensor, wide: torch.dtype
) -> torch.Tensor:
    """Sum of a chunk's losses (``wide``)."""
    log_p_CV = torch.log_softmax(logits_CV, dim=-1, dtype=wide)
    return -log_p_CV.gather(1, target_C1).masked_fill(ignored_C1, 0.0).sum()


def loss_and_logits_gradient(
    logits_CV: torch.Tensor, target_C1: torch.Tensor, ignored_C1: torch.Tensor, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of a chunk's losses (``wide``) and its gradient by the logits, in their dtype.

    The log-softmax is taken in ``wide``, and the label's own ``p - 1`` is formed by expm1 before it is
    rounded, so that a confident token keeps its gradient. Rows of ignored tokens are left as they are: the
    caller strikes them out of the two products, [C, D] each, which costs less than another pass over [C, V].
    """
    log_p_CV = torch.log_softmax(logits_CV, dim=-1, dtype=wide)
    target_log_p_C1 = log_p_CV.gather(1, target_C1)
    loss = -target_log_p_C1.masked_fill(ignored_C1, 0.0).sum()
    grad_CV = log_p_CV.exp_().to(logits_CV.dtype)
    return loss, grad_CV.scatter(1, target_C1, torch.expm1(target_log_p_C1).to(logits_CV.dtype))


def add_product(sum_VD: torch.Tensor, a_VC: torch.Tensor, b_CD: torch.Tensor, beta: int) -> None:
    """``sum ← beta · sum + a b`` in place; with beta = 0 what ``sum`` held is not read.

    On CUDA a wider ``sum`` takes the product before it is rounded, in the matrix product's own last step:
    half the time of a product and an addition. torch makes a copy of the sum for it, hence a block of rows at
    a time.
    """
    if sum_VD.dtype == a_VC.dtype:
        torch.addmm(sum_VD, a_VC, b_CD, beta=beta, out=sum_VD)
    elif sum_VD.is_cuda:
        for rows in range(0, sum_VD.shape[0], SUM_ROWS):
            part_RD, a_RC = sum_VD[rows : rows + SUM_ROWS], a_VC[rows : rows + SUM_ROWS]
            torch.addmm(part_RD, a_RC, b_CD, beta=beta, out_dtype=sum_VD.dtype, out=part_RD)
    elif beta == 0:
        sum_VD.copy_(a_VC @ b_CD)
    else:
        sum_VD.add_(a_VC @ b_CD)


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Sum of the token losses of ``cross_entropy(hidden @ weightᵀ, labels)``.

    The gradients are formed in forward, while a chunk's logits are at hand: three matrix products in all,
    where recomputing the logits in backward would take four. Backward only multiplies them by the incoming
    scalar.

    Precision: logits are rounded to the dtype of the inputs (as an ordinary linear's are), what follows is
    float32 (float64 for float64 inputs). The weight gradient of more than one chunk is summed in float32: a
    bf16 sum would lose a further bit or so with each chunk. One chunk needs no sum and no buffer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_N: torch.Tensor,
        chunk_tokens: int,
        need_hidden: bool,
        need_weight: bool,
        logits_gradient: LogitsGradient,
        loss_only: Loss,
    ) -> torch.Tensor:
        N = hidden_ND.shape[0]
        if N == 0:
            raise ValueError("no tokens: the loss of an empty batch has no meaning")
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        sum_dtype = wide if chunk_tokens < N else weight_VD.dtype
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_weight_VD = torch.empty_like(weight_VD, dtype=sum_dtype) if need_weight else None
        for start in range(0, N, chunk_tokens):
            h_CD = hidden_ND[start : start + chunk_tokens]
            labels_C1 = labels_N[start : start + chunk_tokens, None]
            ignored_C1 = labels_C1 == IGNORE_INDEX
            target_C1 = labels_C1.masked_fill(ignored_C1, 0)
            logits_CV = F.linear(h_CD, weight_VD)
            if not (need_hidden or need_weight):
                loss = loss + loss_only(logits_CV, target_C1, ignored_C1, wide)
                continue
            chunk_loss, grad_logits_CV = logits_gradient(logits_CV, target_C1, ignored_C1, wide)
            del logits_CV
            loss = loss + chunk_loss
            if grad_hidden_ND is not None:
                grad_h_CD = (grad_logits_CV @ weight_VD).masked_fill(ignored_C1, 0.0)
                grad_hidden_ND[start : start + chunk_tokens] = grad_h_CD
            if grad_weight_VD is not None:
                h_CD = h_CD.masked_fill(ignored_C1, 0.0)
                add_product(grad_weight_VD, grad_logits_CV.t(), h_CD, beta=0 if start == 0 else 1)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_loss,) = grad_outputs
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        if grad_hidden_ND is not None:
            grad_hidden_ND = grad_hidden_ND * grad_loss
        if grad_weight_VD is not None:
            scaled_VD = torch.empty_like(grad_weight_VD, dtype=ctx.weight_dtype)
            # In one pass, without another float32 copy; not in place: backward may be called again.
            grad_weight_VD = torch.mul(grad_weight_VD, grad_loss, out=scaled_VD)
        return grad_hidden_ND, grad_weight_VD, *[None] * 6


def chunked_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    chunk_tokens: int,
    logits_gradient: LogitsGradient = loss_and_logits_gradient,
    loss_only: Loss = loss_of_logits,
) -> torch.Tensor:
    """Summed loss over the tokens whose label is not -100: float32 scalar (float64 for float64 inputs).

    All -100 gives 0.0 and zero gradients. Under autocast both inputs are cast as a linear's would be.
    ``logits_gradient``: ``loss_and_logits_gradient`` or a compiled form of it; of a part of the vocabulary
    both functions are those of its ``VocabularyPart``.
    """
    device_type = hidden_ND.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
    grad = torch.is_grad_enabled()
    need_hidden, need_weight = grad and hidden_ND.requires_grad, grad and weight_VD.requires_grad
    with torch.autocast(device_type, enabled=False):
        loss = ChunkedLinearCrossEntropy.apply(
            hidden_ND,
            weight_VD,
            labels_N,
            chunk_tokens,
            need_hidden,
            need_weight,
            logits_gradient,
            loss_only,
        )
    assert isinstance(loss, torch.Tensor)
    return loss


class OutputHead(nn.Linear):
    """The last linear, which also owns the loss: both read its weight, so both must go through its forward.

    Sharded data parallelism gathers a module's weights when the module is called; a loss that took the weight
    from outside would find a shard.
    """

    owns_loss = True
    """For whoever replaces the loss: `forward(hidden, labels)` is the summed cross-entropy."""

    def __init__(self, dim: int, vocab_size: int, chunk_logits: int = CHUNK_LOGITS) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.chunk_logits = chunk_logits
        self._logits_gradient: LogitsGradient = loss_and_logits_gradient
        self.vocabulary: VocabularyPart | None = None
        self.compile_options: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, input: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., D]; with ``labels`` [...] the float32 sum of the losses."""
        part = self.vocabulary
        if labels is None:
            return (
                super().forward(input)
                if part is None
                else part.gather(F.linear(input, part.local(self.weight)))
            )
        whole = (self.weight, self._logits_gradient, loss_of_logits)
        weight_VD, logits_gradient, loss_only = (
            whole if part is None else (part.local(self.weight), part.loss_and_gradient, part.loss)
        )
        return chunked_linear_cross_entropy(
            input.reshape(-1, input.shape[-1]),
            weight_VD,
            labels.reshape(-1),
            self.chunk_tokens,
            logits_gradient,
            loss_only,
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what lies between the matrix products, arguments as for ``torch.compile``.

        That is where the time goes that compiling can save. The loop over chunks stays outside: traced, it
        would be unrolled, and compiling would take longer the more tokens there are.
        """
        self.compile_options = (args, kwargs)
        self._logits_gradient = torch.compile(loss_and_logits_gradient, *args, **kwargs)

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk of the loss."""
        rows = self._parameters["weight"].shape[0]  # pyright: ignore[reportOptionalMemberAccess]  # no cast
        if self.vocabulary is not None:
            rows = -(-rows // self.vocabulary.degree)
        tokens = max(1, self.chunk_logits // rows)
        return tokens // 128 * 128 or tokens  # whole tiles of a matrix product

    def init_spec(self) -> dict[str, InitSpec]:
        return {"weight": Normal(head_std(self.in_features), cutoff=3.0)}


def head_std(dim: int) -> float:
    """Initial standard deviation of a head: logits of a normalised hidden state start with variance 1."""
    return 1 / math.sqrt(dim)
