"""Llama 3 as ``LlamaForCausalLM``, and the names that Qwen3 shares with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from titanforge.models.huggingface.form import ConfigReader, HuggingFaceForm, Source, dtype_name
from titanforge.models.llama3 import Llama3Args

ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def llama_sources(n_layers: int, block: Mapping[str, Source], tied: bool) -> dict[str, Source]:
    """Sources of a whole model from those of one block, whose names may hold ``{layer}``."""
    sources = {"tok_embeddings.weight": Source(("model.embed_tokens.weight",))}
    for layer in range(n_layers):
        for name, source in block.items():
            theirs = tuple(f"model.layers.{layer}.{their}" for their in source.names)
            sources[f"layers.{layer}.{name}"] = Source(theirs, source.transposed, source.stacked)
    sources["norm.weight"] = Source(("model.norm.weight",))
    if not tied:
        sources["output.weight"] = Source(("lm_head.weight",))
    return sources


def llama_block() -> dict[str, Source]:
    """Norms, attention and SwiGLU of one block."""
    names = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in ATTENTION.items()}
    names |= {f"feed_forward.{ours}": f"mlp.{theirs}" for ours, theirs in FEED_FORWARD.items()}
    return {f"{ours}.weight": Source((f"{theirs}.weight",)) for ours, theirs in names.items()}


class LlamaForm(HuggingFaceForm):
    """Llama 3, 3.1 and 3.2."""

    family, model_type, architecture, prefix = "llama3", "llama", "LlamaForCausalLM", "model."
    ignored = (r"rotary_emb\.inv_freq$",)
    compared = (
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "ffn_dim",
        "vocab_size",
        "norm_eps",
        "rope_theta",
        "rope_scaling",
        "tie_embeddings",
    )

    @classmethod
    def args_from(cls, config: Mapping[str, Any]) -> Llama3Args:
        read = ConfigReader(config)
        theta, scaling = read.rope(10_000.0)
        dim, n_heads = read.take("hidden_size"), read.take("num_attention_heads")
        read.require("head_dim", [dim // n_heads])
        read.require("hidden_act", ["silu"])
        args = Llama3Args(
            dim=dim,
            n_layers=read.take("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=read.take("num_key_value_heads", default=n_heads),
            hidden_dim=read.take("intermediate_size"),
            vocab_size=read.take("vocab_size"),
            max_seq_len=read.take("max_position_embeddings", default=2048),
            norm_eps=read.take("rms_norm_eps", default=1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=read.take("tie_word_embeddings", default=False),
        )
        read.finish()
        return args

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        args: Llama3Args = self.args
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "attention_bias": False,
            "head_dim": args.head_dim,
            "hidden_act": "silu",
            "hidden_size": args.dim,
            "intermediate_size": args.ffn_dim,
            "max_position_embeddings": args.max_seq_len,
            "mlp_bias": False,
            "model_type": self.model_type,
            "num_attention_heads": args.n_heads,
            "num_hidden_layers": args.n_layers,
            "num_key_value_heads": args.n_kv_heads,
            "rms_norm_eps": args.norm_eps,
            "rope_scaling": None,
            "rope_theta": args.rope_theta,
            "tie_word_embeddings": args.tie_embeddings,
            "torch_dtype": dtype_name(dtype),
            "vocab_size": args.vocab_size,
        }
        if args.rope_scaling is not None:
            config["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": args.rope_scaling.factor,
                "low_freq_factor": args.rope_scaling.low_freq_factor,
                "high_freq_factor": args.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": args.rope_scaling.original_context,
            }
        return config

    def list_sources(self) -> dict[str, Source]:
        return llama_sources(self.args.n_layers, llama_block(), self.args.tie_embeddings)
