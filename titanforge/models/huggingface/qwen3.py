"""Qwen3 as ``Qwen3ForCausalLM`` and ``Qwen3MoeForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from titanforge.models.huggingface.form import ConfigReader, HuggingFaceForm, Source, dtype_name
from titanforge.models.huggingface.llama import FEED_FORWARD, llama_block, llama_sources
from titanforge.models.qwen3 import Qwen3Args


def _common(read: ConfigReader) -> dict[str, Any]:
    """Arguments that dense models and those with experts share."""
    theta, scaling = read.rope(1_000_000.0)
    if scaling is not None:
        raise ValueError(
            f"config.json asks for rope_type = 'llama3', which titanforge's {read.model_type} does not have"
        )
    read.require("hidden_act", ["silu"])
    layers = read.take("num_hidden_layers")
    read.require("layer_types", [["full_attention"] * layers])
    read.require("use_sliding_window", [False])
    read.take("sliding_window", default=0)  # a width that use_sliding_window = false leaves unused
    n_heads = read.take("num_attention_heads")
    return {
        "dim": read.take("hidden_size"),
        "n_layers": layers,
        "n_heads": n_heads,
        "n_kv_heads": read.take("num_key_value_heads", default=n_heads),
        "head_dim": read.take("head_dim", default=128),
        "vocab_size": read.take("vocab_size"),
        "max_seq_len": read.take("max_position_embeddings", default=32768),
        "norm_eps": read.take("rms_norm_eps", default=1e-6),
        "rope_theta": theta,
        "tie_embeddings": read.take("tie_word_embeddings", default=False),
    }


class Qwen3Form(HuggingFaceForm):
    """The dense Qwen3."""

    family, model_type, architecture, prefix = "qwen3", "qwen3", "Qwen3ForCausalLM", "model."
    ignored = (r"rotary_emb\.inv_freq$",)
    compared = (
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "hidden_dim",
        "head_dim",
        "vocab_size",
        "norm_eps",
        "rope_theta",
        "tie_embeddings",
        "n_experts",
    )

    @classmethod
    def args_from(cls, config: Mapping[str, Any]) -> Qwen3Args:
        read = ConfigReader(config)
        args = Qwen3Args(**_common(read), hidden_dim=read.take("intermediate_size"))
        read.finish()
        return args

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        args: Qwen3Args = self.args
        return {
            "architectures": [self.architecture],
            "attention_bias": False,
            "head_dim": args.head_dim,
            "hidden_act": "silu",
            "hidden_size": args.dim,
            "intermediate_size": args.hidden_dim,
            "max_position_embeddings": args.max_seq_len,
            "model_type": self.model_type,
            "num_attention_heads": args.n_heads,
            "num_hidden_layers": args.n_layers,
            "num_key_value_heads": args.n_kv_heads,
            "rms_norm_eps": args.norm_eps,
            "rope_scaling": None,
            "rope_theta": args.rope_theta,
            "tie_word_embeddings": args.tie_embeddings,
            "torch_dtype": dtype_name(dtype),
            "use_sliding_window": False,
            "vocab_size": args.vocab_size,
        }

    def block(self) -> dict[str, Source]:
        """Sources of one block."""
        norms = {f"attention.{n}.weight": Source((f"self_attn.{n}.weight",)) for n in ("q_norm", "k_norm")}
        return llama_block() | norms

    def list_sources(self) -> dict[str, Source]:
        return llama_sources(self.args.n_layers, self.block(), self.args.tie_embeddings)


class Qwen3MoeForm(Qwen3Form):
    """Qwen3 with experts in every block; there each expert's matrices are tensors of their own."""

    model_type, architecture = "qwen3_moe", "Qwen3MoeForCausalLM"
    compared = (*Qwen3Form.compared, "n_experts_per_token", "normalize_top_k")

    @classmethod
    def args_from(cls, config: Mapping[str, Any]) -> Qwen3Args:
        read = ConfigReader(config)
        read.require("decoder_sparse_step", [1])
        read.take("intermediate_size", default=0)  # of dense blocks, of which there are none
        args = Qwen3Args(
            **_common(read),
            hidden_dim=read.take("moe_intermediate_size"),
            n_experts=read.take("num_experts", "num_local_experts"),
            n_experts_per_token=read.take("num_experts_per_tok"),
            normalize_top_k=read.take("norm_topk_prob", default=False),
            moe_auxiliary_loss_coefficient=read.take("router_aux_loss_coef", default=1e-3),
        )
        read.finish()
        return args

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        args: Qwen3Args = self.args
        if args.moe_balancing == "bias":
            raise ValueError(
                'model.moe_balancing = "bias": Hugging Face\'s qwen3_moe has no bias on the choice of '
                'experts, so the exported model would choose others; train with "auxiliary_loss"'
            )
        return super().config(dtype) | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": args.hidden_dim,
            "norm_topk_prob": args.normalize_top_k,
            "num_experts": args.n_experts,
            "num_experts_per_tok": args.n_experts_per_token,
            "router_aux_loss_coef": args.moe_auxiliary_loss_coefficient,
        }

    def block(self) -> dict[str, Source]:
        block = {name: source for name, source in super().block().items() if "feed_forward" not in name}
        block["feed_forward.router.weight"] = Source(("mlp.gate.weight",))
        for ours, theirs in FEED_FORWARD.items():
            experts = tuple(f"mlp.experts.{e}.{theirs}.weight" for e in range(self.args.n_experts))
            block[f"feed_forward.experts.{ours}"] = Source(experts, stacked=True)
        return block
