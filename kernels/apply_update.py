"""W <- (1 - lr wd) W - lr s O of many weights in one launch, from updates that lie in one stack."""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titanforge.kernels._triton import LAUNCH_OPTIONS, cdiv, jit, runs_triton, tl
from titanforge.kernels.pointers import address_table, element_type

_CHUNK = 4096


@jit(unspecialized=("scale",))
def apply_update_kernel(
    table_ptr, update_ptr, h_ptr, scale, numel,
    W_TYPE: tl.constexpr, COPY_TYPE: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, RATE: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """One chunk of one weight. table: int64 [weights, 2], addresses of the weight and of its rounded copy.
    h: (apply, lr, weight_decay, ...). RATE: which of h takes the place of lr. Grid: chunks, weights.
    """
    if tl.load(h_ptr) != 0:
        weight = tl.program_id(1).to(tl.int64)
        w_ptr = tl.load(table_ptr + 2 * weight).to(tl.pointer_type(W_TYPE))
        copy_ptr = tl.load(table_ptr + 2 * weight + 1).to(tl.pointer_type(COPY_TYPE))
        if ALIGNED:
            w_ptr = tl.multiple_of(w_ptr, 16)
            copy_ptr = tl.multiple_of(copy_ptr, 16)
        index = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        inside = index < numel
        lr = tl.load(h_ptr + RATE)
        w = tl.load(w_ptr + index, mask=inside, other=0.0).to(tl.float32)
        update = tl.load(update_ptr + weight * numel + index, mask=inside, other=0.0).to(tl.float32)
        if DECAY:
            w = w - (lr * tl.load(h_ptr + 2)) * w
        moved = w - lr * (scale * update)
        tl.store(w_ptr + index, moved.to(W_TYPE), mask=inside)
        if COPY:
            tl.store(copy_ptr + index, moved.to(COPY_TYPE), mask=inside)


class ApplyUpdates:
    """`apply_updates` of weights whose tensors do not move: what a launch needs is found once."""

    def __init__(
        self, weights: Sequence[Tensor], copies: Sequence[Tensor | None], rate: int = 1, decay: bool = True
    ) -> None:
        self._tensors = weights, copies
        copy, own_type = copies[0], weights[0].dtype
        self._table = address_table(list(zip(weights, copies)), weights[0].device)
        present = [*weights, *(one for one in copies if one is not None)]
        self._options = {
            "W_TYPE": element_type(own_type),
            "COPY_TYPE": element_type(own_type if copy is None else copy.dtype),
            "COPY": copy is not None,
            "ALIGNED": all(tensor.data_ptr() % 16 == 0 for tensor in present),
            "CHUNK": _CHUNK,
            "RATE": rate,
            "DECAY": decay,
        }

    def __call__(self, updates: Tensor, hyper: Tensor, scale: float) -> None:
        weights = self._tensors[0]
        numel = weights[0].numel()
        apply_update_kernel[(cdiv(numel, _CHUNK), len(weights))](
            self._table, updates, hyper, scale, numel, num_warps=8, **self._options, **LAUNCH_OPTIONS
        )


def apply_updates(
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    updates: Tensor,
    hyper: Tensor,
    scale: float,
    rate: int = 1,
    decay: bool = True,
) -> None:
    """In place; nothing changes where hyper[0] is 0.

    weights: contiguous, of one shape and dtype. copies: of the same shape and one dtype, take the weights
    rounded to nearest; or None. updates: contiguous [len(weights), *shape]. rate: where in `hyper` it is,
    1 for lr. decay: by hyper[2]; without, W <- W - rate s O.
    """
    if runs_triton(updates):
        ApplyUpdates(weights, copies, rate, decay)(updates, hyper, scale)
    else:
        reference_apply_updates(weights, copies, updates, hyper, scale, rate, decay)


def reference_apply_updates(
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    updates: Tensor,
    hyper: Tensor,
    scale: float,
    rate: int = 1,
    decay: bool = True,
) -> None:
    """The same in plain torch."""
    for weight, copy, update in zip(weights, copies, updates):
        w = weight.float()
        kept = w - (hyper[rate] * hyper[2]) * w if decay else w
        moved = kept - hyper[rate] * (scale * update.float())
        moved = torch.where(hyper[0] != 0, moved, w)
        weight.copy_(moved)
        if copy is not None:
            copy.copy_(torch.where(hyper[0] != 0, moved.to(copy.dtype), copy))
