"""Updates of local tensors in plain torch and through the multi-tensor kernels.

Everything here works in place on local (never distributed) tensors. Arithmetic is fp32 whatever the storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titanforge.optim.rule import LocalStateRule, StateGlobalRule, UpdateRule

# An unfused chain of operations over whole tensors would go to memory at every one of them; chunks of this
# many elements stay in cache. Smaller ones lose more to the dispatch of each operation (measured).
_CHUNK = 1 << 17
# Largest stack of same-shape matrices updated in one batch, per stacked tensor.
_BATCH_BYTES = 256 * 2**20


@dataclass
class LocalWeight:
    """One weight's local tensors for a step; `gradient` None stands for zeros."""

    weight: Tensor
    gradient: Tensor | None
    states: tuple[Tensor, ...]

    def gradient_or_zeros(self) -> Tensor:
        if self.gradient is not None:
            return self.gradient
        return torch.zeros((), device=self.weight.device).expand(self.weight.shape)


def update_elementwise(rule: LocalStateRule, items: Sequence[LocalWeight], h: Tensor) -> None:
    """A rule's elementwise part, chunk by chunk so that the temporaries stay in cache."""
    for item in items:
        gradient = item.gradient_or_zeros()
        tensors = (item.weight, *item.states)
        flat = all(t.is_contiguous() for t in tensors) and (item.gradient is None or gradient.is_contiguous())
        if not flat or item.weight.device.type != "cpu":
            _update_chunk(rule, gradient, tensors, h)
            continue
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


def update_state_global(rule: StateGlobalRule, items: Sequence[LocalWeight], h: Tensor) -> None:
    """U of a regime-2 rule, after A has run; same-shape matrices together."""
    for batch in _batches(items):
        weights = _stack([item.weight for item in batch])
        states = _stack_states(batch)
        gradients = _stack([item.gradient_or_zeros() for item in batch]) if rule.u_reads_gradient else None
        _unstack_into([item.weight for item in batch], rule.weight_update(weights, states, h, gradients))


def update_layers(rule: UpdateRule, items: Sequence[LocalWeight], h: Tensor) -> None:
    """A and U of a regime-3 rule, whole layers at a time; same-shape matrices together."""
    for batch in _batches(items):
        weights = _stack([item.weight for item in batch])
        gradients = _stack([item.gradient_or_zeros() for item in batch])
        new_weights, new_states = rule.update(gradients, weights, _stack_states(batch), h)
        _unstack_into([item.weight for item in batch], new_weights)
        for index, new in enumerate(new_states):
            _unstack_into([item.states[index] for item in batch], new)


def _batches(items: Sequence[LocalWeight]) -> Iterator[list[LocalWeight]]:
    """Items to update together: matrices of one shape, up to a size; anything else alone."""
    by_shape: dict[torch.Size, list[LocalWeight]] = defaultdict(list)
    for item in items:
        if item.weight.numel() == 0:
            continue
        if item.weight.dim() == 2:
            by_shape[item.weight.shape].append(item)
        else:
            # A stack of vectors would read as a matrix, and experts are a batch already.
            yield [item]
    for shape, group in by_shape.items():
        size = max(1, _BATCH_BYTES // (4 * shape.numel()))
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """fp32; a lone tensor keeps its dims."""
    return tensors[0].float() if len(tensors) == 1 else torch.stack([t.float() for t in tensors])


def _stack_states(batch: Sequence[LocalWeight]) -> tuple[Tensor, ...]:
    return tuple(_stack([item.states[index] for item in batch]) for index in range(len(batch[0].states)))


def _unstack_into(targets: Sequence[Tensor], result: Tensor) -> None:
    if len(targets) == 1:
        targets[0].copy_(result)
    else:
        torch._foreach_copy_(list(targets), list(result.unbind(0)))  # pyright: ignore[reportPrivateImportUsage]
