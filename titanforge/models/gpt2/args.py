"""Hyperparameters of one GPT-2, as published or modernised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GPT2Args:
    """Sizes of a GPT-2 (Radford et al. 2019, table 2)."""

    dim: int
    n_layers: int
    n_heads: int
    modern: bool = False
    """RoPE, RMSNorm, squared ReLU, separate q, k and v, no biases (CurvaDion, section 4) instead of learned
    positions, LayerNorm, GELU, fused q, k and v, biases."""
    vocab_size: int | None = None
    """None: the tokenizer's."""
    n_positions: int | None = None
    """Rows of the table of learned positions; None: ``max_seq_len``."""
    max_seq_len: int = 1024
    """Longest sequence; at most the number of learned positions."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_embeddings: bool = True
    """The head is the embedding's own parameter."""

    def check(self) -> None:
        """Raise ValueError naming the first size that cannot be built."""
        for name in ("dim", "n_layers", "n_heads", "vocab_size", "n_positions", "max_seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.{name} = {value}: must be at least 1")
        if self.dim % self.n_heads:
            raise ValueError(f"model.dim = {self.dim} is not a multiple of model.n_heads = {self.n_heads}")
        if self.modern and self.n_positions is not None:
            raise ValueError(
                f"model.n_positions = {self.n_positions}: this size has rotary positions, no table; unset it"
            )
        if self.modern and self.head_dim % 2:
            raise ValueError(
                f"model.dim / model.n_heads = {self.head_dim} is odd: rotary embedding pairs coordinates"
            )
        if not self.modern and self.max_seq_len > self.positions:
            raise ValueError(
                f"training.seq_len (or validation.seq_len) = {self.max_seq_len}: this size has "
                f"{self.positions} learned positions; shorten it or raise model.n_positions"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads

    @property
    def ffn_dim(self) -> int:
        return 4 * self.dim

    @property
    def positions(self) -> int:
        """Rows of the table of learned positions, with the default worked out."""
        return self.n_positions or self.max_seq_len
