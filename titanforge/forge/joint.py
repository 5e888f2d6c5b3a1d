"""The sink of several linears that are multiplied as one.

Each weight keeps its own sink, which says when and how it is consumed. Where all of them are consumed at once
by a rule that takes each coordinate by itself, their weights and states lie side by side in memory and one
launch takes them all; that changes no bit of any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from titanforge.forge.adjacent import adjacent_parts
from titanforge.forge.plan import Granule
from titanforge.forge.projections import Group
from titanforge.forge.sinks import Sink
from titanforge.forge.sources import Product
from titanforge.kernels.codecs import Encoded
from titanforge.kernels.step import Target, make_target
from titanforge.optim.entries import Entry
from titanforge.optim.rule import LocalStateRule
from titanforge.optim.states import StoredState


def check_room(groups: Sequence[Group], entries: Mapping[str, Entry]) -> None:
    """Take what moving the largest group takes, on each device, and give it back.

    entries: of the weights by name. Raises OutOfMemoryError, with nothing moved, where that much is not free:
    weights and states of a group are copied before their former places are.
    """
    room: dict[torch.device, int] = {}
    for group in groups:
        members = [entries[name] for name in group.names]
        moved = [[entry.param for entry in members]]
        if _states_move(members):
            moved += [
                list(values) for values in zip(*([s.values for s in entry.states] for entry in members))
            ]
        for tensors in moved:
            device, size = tensors[0].device, sum(one.numel() * one.element_size() for one in tensors)
            room[device] = max(room.get(device, 0), size)
    for device, size in room.items():
        torch.empty(size, dtype=torch.uint8, device=device)


class JointSink:
    """What backward hands the product of a whole group to.

    sinks: of the weights, in the order in which they lie in `weight` [sum of N, K]. entries: theirs, whose
    states are moved side by side if one launch can take them.
    """

    def __init__(self, sinks: Sequence[Sink], entries: Sequence[Entry], weight: Tensor) -> None:
        self._sinks = sinks
        self._address = weight.data_ptr()
        self._given: Tensor | None = None
        self._target = _joint_target(sinks, entries, weight)

    @contextmanager
    def writing_to(self, weight: Tensor) -> Iterator[None]:
        """As of a sink: a compiled graph may hand a copy."""
        self._given = weight
        try:
            yield
        finally:
            self._given = None

    def product(self, dy: Tensor, x: Tensor) -> None:
        """The operands of all, dy [T, sum of N] and x [T, K]."""
        given = self._given
        assert given is not None, "the op says which weight it changes"
        if self._target is not None and given.data_ptr() == self._address:
            Sink.consume_together(self._sinks, Product(dy, x), self._target)
            return
        first = 0
        for sink in self._sinks:
            rows = slice(first, first + sink.placement.shape[0])
            with sink.writing_to(given[rows]):
                sink.product(dy[:, rows], x)
            first = rows.stop


def _joint_target(sinks: Sequence[Sink], entries: Sequence[Entry], weight: Tensor) -> Target | None:
    """All weights with their states; None where one launch would not do to each what its own does: where
    something goes by a weight's name (random bits), by a whole weight (the scale of fp8 states) or by its
    group's hyperparameters.
    """
    first = sinks[0]
    if (
        not isinstance(first.rule, LocalStateRule)
        or any(sink.hyper is not first.hyper or sink.hyper_row != first.hyper_row for sink in sinks)
        or any(sink.plan.join or sink.plan.granule is Granule.LAYER for sink in sinks)
        or not _states_move(entries)
    ):
        return None
    states = [_side_by_side(entries, index) for index in range(len(entries[0].states))]
    return make_target(first.rule.epilogue, weight, states)


def _states_move(entries: Sequence[Entry]) -> bool:
    """Whether storage allows one launch for all."""
    codecs = [state.codec for entry in entries for state in entry.states]
    return not (
        any(entry.master is not None or entry.codec is not None for entry in entries)
        or any(codec.stochastic or codec.kind == "tensor" for codec in codecs)
    )


def _side_by_side(entries: Sequence[Entry], index: int) -> Encoded:
    """Move the states of this index side by side: each entry's own then is a part of it."""
    own = [entry.states[index] for entry in entries]
    values, parts = _lay([state.values for state in own])
    scale, scales = None, [None] * len(own)
    if own[0].scale is not None:
        scale, scales = _lay([state.scale for state in own if state.scale is not None])
    for entry, state, part, part_scale in zip(entries, own, parts, scales):
        entry.states[index] = replace(state, values=part, scale=part_scale)
    return StoredState(own[0].slot, own[0].codec, values, scale).local


def _lay(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    together = torch.cat(list(tensors))
    return together, adjacent_parts(together, [len(tensor) for tensor in tensors])
