"""The hyperparameters of a step on the device, indexed by the number of steps that were really applied.

A step with a non-finite loss changes nothing, and the host learns of it only later. Bias corrections must
count applied steps, so the count lives on the device. They are still computed on the host, in float64: a
window of rows, one per coming count, is uploaded at once, and each step selects its row on the device. The
host reads the count back once per window. A row depends on its absolute count alone, so a resumed run uses
the same numbers as one that never stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titanforge.optim.rule import UpdateRule

_APPLY, _LR, _GRAD_SCALE = 0, 1, 3


@dataclass
class _Family:
    """The groups of one rule. rows: [window, groups, H]; current: [1, groups, H]; lr: [groups]."""

    rule: UpdateRule
    options: list[Mapping[str, float]]
    rows: Tensor
    current: Tensor
    lr: Tensor
    uploaded: list[float] | None = None


class HyperTable:
    """One hyperparameter vector per group, those of one rule together.

    families: each rule with the options of its groups.
    count: int64 scalar on the device, applied steps so far. Its storage is stable: checkpoints load into it
    (`invalidate` afterwards), and a captured graph may read it.
    """

    def __init__(
        self,
        families: Sequence[tuple[UpdateRule, Sequence[Mapping[str, float]]]],
        device: torch.device,
        window: int = 512,
    ) -> None:
        self._window = window
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._base = torch.zeros((), dtype=torch.int64, device=device)
        self._families = []
        for rule, options in families:
            groups, length = len(options), len(rule.hyper_names)
            rows = torch.zeros((window, groups, length), device=device)
            current = torch.zeros((1, groups, length), device=device)
            lr = torch.zeros(groups, device=device)
            self._families.append(_Family(rule, list(options), rows, current, lr))
        self._steps_left = 0

    def tables(self) -> list[Tensor]:
        """Per family fp32 [groups, H]: views of storage that never moves."""
        return [family.current[0] for family in self._families]

    def invalidate(self) -> None:
        """The count was set from outside: compute the rows anew before the next step."""
        self._steps_left = 0

    def prepare(self, lrs: Sequence[Sequence[float]]) -> None:
        """Host side of a step: upload what changed. Not to be captured in a graph.

        lrs: the learning rates of each family's groups.
        """
        if self._steps_left == 0:
            self._refill()
        self._steps_left -= 1
        for family, values in zip(self._families, lrs):
            if list(values) != family.uploaded:
                family.uploaded = list(values)
                family.lr.copy_(torch.tensor(family.uploaded), non_blocking=True)

    def _refill(self) -> None:
        base = int(self.count)  # waits for the device, once per window
        for family in self._families:
            rows = torch.tensor(
                [
                    [family.rule.hyperparameters(options, base + 1 + row) for options in family.options]
                    for row in range(self._window)
                ],
                dtype=torch.float64,
            )
            family.rows.copy_(rows)
        self._base.fill_(base)
        self._steps_left = self._window

    def select(self, apply_flag: Tensor | None, grad_scale: Tensor | None) -> None:
        """Device side, before the update: the row of the coming applied step, with this step's values."""
        row = (self.count - self._base).view(1)
        for family in self._families:
            torch.index_select(family.rows, 0, row, out=family.current)
            family.current[0, :, _LR] = family.lr
            if apply_flag is not None:
                family.current[0, :, _APPLY] = apply_flag.to(torch.float32)
            if grad_scale is not None:
                family.current[0, :, _GRAD_SCALE] = grad_scale.to(torch.float32)

    @contextlib.contextmanager
    def only_if(self, condition: Tensor) -> Iterator[None]:
        """What is launched inside is applied where the step is and `condition`, a scalar on the device, is
        not 0; it is launches only. The selected rows are again as they were after it."""
        kept = self._families[0].current[0, 0, _APPLY].clone()
        applied = kept * (condition != 0)
        for family in self._families:
            family.current[0, :, _APPLY] = applied
        try:
            yield
        finally:
            for family in self._families:
                family.current[0, :, _APPLY] = kept

    def move_to(self, count: int) -> None:
        """Set the count; where a row was selected, the one of the new count takes its place."""
        first = self._families[0].current[0, 0]
        apply_flag, grad_scale = first[_APPLY].clone(), first[_GRAD_SCALE].clone()
        self.count.fill_(count)
        self._refill()
        self._steps_left -= 1  # of the step under way, if one is
        self.select(apply_flag, grad_scale)

    def advance(self, apply_flag: Tensor | None) -> None:
        """Device side, after the update: count the step if it was applied."""
        if apply_flag is None:
            self.count += 1
        else:
            self.count += (apply_flag != 0).to(torch.int64)
