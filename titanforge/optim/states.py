"""Optimizer states as tensors: made complete at construction, saved and loaded by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanforge.optim.rule import StateSlot, UpdateRule

MASTER_SLOT = "master"
"""fp32 copy of a bfloat16 weight."""


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; it may be empty."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold other parts of the tensor."""
    if not isinstance(tensor, DTensor):
        return False
    return any(
        not placement.is_replicate() and tensor.device_mesh.size(axis) > 1
        for axis, placement in enumerate(tensor.placements)
    )


def new_state(param: nn.Parameter, slot: StateSlot, dtype: torch.dtype) -> Tensor:
    """A zero state of a parameter; of the weight's shape, it is distributed like the parameter.

    Statistics (rows, columns, scalars) are few: always fp32, and plain tensors, since their rules take no
    sharded weight.
    """
    if slot.shape == "weight":
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    return torch.zeros(slot.shape_for(param.shape), dtype=torch.float32, device=param.device)


def refuse_sharded(rule: UpdateRule, name: str, param: nn.Parameter, key: str) -> None:
    """Rules that read whole layers would read one shard and differ by layout: say so instead."""
    if rule.regime > 1 and is_sharded(param):
        raise ValueError(
            f"{key} = {rule.name!r} reads whole layers, but {name!r} is sharded: set "
            "parallelism.data_parallel_shard_degree = 1 (replicas are fine) or take an elementwise rule, "
            "such as AdamW or Lion"
        )


def load_states(
    own: Mapping[str, Mapping[str, Tensor]], loaded: Mapping[str, Any], rule_of: Mapping[str, str]
) -> None:
    """Copy loaded states into our own, in place.

    own, loaded: {parameter: {slot: tensor}}; a loaded tensor may be our own (read in place).
    rule_of: rule name by parameter, for messages.
    Raises ValueError for a parameter or slot missing or unknown, and for another shape or placement; nothing
    is written then.
    """
    if missing := sorted(own.keys() - loaded.keys()):
        raise ValueError(f"optimizer state: nothing for {_some(missing)}; the checkpoint is of another model")
    if unknown := sorted(loaded.keys() - own.keys()):
        raise ValueError(f"optimizer state: the model has no trainable parameter {_some(unknown)}")
    pairs = []
    for name, slots in own.items():
        theirs = loaded[name]
        if slots.keys() != theirs.keys():
            raise ValueError(
                f"optimizer state of {name!r}: {rule_of[name]} needs {sorted(slots) or 'nothing'}, the "
                f"checkpoint has {sorted(theirs) or 'nothing'}; it was written with another optimizer.name, "
                "optimizer.momentum or optimizer.master_weights"
            )
        for slot, tensor in slots.items():
            source = theirs[slot]
            if source.shape != tensor.shape:
                raise ValueError(
                    f"optimizer state {slot!r} of {name!r} has shape {tuple(source.shape)} in the "
                    f"checkpoint, {tuple(tensor.shape)} here"
                )
            if isinstance(source, DTensor) != isinstance(tensor, DTensor) or (
                isinstance(source, DTensor)
                and isinstance(tensor, DTensor)
                and (source.placements != tensor.placements or source.device_mesh != tensor.device_mesh)
            ):
                raise ValueError(
                    f"optimizer state {slot!r} of {name!r} is placed differently than the parameter: load it "
                    "with torch.distributed.checkpoint, which reshards"
                )
            pairs.append((local_tensor(tensor), local_tensor(source)))
    for target, source in pairs:
        if target.data_ptr() != source.data_ptr() or target.numel() == 0:
            target.copy_(source)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
