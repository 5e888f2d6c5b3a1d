"""Hyperparameters of one Llama 3 model."""

from __future__ import annotations

from dataclasses import dataclass

from titanforge.models.layers.rope import RopeScaling


@dataclass
class Llama3Args:
    """Sizes and constants of a Llama 3 (Dubey et al. 2024, "The Llama 3 Herd of Models", table 3)."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int | None = None
    """Feed-forward width; None: 8/3 of ``dim``, rounded up to a multiple of 256."""
    vocab_size: int | None = None
    """None: the tokenizer's."""
    max_seq_len: int = 8192
    """Longest sequence: the length of the RoPE tables."""
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    """The head is the embedding's own parameter."""

    def check(self) -> None:
        """Raise ValueError naming the first size that cannot be built."""
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "max_seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.{name} = {value}: must be at least 1")
        if self.dim % self.n_heads:
            raise ValueError(f"model.dim = {self.dim} is not a multiple of model.n_heads = {self.n_heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"model.dim / model.n_heads = {self.head_dim} is odd: rotary embedding pairs coordinates"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_heads = {self.n_heads} is not a multiple of model.n_kv_heads = {self.n_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def ffn_dim(self) -> int:
        """Feed-forward width, with the default worked out."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        return -(-8 * self.dim // (3 * 256)) * 256
