"""torch.compile, block by block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as partitioner_config
from torch import nn

NOT_PARTITIONING = ("eager", "aot_eager")
"""Backends of torch.compile that keep whatever autograd would."""


def apply_compile(
    model: nn.Module,
    backend: str | Callable[..., Any] = "inductor",
    memory_budget: float | None = None,
    recompute_outside: bool = False,
    overlap_products: bool = False,
) -> int:
    """Compile every block of ``model.layers`` in place; returns how many.

    Blocks of one shape share their compiled code (torch guards on structure, not on the instance), so
    compile time does not grow with depth. ``fullgraph`` turns a graph break into an error: a break
    inside a block would silently cost most of the gain. Call it after activation checkpointing (its
    recomputation is then part of the graph) and before ``apply_fsdp`` (whose hooks stay outside).

    Of a block that exchanges tokens with other ranks (``exchanges_tokens``, see ``expert_parallel``) the
    attention alone is compiled: how many rows come is data, which the host reads.

    memory_budget: share, in 0 … 1, of the activations that the compiler would keep for speed alone; what is
    dropped to get there is recomputed in backward, the cheapest first. Just below 1 these are what lies
    between the matrix products and attention (the norms' outputs, normalised and rotated queries and keys,
    the product that feeds the feed-forward's last matrix), at the cost of a few elementwise kernels. None:
    keep what is best for speed.
    recompute_outside: compile the forward of a block that is recomputed whole, and leave the recomputation
    around it. Else the compiler decides what to keep, and keeps what comes out of an autograd function of our
    own. Not for blocks whose forward is other code when it is run again.
    overlap_products: collectives in pieces beside matrix products, by inductor (``async_tensor_parallel``).

    Raises ValueError for a budget out of its range, or a backend that has no choice of what to keep.
    """
    compiler: str | Callable[..., Any] = backend
    if not isinstance(backend, str):
        if memory_budget is not None or overlap_products:
            raise ValueError("a memory budget or overlap is for a backend of torch.compile by name")
    elif backend == "inductor" or memory_budget is not None or overlap_products:
        compiler = _instructed(backend, memory_budget, overlap_products)
    layers = getattr(model, "layers", None)
    blocks = list(layers.children()) if layers is not None else []
    for block in blocks:
        whole = not any(hasattr(module, "exchanges_tokens") for module in block.modules())
        part = block if whole else block.get_submodule("attention")
        inner = getattr(type(part), "recomputed_forward", None)
        if inner is None or not recompute_outside:
            part.compile(backend=compiler, fullgraph=True)
        else:
            part.__dict__["compiled_forward"] = _compiled(inner, compiler)
    return len(blocks)


@functools.cache
def _compiled(forward: Callable[..., Any], compiler: str | Callable[..., Any]) -> Callable[..., Any]:
    """One for all blocks of a class."""
    return torch.compile(forward, backend=compiler, fullgraph=True)


@functools.cache
def _instructed(backend: str, memory_budget: float | None, overlap_products: bool) -> Callable[..., Any]:
    """The backend with these options; one function for all blocks, or each would be compiled anew.

    Settings are torch's own and global; they hold while one of these graphs is compiled, and for no other.
    """
    settings: dict[str, Any] = {}
    if memory_budget is not None:
        if not 0 <= memory_budget <= 1:
            raise ValueError(f"activation_checkpoint.memory_budget = {memory_budget}: must be within 0 and 1")
        if backend in NOT_PARTITIONING:
            raise ValueError(
                f'activation_checkpoint.mode = "memory_budget": compile.backend = "{backend}" keeps what '
                "autograd would; use inductor, or another mode"
            )
        settings["activation_memory_budget"] = memory_budget
        # Of weights that are split over ranks, torch 2.13 hands graphs the mesh, which holds no activation.
        if hasattr(partitioner_config, "unsafe_treat_script_objects_as_zero_size"):
            settings["unsafe_treat_script_objects_as_zero_size"] = True
    # Of a matrix whose rows inductor pads on a GPU (wider than 1024, no multiple of 128 bytes) and that an
    # operator of our own reads too, PyTorch 2.11 lays the rows without padding and multiplies them as if they
    # had it.
    changes: dict[str, Any] = {"comprehensive_padding": False} if backend == "inductor" else {}
    if backend == "inductor" and memory_budget is not None and memory_budget < 1:
        from titanforge.parallelisms.partitioner import RecomputingConcatenations  # imports the compiler

        changes["custom_partitioner_fn"] = RecomputingConcatenations()
    changes |= {"_micro_pipeline_tp": True} if overlap_products else {}
    patches = {"config_patches": changes} if changes else {}
    compile_graph = torch._dynamo.lookup_backend(backend)

    def compile_instructed(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        with partitioner_config.patch(settings):
            return compile_graph(graph, inputs, **patches, **options)

    return compile_instructed
