"""Tiny models of every kind, with weights that hide no mistake."""

from __future__ import annotations

from typing import Any

import torch

from titanforge.models.decoder import Decoder
from titanforge.models.initialization import initialize_weights
from titanforge.models.registry import build_model

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3", "debugmodel", {"n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48}),
    "qwen3": (
        "qwen3",
        "debugmodel",
        {"n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "head_dim": 16, "tie_embeddings": False},
    ),
    "qwen3_tied": ("qwen3", "debugmodel", {"n_heads": 4, "n_kv_heads": 1, "hidden_dim": 48, "head_dim": 12}),
    "qwen3_moe": (
        "qwen3",
        "debugmodel_moe",
        {
            "n_heads": 4,
            "n_kv_heads": 2,
            "hidden_dim": 24,
            "head_dim": 16,
            "n_experts": 6,
            "n_experts_per_token": 2,
        },
    ),
    "gpt2": ("gpt2", "debugmodel", {"n_heads": 4}),
    "gpt2_modern": ("gpt2", "debugmodel_modern", {"n_heads": 4, "tie_embeddings": False}),
}


def tiny(kind: str, **changes: Any) -> Decoder:
    family, flavor, sizes = KINDS[kind]
    overrides = {"dim": 32, "n_layers": 2, "vocab_size": 50, **sizes, **changes}
    model, _ = build_model(family, flavor, seq_len=16, overrides=overrides)
    initialize_weights(model, seed=1)
    with torch.no_grad():  # norms of ones, biases of zero and a small head would hide mistakes
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.add_(0.2 * noise)
    return model


def batch(seed: int = 0, B: int = 2, T: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (B, T), generator=generator)
    labels = torch.randint(0, 50, (B, T), generator=generator)
    labels[:, ::5] = -100
    return tokens, labels
