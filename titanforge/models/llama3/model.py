"""Llama 3: RMSNorm before, RoPE, grouped-query attention, SwiGLU, no biases, no dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from titanforge.models.layers.attention import Attention, AttentionMask, build_attention_mask
from titanforge.models.layers.init_spec import InitSpec, Normal
from titanforge.models.layers.loss import OutputHead, head_std
from titanforge.models.layers.mlp import SwiGLU
from titanforge.models.layers.norm import RMSNorm
from titanforge.models.layers.rope import RotaryEmbedding, Rotation
from titanforge.models.llama3.args import Llama3Args

GROUPS: tuple[str, ...] = ("embedding", "attention", "feed_forward", "norms", "head")


class TransformerBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``: what is sharded and compiled as one."""

    def __init__(self, args: Llama3Args, layer_id: int) -> None:
        super().__init__()
        # Up to here the residual stream sums 2 (layer_id + 1) outputs: scaled so that the sum does not grow.
        depth_std = 0.02 / math.sqrt(2 * (layer_id + 1))
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args.dim, args.n_heads, args.n_kv_heads, depth_std)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = SwiGLU(args.dim, args.ffn_dim, depth_std)

    def forward(self, x_BTD: torch.Tensor, rotation: Rotation, mask: AttentionMask) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation, mask)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Llama3(nn.Module):
    """The whole model. A pipeline stage sets what it lacks to None, and drops blocks from ``layers``.

    With ``args.tie_embeddings`` the head's weight *is* ``tok_embeddings.weight``, one Parameter under both
    names: whoever shards the two modules must put them into one group (the root's), or one of them would
    train a copy.
    """

    def __init__(self, args: Llama3Args) -> None:
        super().__init__()
        args.check()
        if args.vocab_size is None:
            raise ValueError("model.vocab_size: neither this size nor a tokenizer gives the vocabulary")
        self.args = args
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        self.rope = RotaryEmbedding(args.head_dim, args.max_seq_len, args.rope_theta, args.rope_scaling)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args, i) for i in range(args.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(args.dim, args.norm_eps)
        self.output: OutputHead | None = OutputHead(args.dim, args.vocab_size)
        self._tie()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_at: int | None = None,
    ) -> torch.Tensor:
        """One call for training, ``model(tokens, positions, document_ids, labels)``, and for everything else.

        tokens: int64 [B, T]; on a later pipeline stage the previous one's hidden states [B, T, D]. positions:
        int64 [B, T] in 0 … max_seq_len-1; None: 0 … T-1. document_ids: int64 [B, T]; a token attends to
        earlier ones of the same document. None: to all earlier. labels: int64 [B, T], -100 where a token is
        not counted.

        Returns the float32 sum of the token losses if ``labels`` is given; the logits [B, V] of one place in
        the sequences if ``logits_at`` is; else the hidden states [B, T, D] after the final norm. Raises
        ValueError for a sequence longer than the RoPE tables.
        """
        T = tokens.shape[1]
        if self.args.max_seq_len < T:
            raise ValueError(f"sequence of {T} tokens; the model was built for {self.args.max_seq_len}")
        x_BTD = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        rotation = self.rope(positions, T)
        mask = build_attention_mask(document_ids)
        for block in self.layers.values():
            x_BTD = block(x_BTD, rotation, mask)
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        if labels is not None:
            return self.loss_sum(x_BTD, labels)
        if logits_at is not None:
            return self.logits(x_BTD[:, logits_at])
        return x_BTD

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] → [..., V], in the dtype of the weights."""
        return self._head()(hidden)

    def loss_sum(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Float32 scalar: the sum, not the mean, of the losses of the tokens whose label is not -100."""
        return self._head()(hidden, labels)

    def _head(self) -> OutputHead:
        if self.output is None:
            raise RuntimeError("this pipeline stage has no output head")
        return self.output

    def init_spec(self) -> dict[str, InitSpec]:
        """Initial values of the embedding; the other modules declare their own."""
        if self.tok_embeddings is None:
            return {}
        if self.args.tie_embeddings:
            # As a head it must be small; the first norm makes the embedding's scale irrelevant.
            return {"tok_embeddings.weight": Normal(head_std(self.args.dim), cutoff=3.0)}
        return {"tok_embeddings.weight": Normal(1.0)}

    def _tie(self) -> None:
        if self.args.tie_embeddings and self.output is not None and self.tok_embeddings is not None:
            self.output.weight = self.tok_embeddings.weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Llama3:
        # Leaving the meta device makes a new Parameter per name: tie the two again.
        super()._apply(fn, recurse)
        self._tie()
        return self

    def num_parameters(self) -> dict[str, int]:
        """Parameters present here: embedding, attention, feed_forward, norms, head (0 if tied)."""
        groups: dict[str, int] = dict.fromkeys(GROUPS, 0)
        for name, parameter in self.named_parameters():  # names a tied parameter once
            groups[_group_of(name)] += parameter.numel()
        return groups

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward per token, a multiply-add counting as two.

        Matrices: each weight takes part in one multiply-add per token in forward and in two in backward
        (gradients of the input and of the weight): 6 per weight of the blocks' linears and of the head, tied
        or not. The embedding is a look-up: 0. Attention: q kᵀ and p v are 2·H·E operations each for every
        (query, key) pair, 4·H·E together, twice that again in backward: 12·H·E. A causal query at place t
        sees t + 1 keys, the mean over a sequence is (T + 1)/2: 6·H·E·(T + 1) per token and layer. Norms,
        softmax, RoPE are left out, as is whatever is computed twice (recomputed activations, the scores that
        flash attention rebuilds): these are the model's operations, the numerator of MFU. Document masks are
        not looked at: they would make the figure depend on the data. Sizes are those of the whole model,
        whatever part of it lives here.
        """
        args = self.args
        q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        block_weights = args.dim * (2 * q_dim + 2 * kv_dim + 3 * args.ffn_dim)
        head_weights = args.dim * cast(int, args.vocab_size)
        return float(
            6 * (args.n_layers * block_weights + head_weights) + 6 * args.n_layers * q_dim * (seq_len + 1)
        )


def _group_of(name: str) -> str:
    parts = name.split(".")
    if "tok_embeddings" in parts:
        return "embedding"
    if "output" in parts:
        return "head"
    if any(part in ("norm", "attention_norm", "ffn_norm") for part in parts):
        return "norms"
    return "attention" if "attention" in parts else "feed_forward"
