"""Means over replicas in buckets, and how far apart the replicas were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from titanforge.sync.ledger import CommLedger
from titanforge.sync.policy import REPLICATE_AXIS


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def average(
    tensors: Sequence[Tensor],
    share: float,
    group: ProcessGroup,
    ledger: CommLedger,
    *,
    purpose: str,
    bucket_elements: int,
    measure: bool = False,
) -> Tensor | None:
    """Overwrite local tensors with their mean over the replicas, in fp32; the same bits on each of them.

    share: this replica's weight in the mean; those of all replicas add up to 1.
    measure: return fp32 [2]: the squares of (own - mean) and of the mean, summed over the tensors.
    """
    squares = torch.zeros(2, dtype=torch.float32, device=tensors[0].device) if measure and tensors else None
    for bucket in _buckets(tensors, bucket_elements):
        total = sum(tensor.numel() for tensor in bucket)
        buffer = torch.empty(total, dtype=torch.float32, device=bucket[0].device)
        pieces = [
            piece.view(tensor.shape)
            for piece, tensor in zip(buffer.split([tensor.numel() for tensor in bucket]), bucket)
        ]
        torch._foreach_copy_(pieces, bucket)  # pyright: ignore[reportPrivateImportUsage]
        own = buffer.clone() if squares is not None else None
        buffer.mul_(share)
        ledger.all_reduce(buffer, group, axis=REPLICATE_AXIS, purpose=purpose)
        torch._foreach_copy_(bucket, pieces)  # pyright: ignore[reportPrivateImportUsage]
        if squares is not None and own is not None:
            squares += torch.stack([(own - buffer).square().sum(), buffer.square().sum()])
    return squares


@torch.no_grad()
def share_copies(tensors: Sequence[Tensor], group: ProcessGroup, ledger: CommLedger, *, purpose: str) -> None:
    """Overwrite local tensors with those of the first replica: one broadcast for each dtype."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        members = [tensor for tensor in tensors if tensor.dtype == dtype and tensor.numel()]
        if not members:
            continue
        buffer = torch.cat([tensor.reshape(-1) for tensor in members])
        ledger.broadcast(buffer, group, axis=REPLICATE_AXIS, purpose=purpose)
        for tensor, piece in zip(members, buffer.split([tensor.numel() for tensor in members])):
            tensor.copy_(piece.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors up to a size, empty ones left out; a larger tensor is a bucket of its own."""
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if bucket and filled + tensor.numel() > elements:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.numel()
    if bucket:
        yield bucket
