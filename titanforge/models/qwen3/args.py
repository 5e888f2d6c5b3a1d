"""Hyperparameters of one Qwen3 model, dense or with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Balancing = Literal["none", "auxiliary_loss", "bias"]


@dataclass
class Qwen3Args:
    """Sizes and constants of a Qwen3 (Yang et al. 2025, "Qwen3 Technical Report", tables 1 and 2)."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    """Feed-forward width; with experts that of one expert."""
    head_dim: int = 128
    """Width of a head, which ``dim / n_heads`` does not set here."""
    vocab_size: int | None = None
    """None: the tokenizer's."""
    max_seq_len: int = 40960
    """Longest sequence: the length of the RoPE tables."""
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    tie_embeddings: bool = False
    """The head is the embedding's own parameter."""
    n_experts: int = 0
    """Experts of each block; 0: one dense feed-forward layer instead."""
    n_experts_per_token: int = 0
    """Experts that a token is sent to."""
    normalize_top_k: bool = True
    """Divide the chosen experts' probabilities by their sum."""
    moe_balancing: Balancing = "auxiliary_loss"
    """What keeps the experts equally busy: nothing, a term of the loss, or a bias on the choice."""
    moe_auxiliary_loss_coefficient: float = 1e-3
    """Weight of that term, relative to the mean loss of a token."""
    moe_bias_update_rate: float = 1e-3
    """How far a step moves that bias."""

    def check(self) -> None:
        """Raise ValueError naming the first size that cannot be built."""
        for name in (
            "dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "hidden_dim",
            "head_dim",
            "vocab_size",
            "max_seq_len",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.{name} = {value}: must be at least 1")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim = {self.head_dim} is odd: rotary embedding pairs coordinates")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_heads = {self.n_heads} is not a multiple of model.n_kv_heads = {self.n_kv_heads}"
            )
        if self.n_experts < 0:
            raise ValueError(f"model.n_experts = {self.n_experts}: must be 0 (dense) or more")
        if self.n_experts and not 1 <= self.n_experts_per_token <= self.n_experts:
            raise ValueError(
                f"model.n_experts_per_token = {self.n_experts_per_token}: must be from 1 to "
                f"model.n_experts = {self.n_experts}"
            )
        if self.moe_balancing not in ("none", "auxiliary_loss", "bias"):
            raise ValueError(
                f"model.moe_balancing = {self.moe_balancing!r}: must be none, auxiliary_loss or bias"
            )

    @property
    def ffn_dim(self) -> int:
        """Feed-forward width that one token passes through, over all its experts."""
        return self.hidden_dim * (self.n_experts_per_token if self.n_experts else 1)
