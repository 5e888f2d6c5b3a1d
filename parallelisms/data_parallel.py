"""Data parallelism within a replica (FSDP2), and its numerics on a single rank.

Gradients are SUMS over ranks: the loss is divided by the valid tokens of the whole global batch before
backward, so no average by rank count may happen anywhere. Replicas are not handled here: the sync
policy owns their axis, and FSDP gets the 1-D shard mesh alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

_RESHARD = {"default": True, "always": True, "never": False}


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_policy: str = "default",
    cpu_offload: bool = False,
    shard_dim: Callable[[nn.Parameter], int | None] | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard ``model`` over the 1-D ``mesh``: a group per block, one each for embedding and head.

    A group is gathered, computed and freed together, so embedding and head, the largest weights of a
    small model, overlap with the blocks as every other group does. With tied weights both live in the
    root group, which stays gathered through forward and backward. A weight is whole only while its
    module's forward runs: a chunked loss belongs into the head's forward.

    Args:
        model: on meta or materialised; see the package's docstring for its attribute names.
        mesh: dp_shard (x cp), 1-D.
        param_dtype: dtype of forward, backward and gathered weights; None: as stored.
        reduce_dtype: dtype of the reduce-scatter; None: the gradient's.
        reshard_policy: "default"/"always": free gathered blocks after forward; "never": keep them until
            backward (one gather less, a whole model more memory). The head always stays gathered: its
            backward follows at once.
        cpu_offload: keep shards, gradients and states in host memory.
        shard_dim: the dim along which a parameter is cut; None for the first. Others than the first must
            be divisible by the ranks.
        expert_mesh: the ranks that hold the same experts, 1-D, where experts are split over others already:
            each block's become a group of their own over it. It may be of one rank.

    Raises:
        ValueError: unknown policy or a mesh of more dimensions.
    """
    if reshard_policy not in _RESHARD:
        raise ValueError(
            f"parallelism.fsdp_reshard_after_forward = {reshard_policy!r}: must be default, always or never."
        )
    if mesh.ndim != 1:
        raise ValueError(f"FSDP takes the 1-D shard mesh; this one has axes {mesh.mesh_dim_names}.")
    options = {
        "mesh": mesh,
        # Inputs are not cast: activations already have param_dtype from the embedding on, and rotary
        # tables handed to the blocks must stay fp32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        "shard_placement_fn": None if shard_dim is None else _placement_function(shard_dim),
    }
    reshard_after_forward = _RESHARD[reshard_policy]
    embedding, head = getattr(model, "tok_embeddings", None), getattr(model, "output", None)
    tied = embedding is not None and head is not None and embedding.weight is head.weight
    if embedding is not None and not tied:
        fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
    layers = getattr(model, "layers", None)
    blocks = list(layers.children()) if layers is not None else []
    for block in blocks:
        if expert_mesh is not None:
            _shard_experts(block, reshard_after_forward, {**options, "mesh": expert_mesh})
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    if head is not None and not tied:
        fully_shard(head, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        # Without this a factor of 1 becomes NCCL's PREMUL_SUM, a slower path that gloo lacks.
        module.set_force_sum_reduction_for_comms(True)
    if expert_mesh is not None:
        _prefetch_with_experts(embedding if not tied else None, blocks, head if not tied else None)


def _shard_experts(block: nn.Module, reshard_after_forward: bool, options: dict[str, Any]) -> None:
    for experts in expert_modules(block):
        weight = next(experts.parameters())
        held = weight.to_local() if isinstance(weight, DTensor) else weight
        shard = Shard(expert_shard_dim(held.shape[0], options["mesh"].size()))
        options["shard_placement_fn"] = lambda _, shard=shard: shard
        fully_shard(experts, reshard_after_forward=reshard_after_forward, **options)


def expert_modules(block: nn.Module) -> list[nn.Module]:
    """Modules whose weights are 3-D, one matrix an expert: those that list ``grouped_weights``."""
    return [module for module in block.modules() if hasattr(module, "grouped_weights")]


def expert_shard_dim(experts: int, ranks: int) -> int:
    """The axis of [experts, out, in] that ``ranks`` take shares of: 0, whole experts, if that comes out even,
    else 1, rows of each."""
    return 1 if experts % ranks else 0


def _prefetch_with_experts(embedding: Any, blocks: list[Any], head: Any) -> None:
    """Have each group gather the next block with its experts ahead, in both directions.

    By itself FSDP gathers ahead in backward alone, and one group: the host, which waits for the token counts
    of each block, would come to the experts' gather too late.
    """
    chain = [module for module in (embedding, *blocks, head) if isinstance(module, FSDPModule)]
    for before, after in itertools.pairwise(chain):
        before.set_modules_to_forward_prefetch([after, *_sharded_experts(after)])
        after.set_modules_to_backward_prefetch([before, *_sharded_experts(before)])


def _sharded_experts(block: Any) -> list[FSDPModule]:
    return [module for module in expert_modules(block) if isinstance(module, FSDPModule)]


def _placement_function(
    shard_dim: Callable[[nn.Parameter], int | None],
) -> Callable[[nn.Parameter], Shard | None]:
    def place(parameter: nn.Parameter) -> Shard | None:
        dim = shard_dim(parameter)
        return None if dim is None else Shard(dim)

    return place


def set_is_last_micro_batch(model: nn.Module, is_last: bool, reduce_every: bool = True) -> None:
    """Tell FSDP whether the coming backward is the step's last; nothing to do without FSDP.

    Args:
        reduce_every: reduce-scatter each micro-batch into the sharded gradient, which holds 1/N of the
            model. False: keep whole gradients and reduce once, after the last: less traffic for a
            whole fp32 model of memory.
    """
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(reduce_every or is_last)


def reshard(model: nn.Module) -> None:
    """Free gathered weights of every group; for after an evaluation, which has no backward to do it."""
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def apply_mixed_precision(model: nn.Module, param_dtype: torch.dtype | None) -> int:
    """Compute in ``param_dtype`` with weights stored as they are, without FSDP; returns the cast weights.

    What FSDP does on its gathered copy is done on each read: a module's parameter reads as its cast, so
    forward and backward run in ``param_dtype`` and the gradient is cast back to the stored dtype before
    it is accumulated. autocast would differ: it picks dtypes per operator. Parameters themselves, their
    names, ``named_parameters`` and ``state_dict`` are unchanged, and torch.compile sees plain casts. Classes
    say ``computes_in``, for forwards that take a part of a weight first.

    Read a weight through its module only inside forward: it is a copy; write to ``parameters()``.
    """
    if param_dtype is None:
        return 0
    count = 0
    for module in model.modules():
        cast = [
            name
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != param_dtype
        ]
        if cast:
            module.__class__ = _casting_class(type(module), tuple(cast), param_dtype)
            count += len(cast)
    return count


_CASTING_CLASSES: dict[tuple, type] = {}


def _casting_class(base: type, names: tuple[str, ...], dtype: torch.dtype) -> type:
    """Subclass of ``base`` whose parameters ``names`` read as ``dtype``; one per kind, so code is shared."""
    key = (base, names, dtype)
    if key not in _CASTING_CLASSES:

        def reader(name: str) -> property:
            return property(lambda self: self._parameters[name].to(dtype))

        members: dict[str, Any] = {name: reader(name) for name in names} | {"computes_in": dtype}
        _CASTING_CLASSES[key] = type(base.__name__, (base,), {"__module__": base.__module__, **members})
    return _CASTING_CLASSES[key]
