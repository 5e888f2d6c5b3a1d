"""States of many weights as one tensor, of which they are views: a step neither gathers nor scatters them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanforge.optim.placement import distributed_like, local_tensor

if TYPE_CHECKING:
    from titanforge.optim.entries import Entry


def stack_auxiliary(entries: Sequence[Entry]) -> None:
    """Let auxiliary states of one shape, of weights of one shape, be views of one tensor each.

    entries: of weights that are updated together, in their order. Nobody may hold the former states. What is
    whole on every rank, as the factors of sharded matrices are, is no DTensor; DTensors, of experts, stay as
    they are.
    """
    groups: dict[tuple, list[tuple[Entry, str]]] = defaultdict(list)
    for entry in entries:
        for slot, state in entry.auxiliary.items():
            if not isinstance(state, DTensor) and state.nbytes % 16 == 0:  # a view begins as tensors do
                shapes = entry.param.shape, entry.parts, entry.hyper_row
                groups[slot, state.dtype, state.shape, shapes].append((entry, slot))
    for members in groups.values():
        if len(members) > 1:
            whole = torch.stack([entry.auxiliary[slot] for entry, slot in members])
            for (entry, slot), view in zip(members, whole.unbind(0)):
                entry.auxiliary[slot] = view


def stack_momenta(entries: Sequence[Entry]) -> None:
    """The same of the first states of matrices, this rank's parts of them, where they are plain floats."""
    groups: dict[tuple, list[Entry]] = defaultdict(list)
    for entry in entries:
        state = entry.states[0]
        own = local_tensor(state.values)
        if state.codec.kind == "plain" and own.dim() == 2 and own.numel() and own.nbytes % 16 == 0:
            groups[own.dtype, own.shape, entry.param.shape, entry.parts, entry.hyper_row].append(entry)
    for members in groups.values():
        if len(members) > 1:
            whole = torch.stack([local_tensor(entry.states[0].values) for entry in members])
            for entry, view in zip(members, whole.unbind(0)):
                state = entry.states[0]
                values = distributed_like(entry.param, view, state.values.shape)
                entry.states[0] = replace(state, values=values)


def one_stack(tensors: Sequence[Tensor]) -> Tensor | None:
    """[len(tensors), *shape], a view, if the tensors, of one shape, lie one after the other in one memory."""
    first = tensors[0]
    memory, size = first.untyped_storage().data_ptr(), first.nbytes
    for index, tensor in enumerate(tensors):
        if (
            not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() != memory
            or tensor.data_ptr() != first.data_ptr() + index * size
        ):
            return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
