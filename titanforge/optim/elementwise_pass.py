"""The elementwise pass of one family of weights, prepared once for all steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor

from titanforge.kernels._triton import runs_triton
from titanforge.kernels.flat_plan import FlatPlan
from titanforge.optim.local_update import (
    LocalWeight,
    dense_gradient,
    kernel_arguments,
    update_elementwise,
)
from titanforge.optim.rule import LocalStateRule


class ElementwisePass:
    """`update_elementwise`, whose launches are made ready at the first call.

    They hold as long as the items are the same objects, whose tensors do not move; only gradients may.
    """

    def __init__(self) -> None:
        self._items: list[LocalWeight] = []
        self._plan: FlatPlan | None = None

    def __call__(
        self,
        rule: LocalStateRule,
        items: Sequence[LocalWeight],
        hyper: Tensor,
        rng: Tensor,
        nonfinite: Tensor,
    ) -> None:
        if not runs_triton(items[0].weight):
            update_elementwise(rule, items, hyper, rng, nonfinite)
            return
        same = len(items) == len(self._items) and all(map(operator.is_, items, self._items))
        if self._plan is None or not same:
            weights, states, masters, rows, ids = kernel_arguments(rule, items)
            squares = [item.squares for item in items if item.squares is not None]
            self._plan = FlatPlan(rule.epilogue, weights, states, masters, rows, ids, squares or None)
            self._items = list(items)
        self._plan([dense_gradient(item) for item in items], hyper, rng, nonfinite)
