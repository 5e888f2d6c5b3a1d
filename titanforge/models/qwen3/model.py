"""Qwen3: Llama's block with normalised queries and keys, and heads of a width of their own."""

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
from titanforge.models.qwen3.args import Qwen3Args


def depth_std(layer_id: int) -> float:
    """Initial deviation of output matrices: up to here the residual stream sums 2 (layer_id + 1) outputs."""
    return 0.02 / math.sqrt(2 * (layer_id + 1))


def build_attention(args: Qwen3Args, layer_id: int) -> Attention:
    """The attention that dense blocks and those with experts share."""
    return Attention(
        args.dim,
        args.n_heads,
        args.n_kv_heads,
        depth_std(layer_id),
        head_dim=args.head_dim,
        qk_norm_eps=args.norm_eps,
    )


class TransformerBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``: what is sharded and compiled as one."""

    def __init__(self, args: Qwen3Args, layer_id: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = build_attention(args, layer_id)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = SwiGLU(args.dim, args.hidden_dim, depth_std(layer_id))

    def forward(self, x_BTD: torch.Tensor, rotation: Rotation, mask: AttentionMask) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation, mask)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Qwen3(Decoder):
    """The whole dense model; its calls are those of ``Decoder``."""

    block_class: type[nn.Module] = TransformerBlock

    def __init__(self, args: Qwen3Args) -> None:
        super().__init__()
        args.check()
        self.args = args
        self.tok_embeddings = nn.Embedding(vocabulary(args), args.dim)
        self.rope = RotaryEmbedding(args.head_dim, args.max_seq_len, args.rope_theta, None)
        self.layers = nn.ModuleDict({str(i): self.block_class(args, i) for i in range(args.n_layers)})
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
        attention = 2 * (args.n_heads + args.n_kv_heads) * args.head_dim
        return args.dim * (attention + 3 * args.ffn_dim + args.n_experts)
