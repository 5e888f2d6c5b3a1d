"""U of matrix rules on a GPU: bf16 stacks, and kernels that write the weights; no fp32 copy of either.

What `update_state_global` does in plain torch holds some ten times the matrices' bytes; here it is a bf16
stack of the momenta and another for the next iterate, so that weights and states may fill a card.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels.apply_update import ApplyUpdates
from titanforge.kernels.block_basis import SignUpdates
from titanforge.kernels.codecs import decode
from titanforge.kernels.row_norm_update import RowNormUpdates
from titanforge.optim.batches import Batch
from titanforge.optim.local_update import dense_gradient
from titanforge.optim.newton_schulz import orthogonalized_

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def takes(batch: Batch) -> bool:
    """Whether the kernels can write these weights: plain floats, contiguous, alike."""
    return batch.once("takes", lambda: _takes(batch))


def _takes(batch: Batch) -> bool:
    weights = [item.weight for item in batch]
    copies = [item.copy for item in batch if item.copy is not None]
    return (
        all(item.codec is None for item in batch)
        and len(copies) in (0, len(batch))
        and all(tensor.is_contiguous() for tensor in (*weights, *copies))
        and all(len({t.dtype for t in ts}) == 1 and ts[0].dtype in _FLOATS for ts in (weights, copies) if ts)
    )


def looked_at(batch: Batch, h: Tensor, nesterov: bool) -> Tensor:
    """bf16 [len(batch), *shape]: the momenta, or with Nesterov h[3] G + h[4] M."""
    if not nesterov:
        return stacked(batch)
    stack = _new_stack(batch)
    for row, item in zip(stack, batch):
        row.copy_(item.gradient_or_zeros() * h[3] + h[4] * decode(item.states[0]))
    return stack


def _new_stack(batch: Batch) -> Tensor:
    weight = batch[0].weight
    return torch.empty(len(batch), *weight.shape, dtype=torch.bfloat16, device=weight.device)


def stacked(batch: Batch) -> Tensor:
    """bf16 [len(batch), *shape]: the momenta."""
    stack = _new_stack(batch)
    plain = [
        item.states[0].values if item.states[0].codec.kind == "plain" else decode(item.states[0])
        for item in batch
    ]
    torch._foreach_copy_(list(stack.unbind(0)), plain)  # pyright: ignore[reportPrivateImportUsage]
    return stack


def orthogonal_update(
    batch: Batch,
    h: Tensor,
    *,
    steps: int,
    coefficients: tuple[float, float, float],
    scale: float,
    nesterov: bool,
) -> bool:
    """W <- (1 - lr wd) W - lr s O(M) by Newton-Schulz. False, and nothing done, where `takes` is False."""
    if not takes(batch):
        return False
    stack = looked_at(batch, h, nesterov)
    parts, (rows, columns) = batch[0].parts, batch[0].weight.shape[-2:]
    updates = orthogonalized_(stack.view(-1, rows // parts, columns), steps, coefficients)
    apply = batch.once(
        "apply", lambda: ApplyUpdates([item.weight for item in batch], [item.copy for item in batch])
    )
    apply(updates, h, scale)
    return True


def plain_momenta(batch: Batch) -> list[Tensor] | None:
    """The momenta [m, n], where kernels can read them as they are."""
    momenta = [item.states[0].values for item in batch]
    plain = all(
        item.weight.dim() == 2
        and item.states[0].codec.kind == "plain"
        and momentum.dtype == momenta[0].dtype
        and momentum.is_contiguous()
        for item, momentum in zip(batch, momenta)
    )
    return momenta if plain and takes(batch) else None


def block_sign_update(batch: Batch, h: Tensor, basis_slot: int, scale: float) -> bool:
    """W <- (1 - lr wd) W - lr scale sign(M U) U^T over blocks of the input axis.

    False, and nothing done, where the tensors are not plain matrices with bf16 bases.
    """
    update = batch.once("signs", lambda: _sign_updates(batch, basis_slot))
    if update is None:
        return False
    update(h, scale)
    return True


def block_sign_step(batch: Batch, h: Tensor, basis_slot: int, scale: float, nonfinite: Tensor) -> bool:
    """`block_sign_update`, after M <- mu M + gain G in the same launch. False, and nothing done, also where
    momenta are rounded at random, gradients are of several dtypes or a block is too wide for one launch.
    """
    update = batch.once("signs", lambda: _sign_updates(batch, basis_slot))
    if update is None or not update.takes_gradients or not all(item.is_plain for item in batch):
        return False
    gradients = [dense_gradient(item).contiguous() for item in batch]
    if gradients[0].dtype not in _FLOATS or any(one.dtype != gradients[0].dtype for one in gradients):
        return False
    update(h, scale, gradients, nonfinite)
    return True


def _sign_updates(batch: Batch, basis_slot: int) -> SignUpdates | None:
    momenta, bases = plain_momenta(batch), [item.auxiliary[basis_slot] for item in batch]
    shared = all(
        basis.dtype == torch.bfloat16
        and basis.is_contiguous()
        and basis.shape[-3] * basis.shape[-1] == basis.numel() // basis.shape[-1]
        for basis in bases
    )
    if momenta is None or not shared:
        return None
    return SignUpdates(momenta, bases, [item.weight for item in batch], [item.copy for item in batch])


def row_norm_update(batch: Batch, h: Tensor, scale: float) -> bool:
    """W <- (1 - lr wd) W - lr scale M / |M| by rows. False, and nothing done, as above."""
    update = batch.once("rows", lambda: _row_norm_updates(batch))
    if update is None:
        return False
    update(h, scale)
    return True


def _row_norm_updates(batch: Batch) -> RowNormUpdates | None:
    momenta = plain_momenta(batch)
    if momenta is None:
        return None
    return RowNormUpdates(momenta, [item.weight for item in batch], [item.copy for item in batch])
