"""How weights lie on ranks, and states that lie as their weights do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from titanforge.optim.rule import AuxiliarySlot


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; it may be empty."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def address_of(param: Tensor) -> int:
    """Where the part that this rank holds lies; for each step, as `local_tensor` is slow."""
    return (param._local_tensor if isinstance(param, DTensor) else param).data_ptr()


def sharded_dim(placement: Placement) -> int | None:
    """The dim that a placement cuts, in whatever way; None for none."""
    return None if placement.is_replicate() else getattr(placement, "dim", None)


def is_cut(tensor: Tensor, dims: Sequence[int]) -> bool:
    """Whether other ranks hold other parts of the tensor along one of these dims, counted from its end."""
    if not isinstance(tensor, DTensor):
        return False
    return any(
        tensor.device_mesh.size(axis) > 1 and sharded_dim(placement) in [tensor.dim() + dim for dim in dims]
        for axis, placement in enumerate(tensor.placements)
    )


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold other parts of the tensor."""
    if not isinstance(tensor, DTensor):
        return False
    return any(
        not placement.is_replicate() and tensor.device_mesh.size(axis) > 1
        for axis, placement in enumerate(tensor.placements)
    )


def cuts(tensor: Tensor, dim: int | None) -> int:
    """Into how many parts the dim is cut, by all axes together; 1 for a tensor of one rank."""
    if not isinstance(tensor, DTensor):
        return 1
    axes = [axis for axis, placement in enumerate(tensor.placements) if sharded_dim(placement) == dim]
    return math.prod(tensor.device_mesh.size(axis) for axis in axes)


def axis_name(tensor: DTensor, axis: int) -> str:
    """Name of an axis of the tensor's mesh; "" if its axes have none."""
    names = tensor.device_mesh.mesh_dim_names
    return names[axis] if names else ""


def is_anothers(tensor: DTensor, axis: int) -> bool:
    """Whether ranks along this axis of its mesh have parts of the model to themselves, whatever they read:
    the tensor axis, and experts that ranks share.
    """
    return axis_name(tensor, axis) in ("tp", "ep")


def cut_like(param: Tensor, tensor: Tensor, slot: AuxiliarySlot) -> Tensor:
    """What this rank holds of a whole `tensor` whose dims follow those of a parameter as the slot says; a
    DTensor where any is cut.
    """
    if not isinstance(param, DTensor):
        return tensor
    dims = dict(slot.follows)
    placements: list[Placement] = []
    for placement in param.placements:
        dim = sharded_dim(placement)
        if dim not in dims:
            placements.append(Replicate())
        else:  # a dim that two axes cut is dealt as the weight's is
            placements.append(_along(placement, dims[dim]))
    if all(placement.is_replicate() for placement in placements):
        return tensor
    mesh = param.device_mesh
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape))].clone()
    return from_parts(local, mesh, placements, tensor.shape)


def _along(placement: Placement, dim: int) -> Placement:
    """The same cut of another dim."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def distributed_like(param: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """A DTensor of the global `shape` with the parameter's placements around `local`; or `local` itself."""
    if not isinstance(param, DTensor):
        return local
    return from_parts(local, param.device_mesh, param.placements, shape)


def from_parts(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """The DTensor of the global `shape`, contiguous, of which `local` is this rank's part. Nothing is sent,
    so parts may be uneven or empty.
    """
    shape = torch.Size(shape)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)
