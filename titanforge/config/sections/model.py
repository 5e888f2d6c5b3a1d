"""The model and how its blocks run: `[model] [activation_checkpoint] [compile]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Model:
    name: str = "llama3"
    """Model family: `llama3`, `qwen3` or `gpt2`."""
    flavor: str = "debugmodel"
    """Size within the family: see docs/models.md for the list."""
    hf_assets_path: str = ""
    """Folder with the tokenizer's files (and weights, for checkpoint.initial_load_in_hf)."""
    dim: int | None = None
    """Override the flavor's model width."""
    n_layers: int | None = None
    """Override the flavor's number of blocks."""
    n_heads: int | None = None
    """Override the flavor's number of query heads."""
    n_kv_heads: int | None = None
    """Override the flavor's number of key/value heads."""
    hidden_dim: int | None = None
    """Override the flavor's feed-forward width (of one expert, where there are experts)."""
    head_dim: int | None = None
    """Override the width of a head (`qwen3`; elsewhere it is dim / n_heads)."""
    n_positions: int | None = None
    """Override the number of learned positions (`gpt2`)."""
    n_experts: int | None = None
    """Override the number of experts of each block (`qwen3`; 0: dense)."""
    n_experts_per_token: int | None = None
    """Override how many experts a token is sent to (`qwen3`)."""
    moe_balancing: Literal["none", "auxiliary_loss", "bias"] | None = None
    """What keeps experts equally busy: nothing, a term of the loss, or a bias on the choice of experts that
    each step moves; default: the flavor's, `auxiliary_loss`."""
    moe_auxiliary_loss_coefficient: float | None = None
    """Weight of that term relative to the mean loss of a token; default: the flavor's, 0.001."""
    moe_bias_update_rate: float | None = None
    """How far a step moves that bias; default: the flavor's, 0.001."""
    vocab_size: int | None = None
    """Override the vocabulary; default: the flavor's, or for `debugmodel` the tokenizer's."""


@dataclass
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """Recompute nothing, some of, or all of each block in backward; `memory_budget`: what the compiler
    chooses, to keep a share of what it would."""
    memory_budget: float = 0.5
    """Mode `memory_budget`: share of a block's activations that is kept, 0 to 1, of what compiling without a
    budget keeps. Just below 1 (0.99) only norms and elementwise products are recomputed, a third of the bytes
    for hardly any time."""
    selective_ac_option: str = "op"
    """`op`: keep matrix products and attention, recompute the rest. A number n: whole blocks, every n-th."""
    preserve_rng_state: bool = True
    """Replay random numbers in recomputation."""


@dataclass
class Compile:
    enable: bool = False
    """torch.compile, block by block."""
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    """What to compile: any of model, loss."""
    backend: str = "inductor"
    """torch.compile backend."""
    cuda_graph: bool = False
    """Capture the whole training step, update included, in one CUDA graph, with or without `compile.enable`.
    The results are the same bits; at few tokens the card no longer waits for the host. One GPU, native
    optimizer."""
