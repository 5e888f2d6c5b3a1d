"""Updates of local tensors in plain torch and through the multi-tensor kernels.

Everything here works in place on local (never distributed) tensors. Arithmetic is fp32 whatever the storage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from titanforge.kernels._triton import runs_triton
from titanforge.kernels.codecs import Codec, Encoded, decode
from titanforge.kernels.flat import flat_update
from titanforge.optim.batches import BatchList, batches
from titanforge.optim.rule import LocalStateRule, StateGlobalRule, UpdateRule

# An unfused chain of operations over whole tensors would go to memory at every one of them; chunks of this
# many elements stay in cache. Smaller ones lose more to the dispatch of each operation (measured).
_CHUNK = 1 << 17


@runtime_checkable
class HasWeightUpdate(Protocol):
    """An elementwise rule whose U can be taken by itself."""

    def weight_update(self, w: Tensor, state: tuple[Tensor, ...], h: Tensor) -> Tensor: ...


@dataclass
class LocalWeight:
    """One weight's local tensors for a step.

    weight: what the rule updates: the weight, or its fp32 master. copy: then the weight itself, else None.
    gradient: None stands for zeros. codec: how the weight is stored where not plainly. hyper_row: its group's
    row. auxiliary: states that only U knows. parts: matrices of equal height that the weight is made of, one
    below the other (a fused QKV, heads); U takes each by itself. matrix: m, n of a whole matrix where this
    rank has a part of it. factored: whether replicas may average the momentum by its factors
    (`replica_factors`). squares: fp32 scalar that A's kernel fills with the momentum's sum of squares.
    """

    weight: Tensor
    gradient: Tensor | None
    states: tuple[Encoded, ...]
    copy: Tensor | None = None
    codec: Codec | None = None
    tensor_id: int = 0
    hyper_row: int = 0
    auxiliary: tuple[Tensor, ...] = ()
    parts: int = 1
    matrix: tuple[int, int] | None = None
    factored: bool = False
    squares: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every tensor is stored as floats that stand for themselves, rounded to nearest."""
        return self.codec is None and all(
            state.codec.kind == "plain" and not state.codec.stochastic for state in self.states
        )

    def gradient_or_zeros(self) -> Tensor:
        if self.gradient is not None:
            return self.gradient
        return torch.zeros((), device=self.weight.device).expand(self.weight.shape)


def update_elementwise(
    rule: LocalStateRule,
    items: Sequence[LocalWeight],
    hyper: Tensor,
    rng: Tensor,
    nonfinite: Tensor,
    observe: bool = False,
) -> None:
    """A rule's elementwise part: all of it in regime 1, the state update in regime 2.

    hyper: [groups, H], of which each item has a row. rng: int64 (seed, step) for stochastic rounding.
    nonfinite: int32 [1], counts the tiles that kernels left out because their gradient was not finite.
    observe: write nothing, only note the magnitudes that fp8 states would have.
    """
    if observe or runs_triton(items[0].weight) or not all(item.is_plain for item in items):
        weights, states, masters, rows, ids = kernel_arguments(rule, items)
        flat_update(
            rule.epilogue,
            weights,
            [dense_gradient(item) for item in items],
            states,
            hyper,
            masters=masters,
            hyper_rows=rows,
            rng=rng,
            tensor_ids=ids,
            nonfinite=nonfinite,
            observe=observe,
        )
        return
    for item in items:
        _update_in_chunks(rule, item, hyper[item.hyper_row])
    write_copies(items)


def write_copies(items: Sequence[LocalWeight]) -> None:
    """The weights behind fp32 masters, rounded to nearest."""
    pairs = [(item.copy, item.weight) for item in items if item.copy is not None]
    if pairs:
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            [copy for copy, _ in pairs], [master for _, master in pairs]
        )


def _stored_weight(item: LocalWeight) -> Tensor | Encoded:
    weight = item.weight if item.copy is None else item.copy
    return weight if item.codec is None else Encoded(weight, item.codec)


