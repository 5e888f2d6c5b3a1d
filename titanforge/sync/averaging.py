"""Means over replicas in buckets, and how far apart the replicas were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from titanforge.kernels.exchange_codes import BLOCK, ExchangeCode, padded
from titanforge.sync.encoded import EncodedSum, SentBefore
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
    code: ExchangeCode | None = None,
    sent: SentBefore | None = None,
) -> Tensor | None:
    """Overwrite local tensors with their mean over the replicas, in fp32; the same bits on each of them.

    share: this replica's weight in the mean; those of all replicas add up to 1.
    code: send codes in place of fp32 (`EncodedSum`), of blocks along the tensors' last axis. sent: as
        differences from these.
    measure: return fp32 [2]: the squares of (own - mean) and of the mean, summed over the tensors.
    """
    squares = torch.zeros(2, dtype=torch.float32, device=tensors[0].device) if measure and tensors else None
    for bucket in _buckets(tensors, bucket_elements):
        buffer, pieces = one_buffer(bucket, code, group.size())
        torch._foreach_copy_(pieces, bucket)  # pyright: ignore[reportPrivateImportUsage]
        own = buffer.clone() if squares is not None else None
        if code is None:
            buffer.mul_(share)
            ledger.all_reduce(buffer, group, axis=REPLICATE_AXIS, purpose=purpose)
        else:
            before = None if sent is None else sent.next(buffer.numel(), group.size(), buffer.device)
            encoded = EncodedSum(buffer, code, group, ledger, purpose, before)
            encoded.scatter(share)
            encoded.wait()
        torch._foreach_copy_(bucket, pieces)  # pyright: ignore[reportPrivateImportUsage]
        if squares is not None and own is not None:
            squares += torch.stack([(own - buffer).square().sum(), buffer.square().sum()])
    return squares


def one_buffer(
    tensors: Sequence[Tensor], code: ExchangeCode | None, ranks: int
) -> tuple[Tensor, list[Tensor]]:
    """An fp32 buffer for tensors, one after the other, and its views in their shapes. Not filled.

    code: what it is sent with: each tensor then begins a block of its own, and what lies between is zero.
    """
    sizes = [tensor.numel() for tensor in tensors]
    if code is None:
        buffer = torch.empty(sum(sizes), dtype=torch.float32, device=tensors[0].device)
        pieces = buffer.split(sizes)
    else:
        slots = [-(-size // BLOCK) * BLOCK for size in sizes]
        buffer = torch.zeros(padded(sum(slots), ranks), dtype=torch.float32, device=tensors[0].device)
        pieces = [slot[:size] for size, slot in zip(sizes, buffer[: sum(slots)].split(slots))]
    return buffer, [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors)]


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
