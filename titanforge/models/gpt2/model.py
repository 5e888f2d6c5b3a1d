"""GPT-2 (Radford et al. 2019), and the GPT of the CurvaDion paper that modernises it; no dropout."""

from __future__ import annotations

import math

import torch
from torch import nn

from titanforge.models.decoder import Decoder, vocabulary
from titanforge.models.gpt2.args import GPT2Args
from titanforge.models.layers.attention import Attention, AttentionMask, FusedAttention
from titanforge.models.layers.init_spec import InitSpec, Normal
from titanforge.models.layers.loss import OutputHead, head_std
from titanforge.models.layers.mlp import MLP, gelu_tanh, squared_relu
from titanforge.models.layers.norm import LayerNorm, RMSNorm
from titanforge.models.layers.rope import RotaryEmbedding, Rotation


class TransformerBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``: what is sharded and compiled as one."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        # GPT-2's own: all residual branches alike, so that the whole stack's sum does not grow (section 2.3).
        depth_std = 0.02 / math.sqrt(2 * args.n_layers)
        self.attention_norm = _norm(args)
        self.attention = (
            Attention(args.dim, args.n_heads, args.n_heads, depth_std)
            if args.modern
            else FusedAttention(args.dim, args.n_heads, depth_std)
        )
        self.ffn_norm = _norm(args)
        activation = squared_relu if args.modern else gelu_tanh
        self.feed_forward = MLP(args.dim, args.ffn_dim, depth_std, activation, bias=not args.modern)

    def forward(self, x_BTD: torch.Tensor, rotation: Rotation | None, mask: AttentionMask) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation, mask)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class GPT2(Decoder):
    """The whole model; its calls are those of ``Decoder``. ``pos_embeddings`` is None in a modern one."""

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        args.check()
        self.args = args
        self.tok_embeddings = nn.Embedding(vocabulary(args), args.dim)
        self.pos_embeddings = None if args.modern else nn.Embedding(args.positions, args.dim)
        self.rope = None
        if args.modern:
            self.rope = RotaryEmbedding(args.head_dim, args.max_seq_len, args.rope_theta, None)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args) for i in range(args.n_layers)})
        self.norm = _norm(args)
        self.output = OutputHead(args.dim, vocabulary(args))
        self._tie()

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        x_BTD = super().embed(tokens, positions)
        if self.pos_embeddings is None:
            return x_BTD
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return x_BTD + self.pos_embeddings(positions)

    def init_spec(self) -> dict[str, InitSpec]:
        """Initial values of the embeddings; the other modules declare their own."""
        specs: dict[str, InitSpec] = {}
        if self.tok_embeddings is not None:
            std = head_std(self.args.dim) if self.args.modern else 0.02
            tied = self.args.tie_embeddings
            specs["tok_embeddings.weight"] = Normal(std, cutoff=3.0) if tied else Normal(1.0)
        if self.pos_embeddings is not None:
            specs["pos_embeddings.weight"] = Normal(0.02)
        return specs

    def active_block_weights(self) -> int:
        args = self.args
        return args.dim * (4 * args.dim + 2 * args.ffn_dim)


def _norm(args: GPT2Args) -> nn.Module:
    return RMSNorm(args.dim, args.norm_eps) if args.modern else LayerNorm(args.dim, args.norm_eps)
