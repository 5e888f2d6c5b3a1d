"""U of rules of matrices on sharded weights.

Muon and Scion take the dense exchange of the Dobb paper's Table 3: momenta are gathered, mn entries a matrix
and step. Every rank computes the same update from the same bits, so nothing is sent back. Uneven and empty
shards are DTensor's business. Dion and RMNP exchange less: see `low_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titanforge.kernels.codecs import as_encoded
from titanforge.optim.dion import Dion
from titanforge.optim.local_update import LocalWeight, update_state_global, write_copies
from titanforge.optim.low_rank import Cut, ShardedWeight, exchange_factors, exchange_row_norms, same_shape
from titanforge.optim.matrix import RMNP
from titanforge.optim.rule import StateGlobalRule, select


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
    whole = []
    for weight in weights:
        item = weight.item()
        momentum = _gather(weight.momentum, record)
        gradient = None
        if rule.u_reads_gradient and weight.param.grad is not None:
            gradient = _gather(weight.param.grad, record)
        # Of a weight of zeros U makes the update alone, which is linear in nothing else of the weight.
        whole.append(
            LocalWeight(
                weight=torch.zeros_like(momentum),
                gradient=gradient,
                states=(as_encoded(momentum),),
                hyper_row=item.hyper_row,
                auxiliary=item.auxiliary,
                parts=item.parts,
                matrix=item.matrix,
            )
        )
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


def _gather(tensor: Tensor, record: Callable[[str, int], None] | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    if record is not None:
        record("momenta", tensor.numel() * tensor.element_size())
    return tensor.full_tensor().float().contiguous()


def _local_part(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks hold; nothing is sent."""
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    everywhere = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements).to_local()
