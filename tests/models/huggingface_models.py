"""Random small models of transformers, one per family, to compare with."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 50,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _moe(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen3MoeConfig(
        **_COMMON, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, **changes
    )


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON, rope_parameters=_SCALING),
    "llama_tied": lambda: transformers.LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, head_dim=16),
    "qwen3_tied": lambda: transformers.Qwen3Config(**_COMMON, head_dim=16, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(**_GPT2),
    "gpt2_untied": lambda: transformers.GPT2Config(**_GPT2, tie_word_embeddings=False),
    "qwen3_moe": lambda: _moe(norm_topk_prob=True),
    "qwen3_moe_unnormalised": lambda: _moe(norm_topk_prob=False),
}


def random_model(name: str) -> Any:
    """A model whose every weight is random, norms and biases included."""
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits
