"""U of rules of matrices on sharded weights.

Muon and Scion deal their matrices to the ranks (`dealt`). Where that is not simple momenta are gathered, the
dense exchange of the Dobb paper's Table 3, mn entries a matrix and step: every rank computes the same update
from the same bits, so nothing is sent back, and uneven and empty shards are DTensor's business. So it is for
matrices that two axes cut, whose parts are of no one group, and for experts of which ranks have rows, whose
stacks differ between ranks. Dion and RMNP exchange less: see `low_rank`, and
`low_rank_shards` for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanforge.kernels._triton import runs_triton
from titanforge.kernels.codecs import as_encoded
from titanforge.optim.dealt import Dealings, update_dealt
from titanforge.optim.dion import Dion
from titanforge.optim.entries import Entry
from titanforge.optim.local_update import LocalWeight, update_state_global, write_copies
from titanforge.optim.low_rank import Cut, exchange_factors, exchange_row_norms, same_shape
from titanforge.optim.low_rank_shards import ShardBatches
from titanforge.optim.matrix import RMNP, OrthogonalRule
from titanforge.optim.placement import from_parts, local_tensor, sharded_dim
from titanforge.optim.rule import StateGlobalRule, select


class KnownShards:
    """What is found out once about weights that are updated together: their batches.

    stacked: as of `ShardBatches`.
    """

    def __init__(self, stacked: bool = False) -> None:
        self.dealings = Dealings()
        self.factors = ShardBatches(stacked)


def update_sharded(
    rule: StateGlobalRule,
    weights: Sequence[Entry],
    h: Tensor,
    record: Callable[[str, int], None] | None = None,
    known: KnownShards | None = None,
) -> None:
    """U of a rule with `u_gathers`, after A has run on the shards. Call it on all ranks with all weights,
    empty shards too. record: as of `DataLinks`. known: of these weights, where they are the same from step
    to step.
    """
    known = known or KnownShards()
    if isinstance(rule, OrthogonalRule):
        batches, weights = known.dealings.of(weights, rule.batch_bytes)
        update_dealt(rule, batches, h, record)
        known.dealings.release()
    elif isinstance(rule, Dion) and runs_triton(weights[0].param):
        weights = known.factors.update(rule, weights, h, record)
    for batch in same_shape(weights):
        if isinstance(rule, Dion) and Cut.possible(batch[0].param):
            exchange_factors(rule, batch, h, record)
        elif isinstance(rule, RMNP):
            exchange_row_norms(rule, batch, h, record)
        else:
            _update_batch(rule, batch, h, record)


def _update_batch(
    rule: StateGlobalRule,
    weights: Sequence[Entry],
    h: Tensor,
    record: Callable[[str, int], None] | None,
) -> None:
    """weights: of one shape and cut."""
    momenta = _gather([weight.momentum for weight in weights], record)
    gradients: list[Tensor | None] = [None] * len(weights)
    if rule.u_reads_gradient:
        having = [index for index, weight in enumerate(weights) if weight.param.grad is not None]
        whole_gradients = [weight.param.grad for weight in weights if weight.param.grad is not None]
        for index, gradient in zip(having, _gather(whole_gradients, record)):
            gradients[index] = gradient
    # Of a weight of zeros U makes the update alone, which is linear in nothing else of the weight.
    whole = [
        LocalWeight(
            weight=torch.zeros_like(momentum),
            gradient=gradient,
            states=(as_encoded(momentum),),
            hyper_row=item.hyper_row,
            auxiliary=item.auxiliary,
            parts=item.parts,
            matrix=item.matrix,
        )
        for momentum, gradient, item in zip(momenta, gradients, (weight.item() for weight in weights))
    ]
    update_state_global(rule, whole, h)
    for weight, full in zip(weights, whole):
        item = weight.item()
        if item.weight.numel():
            w = item.weight.float()
            delta = _local_part(full.weight, weight.param)
            item.weight.copy_(select(h, (w - (h[1] * h[2]) * w) + delta, w))
            if rule.u_writes_state:
                item.states[0].values.copy_(_local_part(full.states[0].values, weight.param))
            write_copies([item])


def _gather(tensors: Sequence[Tensor], record: Callable[[str, int], None] | None) -> list[Tensor]:
    """Whole matrices, fp32, of the experts that this rank has a part of; tensors of one shape and cut go in
    one exchange.
    """
    if not tensors:
        return []
    first = tensors[0]
    assert isinstance(first, DTensor)
    if all(type(placement) in (Shard, Replicate) for placement in first.placements):
        stacked = torch.stack([local_tensor(tensor) for tensor in tensors])
        placements = [Shard(p.dim + 1) if isinstance(p, Shard) else Replicate() for p in first.placements]
        spread = from_parts(stacked, first.device_mesh, placements, (len(tensors), *first.shape))
        gathered = list(_whole_matrices(spread).unbind(0))
    else:  # cut along one dim by two axes, as FSDP does to what the tensor axis has cut
        gathered = [_whole_matrices(tensor) for tensor in tensors]
    if record is not None:
        record("momenta", len(tensors) * gathered[0].numel() * first.element_size())
    return [tensor.float().contiguous() for tensor in gathered]


def _whole_matrices(tensor: Tensor) -> Tensor:
    """A DTensor [*, m, n] with its matrices whole and its leading dims cut as they were; the local part."""
    assert isinstance(tensor, DTensor)
    matrix = (tensor.dim() - 2, tensor.dim() - 1)
    kept = [Replicate() if sharded_dim(p) in matrix else p for p in tensor.placements]
    return tensor.redistribute(tensor.device_mesh, kept).to_local()


def _local_part(full: Tensor, like: Tensor) -> Tensor:
    """This rank's rows and columns of whole matrices; nothing is sent."""
    assert isinstance(like, DTensor)
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    (rows, columns), (top, left) = shape[-2:], offset[-2:]
    return full[..., top : top + rows, left : left + columns]
