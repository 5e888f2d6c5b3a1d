"""Llama 3.1 and 3.2: the published sizes, and ``debugmodel`` for tests."""

from __future__ import annotations

from titanforge.models.layers.rope import RopeScaling
from titanforge.models.llama3.args import Llama3Args
from titanforge.models.llama3.model import Llama3

VOCAB_SIZE = 128256
LLAMA_3_1_SCALING = RopeScaling(factor=8.0)
LLAMA_3_2_SCALING = RopeScaling(factor=32.0)

FLAVORS: dict[str, Llama3Args] = {
    "debugmodel": Llama3Args(dim=256, n_layers=6, n_heads=8, n_kv_heads=4),
    "1B": Llama3Args(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=8192,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_2_SCALING,
        tie_embeddings=True,
    ),
    "3B": Llama3Args(
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        hidden_dim=8192,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_2_SCALING,
        tie_embeddings=True,
    ),
    "8B": Llama3Args(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14336,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_1_SCALING,
    ),
    "70B": Llama3Args(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        hidden_dim=28672,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_1_SCALING,
    ),
    "405B": Llama3Args(
        dim=16384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        hidden_dim=53248,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_1_SCALING,
    ),
}

__all__ = ["FLAVORS", "Llama3", "Llama3Args"]
