"""GPT-2: the published sizes, those scaled up for the Dobb paper, and CurvaDion's modernised ones.

The CurvaDion paper does not say whether head and embedding are tied, nor the vocabulary. Its 160M sends
619 MB per float32 synchronisation, which is 162.2 million weights: untied, 50304 tokens. Its 350M and 1.3B
come to their names only if tied.
"""

from __future__ import annotations

from titanforge.models.gpt2.args import GPT2Args
from titanforge.models.gpt2.model import GPT2

VOCAB_SIZE = 50257
PADDED_VOCAB_SIZE = 50304  # the next multiple of 128


def _classic(dim: int, n_layers: int, n_heads: int) -> GPT2Args:
    return GPT2Args(dim, n_layers, n_heads, vocab_size=VOCAB_SIZE, n_positions=1024)


def _modern(dim: int, n_layers: int, n_heads: int, tied: bool) -> GPT2Args:
    return GPT2Args(dim, n_layers, n_heads, modern=True, vocab_size=PADDED_VOCAB_SIZE, tie_embeddings=tied)


FLAVORS: dict[str, GPT2Args] = {
    "debugmodel": GPT2Args(dim=256, n_layers=6, n_heads=8),
    "debugmodel_modern": GPT2Args(dim=256, n_layers=6, n_heads=8, modern=True),
    "124M": _classic(768, 12, 12),
    "355M": _classic(1024, 24, 16),
    "774M": _classic(1280, 36, 20),
    "1.56B": _classic(1600, 48, 25),
    # Dobb, appendix "GPT-2 on H100 GPUs"
    "3B": _classic(2048, 60, 32),
    "6B": _classic(2560, 72, 40),
    "8B": _classic(2816, 84, 44),
    # CurvaDion, table 1
    "modern-160M": _modern(768, 12, 6, tied=False),
    "modern-350M": _modern(1024, 24, 32, tied=True),
    "modern-1.3B": _modern(2048, 24, 32, tied=True),
}

__all__ = ["FLAVORS", "GPT2", "GPT2Args"]
