"""GPT-2 as ``GPT2LMHeadModel``, whose linears store their weights as [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from titanforge.models.gpt2 import GPT2Args
from titanforge.models.huggingface.form import ConfigReader, HuggingFaceForm, Source, dtype_name

_LINEARS = {
    "attention.wqkv": "attn.c_attn",
    "attention.wo": "attn.c_proj",
    "feed_forward.w1": "mlp.c_fc",
    "feed_forward.w2": "mlp.c_proj",
}


class GPT2Form(HuggingFaceForm):
    """The published GPT-2 and those scaled up; a modernised one exists nowhere else."""

    family, model_type, architecture, prefix = "gpt2", "gpt2", "GPT2LMHeadModel", "transformer."
    ignored = (r"attn\.(masked_)?bias$",)  # the causal mask
    compared = (
        "dim",
        "n_layers",
        "n_heads",
        "modern",
        "vocab_size",
        "positions",
        "norm_eps",
        "tie_embeddings",
    )

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        if args.modern:
            raise ValueError(
                "Hugging Face's transformers has no GPT with rotary positions, RMSNorm and squared ReLU: the "
                "modern sizes of model.name = 'gpt2' cannot be exchanged with it"
            )

    @classmethod
    def args_from(cls, config: Mapping[str, Any]) -> GPT2Args:
        read = ConfigReader(config)
        dim, positions = read.take("n_embd"), read.take("n_positions", default=1024)
        read.require("activation_function", ["gelu_new", "gelu_pytorch_tanh"])
        read.require("n_inner", [4 * dim])
        read.require("scale_attn_weights", [True])
        read.take("reorder_and_upcast_attn", default=0)  # a matter of precision alone
        args = GPT2Args(
            dim=dim,
            n_layers=read.take("n_layer"),
            n_heads=read.take("n_head"),
            vocab_size=read.take("vocab_size"),
            n_positions=positions,
            max_seq_len=positions,
            norm_eps=read.take("layer_norm_epsilon", default=1e-5),
            tie_embeddings=read.take("tie_word_embeddings", default=True),
        )
        read.finish()
        return args

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        args: GPT2Args = self.args
        return {
            "activation_function": "gelu_new",
            "architectures": [self.architecture],
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "layer_norm_epsilon": args.norm_eps,
            "model_type": self.model_type,
            "n_embd": args.dim,
            "n_head": args.n_heads,
            "n_inner": None,
            "n_layer": args.n_layers,
            "n_positions": args.positions,
            "resid_pdrop": 0.0,
            "tie_word_embeddings": args.tie_embeddings,
            "torch_dtype": dtype_name(dtype),
            "vocab_size": args.vocab_size,
        }

    def list_sources(self) -> dict[str, Source]:
        sources = {
            "tok_embeddings.weight": Source(("transformer.wte.weight",)),
            "pos_embeddings.weight": Source(("transformer.wpe.weight",)),
        }
        norms = {"attention_norm": "ln_1", "ffn_norm": "ln_2"}
        for layer in range(self.args.n_layers):
            ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
            for name, their in {**norms, **_LINEARS}.items():
                weight = Source((f"{theirs}.{their}.weight",), transposed=name in _LINEARS)
                sources[f"{ours}.{name}.weight"] = weight
                sources[f"{ours}.{name}.bias"] = Source((f"{theirs}.{their}.bias",))
        for part in ("weight", "bias"):
            sources[f"norm.{part}"] = Source((f"transformer.ln_f.{part}",))
        if not self.args.tie_embeddings:
            sources["output.weight"] = Source(("lm_head.weight",))
        return sources
