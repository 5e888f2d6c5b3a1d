"""Llama 3: RMSNorm before, RoPE, grouped-query attention, SwiGLU, no biases, no dropout."""

from __future__ import annotations

import math

import torch
from torch import nn

from titanforge.models.decoder import Decoder, vocabulary
from titanforge.models.layers.attention import Attention, AttentionMask
from titanforge.models.layers.init_spec import InitSpec, Normal
from titanforge.models.layers.loss import OutputHead, head_std
from titanforge.models.layers.mlp import SwiGLU
from titanforge.models.layers.norm import RMSNorm
from titanforge.models.layers.rope import RotaryEmbedding, Rotation
from titanforge.models.llama3.args import Llama3Args


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


class Llama3(Decoder):
    """The whole model; its calls are those of ``Decoder``."""

    def __init__(self, args: Llama3Args) -> None:
        super().__init__()
        args.check()
        self.args = args
        self.tok_embeddings = nn.Embedding(vocabulary(args), args.dim)
        self.rope = RotaryEmbedding(args.head_dim, args.max_seq_len, args.rope_theta, args.rope_scaling)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args, i) for i in range(args.n_layers)})
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = OutputHead(args.dim, vocabulary(args))
        self._tie()

    def init_spec(self) -> dict[str, InitSpec]:
        """Initial values of the embedding; the other modules declare their own."""
        if self.tok_embeddings is None:
            return {}
        if self.args.tie_embeddings:
            # As a head it must be small; the first norm makes the embedding's scale irrelevant.
            return {"tok_embeddings.weight": Normal(head_std(self.args.dim), cutoff=3.0)}
        return {"tok_embeddings.weight": Normal(1.0)}

    def active_block_weights(self) -> int:
        args = self.args
        return args.dim * (2 * (args.n_heads + args.n_kv_heads) * args.head_dim + 3 * args.ffn_dim)
