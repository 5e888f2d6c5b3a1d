"""What a run will need per rank, before any memory is taken: the numbers of ``--job.dry_run``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1024**3


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per rank by pool. update_in_backward: the update's room is needed while activations are held."""

    weights: int
    states: int
    gradients: int
    gathered: int
    activations: int
    update: int = 0
    update_in_backward: bool = False

    @property
    def total(self) -> int:
        """An update after the backward pass finds the activations used up."""
        held = self.weights + self.states + self.gradients + self.gathered
        if self.update_in_backward:
            return held + self.activations + self.update
        return held + max(self.activations, self.update)

    def lines(self) -> list[str]:
        """A table, one pool a line, for printing."""
        pools = {
            "weights": self.weights,
            "states": self.states,
            "gradients": self.gradients,
            "gathered weights": self.gathered,
            "activations": self.activations,
            "update" if self.update_in_backward else "update, after them": self.update,
            "total per rank": self.total,
        }
        return [
            f"{name:<19}{size / GIB:>8.3f} GiB"
            for name, size in pools.items()
            if size or "update" not in name
        ]


def activation_bytes(
    *,
    batch: int,
    seq_len: int,
    dim: int,
    n_layers: int,
    hidden_dim: int,
    kv_dim: int,
    vocab_size: int,
    compute_bytes: int,
    q_dim: int | None = None,
    qk_norm: bool = False,
    routed: int = 0,
    mode: Literal["none", "selective", "full", "memory_budget"] = "selective",
    selective_option: str = "op",
    memory_budget: float = 1.0,
    compiled: bool = False,
    loss_chunk_tokens: int | None = None,
) -> int:
    """Activations alive at the deepest point of one micro-batch, for a Llama-like block.

    With N = batch·seq_len tokens, D = ``dim``, Q = ``q_dim`` (query heads × head dim; None: D), K =
    ``kv_dim`` (kv heads × head dim), H = ``hidden_dim``, R = ``routed`` (experts of a token; H is then all of
    theirs), what autograd keeps of one block, in elements per token:

    - everything (mode none): 4D + 3Q + 3K + 4H + 2RD: input, two norm outputs, the residual between; q before
      and after RoPE, attention output; k before and after, v; gate, up, silu(gate) and their product; a row
      sent to each expert and one returned. ``qk_norm``: q and k once more, Q + K. ``compiled``: without q and
      k before RoPE (those before their norm remain) and silu(gate), Q + K + H less.
    - ``memory_budget``: that share of what a compiled block keeps beside its input; but no more than without
      the two norm outputs, the product and, with ``qk_norm``, q and k after RoPE, which the compiler drops at
      any budget below 1: 2D + 2Q + 2K + 2H is left of a dense block.
    - ``op``: 3D + 2Q + 2K + 2H + RD: the input and the outputs of the seven matrix products and of attention.
    - full: D, the input; and one block whole while it is recomputed.
    - an integer n: every n-th block as in full, the others whole.

    To that come the embedding's and the final norm's outputs (2D per token) and one chunk of the loss:
    logits in the compute dtype, in float32, and their gradient, for ``loss_chunk_tokens`` tokens
    (None: all of them). Kernels' workspaces and fragmentation are not in it: expect 10–30 % on top.
    """
    tokens = batch * seq_len
    q_dim = dim if q_dim is None else q_dim
    whole = (4 + 2 * routed) * dim + (3 + qk_norm) * (q_dim + kv_dim) + 4 * hidden_dim
    if compiled or mode == "memory_budget":
        whole -= q_dim + kv_dim + hidden_dim
    if mode == "none":
        per_token = n_layers * whole
    elif mode == "memory_budget":
        dropped = 2 * dim + hidden_dim + qk_norm * (q_dim + kv_dim)
        light = whole - dropped if memory_budget < 1 else whole
        kept = min(light, round(dim + memory_budget * (whole - dim)))
        per_token = n_layers * kept + (whole - kept)
    elif mode == "full":
        per_token = n_layers * dim + whole
    elif selective_option == "op":
        kept = (3 + routed) * dim + 2 * (q_dim + kv_dim) + 2 * hidden_dim
        per_token = n_layers * kept + whole
    else:
        recomputed = n_layers // int(selective_option)
        per_token = recomputed * dim + (n_layers - recomputed) * whole + (whole if recomputed else 0)
    per_token += 2 * dim
    chunk = tokens if loss_chunk_tokens is None else min(tokens, loss_chunk_tokens)
    logits = chunk * vocab_size * (2 * compute_bytes + 4)
    return tokens * per_token * compute_bytes + logits


def estimate_memory(
    *,
    num_params: dict[str, int],
    weight_bytes: int,
    gradient_bytes: float,
    state_bytes_per_param: float,
    activations: int,
    dp_shard: int = 1,
    layer_params: int = 0,
    compute_bytes: int = 2,
    update: int = 0,
    update_in_backward: bool = False,
) -> MemoryEstimate:
    """Per-rank estimate by pool, to about a third: enough to see that a layout cannot fit.

    Args:
        num_params: weights of the whole model by group.
        weight_bytes: bytes of one stored weight.
        gradient_bytes: bytes of one stored gradient, on average; 0 where none is stored.
        state_bytes_per_param: bytes of optimizer state per weight (AdamW in fp32: 8).
        activations: from :func:`activation_bytes`.
        dp_shard: ranks that share weights, gradients and states.
        layer_params: weights of the largest FSDP unit. While one unit is computed the next is already
            gathered, and a gathered unit's gradient waits for its reduction: three such buffers.
        compute_bytes: bytes of a gathered weight.
        update: bytes that the optimizer needs beside weights and states.
        update_in_backward: whether it needs them before the backward pass is over.

    Raises:
        ValueError: ``dp_shard`` < 1.
    """
    if dp_shard < 1:
        raise ValueError(f"dp_shard = {dp_shard}: at least 1")
    total = sum(num_params.values())
    shard = -(-total // dp_shard)
    return MemoryEstimate(
        weights=shard * weight_bytes,
        states=round(shard * state_bytes_per_param),
        gradients=round(shard * gradient_bytes),
        gathered=3 * layer_params * compute_bytes if dp_shard > 1 else 0,
        activations=activations,
        update=update,
        update_in_backward=update_in_backward,
    )
