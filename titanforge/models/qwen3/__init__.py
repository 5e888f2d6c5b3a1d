"""Qwen3: the published sizes, dense and with experts, and debug models for tests."""

from __future__ import annotations

from titanforge.models.qwen3.args import Qwen3Args
from titanforge.models.qwen3.model import Qwen3
from titanforge.models.qwen3.moe import Qwen3Moe

VOCAB_SIZE = 151936


def _dense(dim: int, n_layers: int, n_heads: int, hidden_dim: int, tied: bool = False) -> Qwen3Args:
    """All dense sizes have 8 key/value heads."""
    return Qwen3Args(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        hidden_dim=hidden_dim,
        vocab_size=VOCAB_SIZE,
        tie_embeddings=tied,
    )


def _experts(dim: int, n_layers: int, n_heads: int, hidden_dim: int) -> Qwen3Args:
    """All sizes with experts have 4 key/value heads, and send each token to 8 of 128 experts."""
    return Qwen3Args(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=4,
        hidden_dim=hidden_dim,
        vocab_size=VOCAB_SIZE,
        n_experts=128,
        n_experts_per_token=8,
    )


FLAVORS: dict[str, Qwen3Args] = {
    "debugmodel": Qwen3Args(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=768, head_dim=64, tie_embeddings=True
    ),
    "0.6B": _dense(1024, 28, 16, 3072, tied=True),
    "1.7B": _dense(2048, 28, 16, 6144, tied=True),
    "4B": _dense(2560, 36, 32, 9728, tied=True),
    "8B": _dense(4096, 36, 32, 12288),
    "14B": _dense(5120, 40, 40, 17408),
    "32B": _dense(5120, 64, 64, 25600),
    "debugmodel_moe": Qwen3Args(
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        hidden_dim=128,
        head_dim=64,
        n_experts=16,
        n_experts_per_token=4,
    ),
    "30B-A3B": _experts(2048, 48, 32, 768),
    "235B-A22B": _experts(4096, 94, 64, 1536),
}


def build_qwen3(args: Qwen3Args) -> Qwen3:
    """The model that the arguments describe."""
    return Qwen3Moe(args) if args.n_experts else Qwen3(args)


__all__ = ["FLAVORS", "Qwen3", "Qwen3Args", "Qwen3Moe", "build_qwen3"]
