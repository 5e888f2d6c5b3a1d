"""torch.compile, block by block."""

from __future__ import annotations

from torch import nn


def apply_compile(model: nn.Module, backend: str = "inductor") -> int:
    """Compile every block of ``model.layers`` in place; returns how many.

    Blocks of one shape share their compiled code (torch guards on structure, not on the instance), so
    compile time does not grow with depth. ``fullgraph`` turns a graph break into an error: a break
    inside a block would silently cost most of the gain. Call it after activation checkpointing (its
    recomputation is then part of the graph) and before ``apply_fsdp`` (whose hooks stay outside).

    Of a block that exchanges tokens with other ranks (``exchanges_tokens``, see ``expert_parallel``) the
    attention alone is compiled: how many rows come is data, which the host reads.
    """
    layers = getattr(model, "layers", None)
    blocks = list(layers.children()) if layers is not None else []
    for block in blocks:
        whole = not any(hasattr(module, "exchanges_tokens") for module in block.modules())
        part = block if whole else block.get_submodule("attention")
        part.compile(backend=backend, fullgraph=True)
    return len(blocks)
