"""Recompute activations in backward instead of keeping them, block by block.

A block gets a subclass of its own class instead of a wrapper module, so parameter names stay what they
are everywhere (state dicts, parameter groups, checkpoints).
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanforge.parallelisms import context_parallel, ring_attention  # noqa: F401  they enter operators


def _kept_operators() -> frozenset:
    """Operators whose results selective checkpointing keeps: costly to redo for the bytes they hold."""
    aten = torch.ops.aten
    products = ["mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "convolution"]
    attentions = ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"]
    names = products + [f"_scaled_dot_product_{kind}" for kind in attentions]
    kept = {getattr(aten, name).default for name in names if hasattr(aten, name)}
    # FlexAttention is a higher-order operator; eagerly compiled regions appear as one of their own.
    for name in ("flex_attention", "inductor_compiled_code"):
        try:
            kept.add(getattr(torch.ops.higher_order, name))
        except AttributeError:
            continue
    functional = torch.ops._c10d_functional
    kept.add(functional.reduce_scatter_tensor.default)  # never repeat a collective's traffic
    kept.add(functional.all_to_all_single.default)
    kept.add(torch.ops.titanforge.ring_attention.default)
    kept.add(torch.ops.titanforge.exchange_heads.default)
    return frozenset(kept)


_KEPT = _kept_operators()


def _keep_matrix_products(context, operator, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_context():
    return create_selective_checkpoint_contexts(_keep_matrix_products)


def apply_activation_checkpoint(
    model: nn.Module, mode: str, option: str = "op", preserve_rng_state: bool = True
) -> int:
    """Checkpoint the blocks of ``model.layers``; returns how many are checkpointed.

    Args:
        mode: "none"; "memory_budget": left to the compiler (see ``apply_compile``), nothing is done here;
            "full": every block is recomputed whole; "selective": see ``option``.
        option: "op": in every block keep the results of matrix products and attention, recompute the
            rest. A number n as text: recompute every n-th block whole (blocks n, 2n, ...), keep others.
        preserve_rng_state: replay random numbers (dropout) in recomputation.

    In blocks that exchange tokens with other ranks (``exchanges_tokens``, see ``expert_parallel``) "op" is
    about the attention alone: what experts get, make and send is kept, so that no exchange is repeated.
    Recomputing such a block whole repeats its exchanges, on all ranks at the same place of backward.

    Raises:
        ValueError: unknown mode or option.
    """
    if mode in ("none", "memory_budget"):
        return 0
    if mode not in ("full", "selective"):
        raise ValueError(
            f"activation_checkpoint.mode = {mode!r}: must be none, selective, full or memory_budget."
        )
    per_operator = mode == "selective" and option == "op"
    every = 1
    if mode == "selective" and not per_operator:
        if not option.isdigit() or int(option) < 1:
            raise ValueError(
                f"activation_checkpoint.selective_ac_option = {option!r}: must be 'op', or a number n >= 1 "
                "for every n-th block."
            )
        every = int(option)
    layers = getattr(model, "layers", None)
    blocks = list(layers.children()) if layers is not None else []
    chosen = [block for index, block in enumerate(blocks, 1) if index % every == 0]
    for block in chosen:
        part = block
        if per_operator and any(hasattr(module, "exchanges_tokens") for module in block.modules()):
            part = block.get_submodule("attention")
        part.__class__ = _recomputing_class(type(part), per_operator, preserve_rng_state)
    return len(chosen)


@functools.cache
def _recomputing_class(
    base: type[nn.Module], per_operator: bool, preserve_rng_state: bool
) -> type[nn.Module]:
    """Subclass of ``base`` with a checkpointed forward: one per kind, so that blocks share compiled code.

    A closure or wrapper per block would make torch.compile specialise on each, up to its recompile limit.
    """
    options = {"context_fn": _selective_context} if per_operator else {}

    def forward(self, *args, **kwargs):
        return checkpoint(
            functools.partial(self.__dict__.get("compiled_forward", base.forward), self),
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            **options,
            **kwargs,
        )

    members = {"__module__": base.__module__, "forward": forward}
    if not per_operator:
        members["recomputed_forward"] = staticmethod(base.forward)
    return type(base.__name__, (base,), members)
