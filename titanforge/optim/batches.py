"""Weights that a rule updates together, and what is found out about them once for all steps."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from titanforge.optim.local_update import LocalWeight

# Largest stack of same-shape matrices updated in one batch, per stacked tensor.
BATCH_BYTES = 256 * 2**20

T = TypeVar("T")


class Batch(list["LocalWeight"]):
    """Weights of one shape, whose tensors do not move; only gradients may."""

    def __init__(self, items: Sequence[LocalWeight]) -> None:
        super().__init__(items)
        self._known: dict[str, Any] = {}

    def once(self, key: str, find: Callable[[], T]) -> T:
        """What `find` returned when it was first asked for."""
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]


class BatchList:
    """The batches of a list of items, made anew only when the list holds other objects."""

    def __init__(self) -> None:
        self._items: list[LocalWeight] = []
        self._batches: list[Batch] = []

    def of(self, items: Sequence[LocalWeight], most: int = BATCH_BYTES) -> list[Batch]:
        """most: as of `batches`, always the same."""
        if len(items) != len(self._items) or not all(map(operator.is_, items, self._items)):
            self._items, self._batches = list(items), list(batches(items, most))
        return self._batches


def batches(items: Sequence[LocalWeight], most: int = BATCH_BYTES) -> Iterator[Batch]:
    """Items to update together: matrices of one shape, up to `most` bytes as fp32; anything else alone."""
    by_shape: dict[tuple, list[LocalWeight]] = defaultdict(list)
    for item in items:
        if item.weight.numel() == 0:
            continue
        if item.weight.dim() == 2:
            by_shape[item.weight.shape, item.parts, item.matrix].append(item)
        else:
            # A stack of vectors would read as a matrix, and experts are a batch already.
            yield Batch([item])
    for group in by_shape.values():
        size = max(1, most // (4 * group[0].weight.numel()))
        for start in range(0, len(group), size):
            yield Batch(group[start : start + size])
