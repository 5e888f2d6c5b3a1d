"""U of rules of matrices on sharded weights.

Muon and Scion take the dense exchange of the Dobb paper's Table 3: momenta are gathered, mn entries a matrix
and step. Every rank computes the same update from the same bits, so nothing is sent back. Uneven and empty
shards are DTensor's business. Dion and RMNP exchange less: see `low_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanforge.kernels.codecs import as_encoded
from titanforge.optim.dion import Dion
from titanforge.optim.local_update import LocalWeight, update_state_global, write_copies
from titanforge.optim.low_rank import Cut, ShardedWeight, exchange_factors, exchange_row_norms, same_shape
from titanforge.optim.matrix import RMNP
from titanforge.optim.rule import StateGlobalRule, select
from titanforge.optim.states import local_tensor


def update_sharded(
    rule: StateGlobalRule,
    weights: Sequence[ShardedWeight],
    h: Tensor,
    record: Callable[[str, int], None] | None = None,
) -> None:
    """U of a rule with `u_gathers`, after A has run on the shards. Call it on all ranks with all weights,
    empty shards too. record: as of `DataLinks`.
    """
    for batch in same_shape(weights):
        if isinstance(rule, Dion) and Cut.possible(batch[0].param):
            exchange_factors(rule, batch, h, record)
        elif isinstance(rule, RMNP):
            exchange_row_norms(rule, batch, h, record)
        else:
            _update_batch(rule, batch, h, record)


def _update_batch(
    rule: StateGlobalRule,
    weights: Sequence[ShardedWeight],
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
    """fp32; tensors of one shape and cut go in one exchange."""
    if not tensors:
        return []
    first = tensors[0]
    assert isinstance(first, DTensor)
    if record is not None:
        record("momenta", len(tensors) * first.numel() * first.element_size())
    if any(type(placement) not in (Shard, Replicate) for placement in first.placements):
        return [
            tensor.full_tensor().float().contiguous() for tensor in tensors if isinstance(tensor, DTensor)
        ]
    stacked = torch.stack([local_tensor(tensor) for tensor in tensors])
    placements = [Shard(p.dim + 1) if isinstance(p, Shard) else Replicate() for p in first.placements]
    shape = torch.Size((len(tensors), *first.shape))
    spread = DTensor.from_local(
        stacked,
        first.device_mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return list(spread.full_tensor().float().contiguous().unbind(0))


def _local_part(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks hold; nothing is sent."""
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    everywhere = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements).to_local()
