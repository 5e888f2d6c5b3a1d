"""Rotary position embedding (Su et al. 2021, "RoFormer", eq. 34) with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of the slow frequencies, by which Llama 3.1 went from 8192 tokens to 131072.

    A frequency whose wavelength is shorter than ``original_context / high_freq_factor`` tokens stays, one
    longer than ``original_context / low_freq_factor`` is divided by ``factor``, those between are
    interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Angle per position of each pair of coordinates: float64 [E/2], on the CPU."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if scaling is None:
        return frequency
    turns = scaling.original_context * frequency / (2 * math.pi)  # full turns within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


class Rotation:
    """Cosines and sines of one batch, float32 [B or 1, T, 1, E/2].

    A plain object on purpose: FSDP2 casts every floating-point tensor that it finds in a block's arguments to
    the compute dtype, and bf16 cannot tell position 257 from 258. It does not look inside this.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate ``x`` [B, T, heads, E]; computed in float32, returned in the dtype of ``x``.

        Coordinate i is paired with i + E/2, as in Hugging Face's weights (Meta's own files pair neighbours
        and need their rows of wq and wk permuted).
        """
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat(
            (first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1
        )
        return rotated.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines for positions 0 … max_seq_len-1: buffers that no checkpoint holds.

    They stay float32 whatever ``model.to(dtype)`` asks for, and are computed in float64 on the CPU, hence
    equal on every device.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.head_dim, self.max_seq_len, self.theta, self.scaling = head_dim, max_seq_len, theta, scaling
        for name in ("cos", "sin"):
            table = torch.empty(max_seq_len, head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the tables where they are; nothing happens on the meta device."""
        if self.cos.is_meta:
            return
        position = torch.arange(self.max_seq_len, dtype=torch.float64, device="cpu")
        angle = torch.outer(position, rope_frequencies(self.head_dim, self.theta, self.scaling))
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, positions_BT: torch.Tensor | None, seq_len: int) -> Rotation:
        """Rows of the tables for ``positions_BT`` (int64; None: 0 … seq_len-1 for every sequence)."""
        if positions_BT is None:
            return Rotation(self.cos[None, :seq_len, None], self.sin[None, :seq_len, None])
        return Rotation(self.cos[positions_BT].unsqueeze(2), self.sin[positions_BT].unsqueeze(2))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:  # a model.to(bfloat16): keep the move, undo the rounding
            self.cos, self.sin = self.cos.float(), self.sin.float()
            self.reset_buffers()
        return self