def kernel_arguments(
    rule: LocalStateRule, items: Sequence[LocalWeight]
) -> tuple[list[Tensor | Encoded], list[tuple[Encoded, ...]], list[Tensor | None], list[int], list[int]]:
    """What kernels take of these weights: stored weights, states, masters, rows and ids."""
    with_master = rule.epilogue.updates_weight
    return (
        [_stored_weight(item) for item in items],
        [item.states for item in items],
        [item.weight if item.copy is not None and with_master else None for item in items],
        [item.hyper_row for item in items],
        [item.tensor_id for item in items],
    )


def dense_gradient(item: LocalWeight) -> Tensor:
    return torch.zeros_like(item.weight) if item.gradient is None else item.gradient


def _update_in_chunks(rule: LocalStateRule, item: LocalWeight, h: Tensor) -> None:
    """The plain-torch update, chunk by chunk so that the temporaries stay in cache."""
    gradient = item.gradient_or_zeros()
    tensors = (item.weight, *(state.values for state in item.states))
    flat = all(t.is_contiguous() for t in tensors) and (item.gradient is None or gradient.is_contiguous())
    if not flat:
        _update_chunk(rule, gradient, tensors, h)
        return
    total = item.weight.numel()
    gradient = gradient.reshape(-1) if item.gradient is not None else gradient.new_zeros(()).expand(total)
    flattened = [t.view(-1) for t in tensors]
    for start in range(0, total, _CHUNK):
        size = min(_CHUNK, total - start)
        chunk = tuple(t.narrow(0, start, size) for t in flattened)
        _update_chunk(rule, gradient.narrow(0, start, size), chunk, h)


def _update_chunk(rule: LocalStateRule, gradient: Tensor, tensors: tuple[Tensor, ...], h: Tensor) -> None:
    results = rule.reference(gradient.float(), *(t.float() for t in tensors), h)
    for tensor, result in zip(tensors, results):
        if result is not tensor:
            tensor.copy_(result)


def accumulate_states(rule: LocalStateRule, item: LocalWeight, h: Tensor) -> None:
    """A alone of an elementwise rule: its states, the weight read and left as it is."""
    states = [state.values for state in item.states]
    _, *new_states = rule.reference(
        item.gradient_or_zeros().float(), item.weight.float(), *(state.float() for state in states), h
    )
    for state, new in zip(states, new_states):
        state.copy_(new)


def update_weight_alone(rule: UpdateRule, item: LocalWeight, h: Tensor) -> None:
    """U alone of an elementwise rule that has a `weight_update`, after `accumulate_states`."""
    assert isinstance(rule, HasWeightUpdate)
    state = tuple(state.values.float() for state in item.states)
    item.weight.copy_(rule.weight_update(item.weight.float(), state, h))


def update_in_one_pass(
    rule: StateGlobalRule,
    items: Sequence[LocalWeight],
    hyper: Tensor,
    nonfinite: Tensor,
    batch_lists: dict[int, BatchList],
) -> list[LocalWeight]:
    """A and U of the weights that the rule takes whole steps of (`step_in_place`); returns the others.

    hyper, nonfinite: as of `update_elementwise`. batch_lists: by row of hyper, of these items.
    """
    if not rule.whole_steps or not runs_triton(items[0].weight):
        return list(items)
    left = []
    for row in range(len(hyper)):
        members = [item for item in items if item.hyper_row == row]
        for batch in batch_lists.setdefault(row, BatchList()).of(members, sys.maxsize):
            if not rule.step_in_place(batch, hyper[row], nonfinite):
                left += batch
    return left


