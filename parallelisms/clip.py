"""The global gradient norm and the factor that clips it.

Right whatever mix of plain tensors and DTensors, meshes and dtypes the parameters have; stays on the
device (no host sync); every rank issues the same collectives whichever gradients it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

AllReduce = Callable[[Tensor, ProcessGroup], object]
_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_, so that the two agree


def global_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    groups: Iterable[ProcessGroup] = (),
    all_reduce: AllReduce | None = None,
) -> Tensor:
    """2-norm of all gradients together, as a 0-d fp32 tensor on the gradients' device.

    Squares are summed in fp32. A DTensor's local squares are summed over the mesh axes it is sharded
    on; axes it is replicated on count once.

    Args:
        parameters: parameters (an iterator is fine); those without a gradient count as zero.
        groups: further process groups whose ranks hold *other* parameters (pipeline stages).
        all_reduce: sums a tensor in place over a group; default ``dist.all_reduce``.

    Raises:
        ValueError: a gradient is an unreduced partial sum, whose norm means nothing yet.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    reduce = all_reduce or (lambda tensor, group: dist.all_reduce(tensor, group=group))
    # Keyed by parameters, not by gradients: all ranks then agree on the collectives even when a
    # gradient is missing on some (an expert that no token reached).
    shares: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        gradients = shares.setdefault(_sharded_axes(parameter), [])
        if parameter.grad is not None:
            gradients.append(_local_gradient(parameter.grad))
    device = _compute_device(parameters)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for key, gradients in shares.items():
        square = _sum_of_squares(gradients, device)
        for mesh, axis in key:
            reduce(square, mesh.get_group(axis))
        total += square
    for group in groups:
        reduce(total, group)
    return total.sqrt()


def clip_factor(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    groups: Iterable[ProcessGroup] = (),
    all_reduce: AllReduce | None = None,
) -> tuple[Tensor, Tensor]:
    """(global norm, factor to scale every gradient with), both 0-d fp32 on the device; scales nothing.

    ``factor = min(1, max_norm / (norm + 1e-6))``; 1 when ``max_norm`` is 0 (no clipping). With a
    non-finite norm the factor is 0 and the step must not be applied: test the returned norm.
    """
    norm = global_grad_norm(parameters, groups, all_reduce)
    factor = (max_norm / (norm + _EPS)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
    return norm, torch.where(torch.isfinite(norm), factor, torch.zeros_like(factor))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    groups: Iterable[ProcessGroup] = (),
    all_reduce: AllReduce | None = None,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most ``max_norm``; returns the norm before.

    For optimizers that take no factor. With a non-finite norm every finite gradient entry becomes 0.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm, factor = clip_factor(parameters, max_norm, groups, all_reduce)
    if max_norm > 0:
        by_kind: dict[tuple, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                local = _local_gradient(parameter.grad)
                by_kind.setdefault((local.device, local.dtype), []).append(local)
        for (device, _), gradients in by_kind.items():
            torch._foreach_mul_(gradients, factor.to(device))  # pyright: ignore[reportPrivateImportUsage]
    return norm


def _sharded_axes(parameter: Tensor) -> tuple:
    """((mesh, axis index), ...) over which this parameter's local squares must be summed."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    return tuple((mesh, axis) for axis, place in enumerate(placements) if not place.is_replicate())


def _local_gradient(gradient: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor):
        return gradient.detach()
    if any(place.is_partial() for place in gradient.placements):
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} has placements {gradient.placements}: "
            "reduce partial sums before taking the norm."
        )
    return gradient.to_local().detach()


def _compute_device(parameters: list[Tensor]) -> torch.device:
    """Where the norm lives: the accelerator if any parameter or gradient is there, else the CPU."""
    devices = {p.device for p in parameters}
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares in fp32 over local tensors; empty shards add nothing."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    by_kind: dict[tuple, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for same in by_kind.values():
        norms = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            same, 2.0, dtype=torch.float32
        )
        total += torch.stack(norms).square().sum().to(device)
    return total
