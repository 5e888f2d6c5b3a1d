"""U from the mean of all replicas' momenta without sending one: its factors are averaged instead.

Dion's compressed exchange (Ahn et al. 2025): B Q and B^T P are linear in B, so their means over replicas are
those of the mean of the B. (m + n) r entries a matrix go over the wire in place of m n. Momenta stay each
replica's own, with the mean that a dense exchange would have left in all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from titanforge.optim.local_update import LocalWeight, split_rows, write_copies
from titanforge.optim.orthonormal import orthonormal
from titanforge.optim.rule import State

Mean = Callable[[Sequence[Tensor]], None]
"""Overwrites tensors with their mean over replicas."""


@runtime_checkable
class FactoredRule(Protocol):
    """A rule of matrices whose U reads the momentum through two products that are linear in it."""

    def rank(self, rows: int, columns: int) -> int: ...
    def sketch(self, m: Tensor, auxiliary: State) -> Tensor: ...
    def projection(self, m: Tensor, p: Tensor) -> Tensor: ...
    def of_factors(
        self, m: Tensor, auxiliary: State, h: Tensor, p: Tensor, r: Tensor
    ) -> tuple[Tensor, Tensor, State]: ...
    def applied(
        self,
        m: Tensor,
        auxiliary: State,
        h: Tensor,
        found: tuple[Tensor, Tensor, State],
        matrix: tuple[int, int] | None = None,
    ) -> tuple[Tensor, State, State]: ...
    def move(self, w: Tensor, update: Tensor, h: Tensor) -> Tensor: ...


def pays(rule: object, rows: int, columns: int) -> bool:
    """Whether the factors of an m x n matrix are smaller than the matrix, for a rule that has any."""
    return isinstance(rule, FactoredRule) and rule.rank(rows, columns) * (rows + columns) < rows * columns


def update_by_factors(rule: FactoredRule, items: Sequence[LocalWeight], h: Tensor, mean: Mean) -> None:
    """U of unsharded weights after A, with the same auxiliary states on all replicas; two calls of `mean`."""
    by_shape: dict[tuple[torch.Size, int], list[LocalWeight]] = defaultdict(list)
    for item in items:
        by_shape[item.weight.shape, item.parts].append(item)
    batches = list(by_shape.values())
    sketches = [rule.sketch(_momenta(batch), _auxiliary(batch)) for batch in batches]
    mean(sketches)
    bases = [orthonormal(sketch) for sketch in sketches]
    projections = [rule.projection(_momenta(batch), p) for batch, p in zip(batches, bases)]
    mean(projections)
    for batch, p, r in zip(batches, bases, projections):
        m, auxiliary = _momenta(batch), _auxiliary(batch)
        found = rule.of_factors(m, auxiliary, h, p, r)
        update, (left,), new_auxiliary = rule.applied(m, auxiliary, h, found)
        weights = [split_rows(item.weight, item.parts) for item in batch]
        _write(weights, rule.move(torch.stack([w.float() for w in weights]), update, h))
        _write([split_rows(item.states[0].values, item.parts) for item in batch], left)
        for index, new in enumerate(new_auxiliary):
            _write([item.auxiliary[index] for item in batch], new)
    write_copies(items)


def _momenta(batch: Sequence[LocalWeight]) -> Tensor:
    return torch.stack([split_rows(item.states[0].values, item.parts).float() for item in batch])


def _auxiliary(batch: Sequence[LocalWeight]) -> State:
    return tuple(torch.stack(tensors) for tensors in zip(*(item.auxiliary for item in batch)))


def _write(targets: Sequence[Tensor], stacked: Tensor) -> None:
    torch._foreach_copy_(list(targets), list(stacked.unbind(0)))  # pyright: ignore[reportPrivateImportUsage]