def update_state_global(
    rule: StateGlobalRule,
    items: Sequence[LocalWeight],
    h: Tensor,
    rng: Tensor | None = None,
    nonfinite: Tensor | None = None,
    batch_list: BatchList | None = None,
) -> None:
    """U of a regime-2 rule, after A has run; same-shape matrices together.

    rng, nonfinite: as for `update_elementwise`; for weights that are rounded at random. batch_list: of these
    items, where they stay the same from step to step.
    """
    for batch in (batch_list or BatchList()).of(items, rule.batch_bytes):
        if batch[0].codec is not None:
            move_at_random(batch, *rule.step_to_round(batch), h, rng, nonfinite)
            continue
        if runs_triton(batch[0].weight) and rule.update_in_place(batch, h):
            continue  # copies too
        weights = [split_rows(item.weight, item.parts) for item in batch]
        states = [
            [split_rows(item.states[index].values, item.parts) for item in batch]
            for index in range(len(batch[0].states))
        ]
        auxiliary = [list(tensors) for tensors in zip(*(item.auxiliary for item in batch))]
        gradients = None
        if rule.u_reads_gradient:
            gradients = _stack([split_rows(item.gradient_or_zeros(), item.parts) for item in batch])
        # A quantised state is read here and never written: `Recipe` refuses it where U writes.
        decoded = tuple(
            _stack([split_rows(decode(item.states[index]), item.parts) for item in batch])
            for index in range(len(states))
        )
        new_weights, new_states, new_auxiliary = rule.whole_update(
            _stack(weights),
            decoded,
            tuple(_stack_as_stored(tensors) for tensors in auxiliary),
            h,
            gradients,
            batch[0].matrix,
        )
        _unstack_into(weights, new_weights)
        if rule.u_writes_state:
            for targets, new in zip(states, new_states):
                _unstack_into(targets, new)
        for targets, new in zip(auxiliary, new_auxiliary):
            _unstack_into(targets, new)
        write_copies(batch)


def move_at_random(
    items: Sequence[LocalWeight],
    directions: Tensor,
    scale: float,
    h: Tensor,
    rng: Tensor | None,
    nonfinite: Tensor | None,
) -> None:
    """w <- w - lr (s O + wd w), rounded at random: the update of plain gradient descent along O.

    directions: O, of the weights one after the other. scale: s. h: of the rule that made O.
    """
    step = h[:4].clone()
    step[3:4].fill_(scale)  # an assignment would copy from the host, which a captured step cannot
    flat_update(
        "sgd",
        [_stored_weight(item) for item in items],
        list(directions.view(len(items), *items[0].weight.shape).unbind(0)),
        [()] * len(items),
        step,
        rng=rng,
        tensor_ids=[item.tensor_id for item in items],
        nonfinite=nonfinite,
    )


def split_rows(tensor: Tensor, parts: int) -> Tensor:
    """[m, n] as [parts, m / parts, n], a view."""
    return tensor if parts == 1 else tensor.unflatten(-2, (parts, -1))


def update_layers(rule: UpdateRule, items: Sequence[LocalWeight], h: Tensor) -> None:
    """A and U of a regime-3 rule, whole layers at a time; on a CPU same-shape matrices together."""
    if items and items[0].weight.is_cuda:
        # Here, as it imports this module.
        from titanforge.optim.compiled import update_layer_in_place

        for item in items:
            if item.weight.numel():
                update_layer_in_place(rule, item, h)
        write_copies(items)
        return
    for batch in batches(items):
        weights = _stack([item.weight for item in batch])
        gradients = _stack([item.gradient_or_zeros() for item in batch])
        new_weights, new_states = rule.update(gradients, weights, _stack_states(batch), h)
        _unstack_into([item.weight for item in batch], new_weights)
        for index, new in enumerate(new_states):
            _unstack_into([item.states[index].values for item in batch], new)
    write_copies(items)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """fp32; a lone tensor keeps its dims."""
    return tensors[0].float() if len(tensors) == 1 else torch.stack([t.float() for t in tensors])


def _stack_as_stored(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))


def _stack_states(batch: Sequence[LocalWeight]) -> tuple[Tensor, ...]:
    slots = range(len(batch[0].states))
    return tuple(_stack([decode(item.states[index]) for item in batch]) for index in slots)


def _unstack_into(targets: Sequence[Tensor], result: Tensor) -> None:
    if len(targets) == 1:
        targets[0].copy_(result)
    else:
        torch._foreach_copy_(list(targets), list(result.unbind(0)))  # pyright: ignore[reportPrivateImportUsage]
