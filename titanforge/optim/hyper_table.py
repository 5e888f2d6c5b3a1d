"""The hyperparameters of a step on the device, indexed by the number of steps that were really applied.

A step with a non-finite loss changes nothing, and the host learns of it only later. Bias corrections must
count applied steps, so the count lives on the device. They are still computed on the host, in float64: a
window of rows, one per coming count, is uploaded at once, and each step selects its row on the device. The
host reads the count back once per window. A row depends on its absolute count alone, so a resumed run uses
the same numbers as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titanforge.optim.rule import UpdateRule

_APPLY, _LR, _GRAD_SCALE = 0, 1, 3


class HyperTable:
    """One hyperparameter vector per group.

    count: int64 scalar on the device, applied steps so far. Its storage is stable: checkpoints load into it
    (`invalidate` afterwards), and a captured graph may read it.
    """

    def __init__(
        self,
        groups: Sequence[tuple[UpdateRule, Mapping[str, float]]],
        device: torch.device,
        window: int = 512,
    ) -> None:
        self._groups = list(groups)
        self._window = window
        self._lengths = [len(rule.hyper_names) for rule, _ in self._groups]
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._base = torch.zeros((), dtype=torch.int64, device=device)
        shape = (1, len(self._groups), max(self._lengths))
        self._rows = torch.zeros((window, *shape[1:]), device=device)
        self._current = torch.zeros(shape, device=device)
        self._lr = torch.zeros(len(self._groups), device=device)
        self._uploaded_lrs: list[float] | None = None
        self._steps_left = 0

    def vectors(self) -> list[Tensor]:
        """Each group's vector, fp32; views of storage that never moves."""
        return [self._current[0, index, :length] for index, length in enumerate(self._lengths)]

    def invalidate(self) -> None:
        """The count was set from outside: compute the rows anew before the next step."""
        self._steps_left = 0

    def prepare(self, lrs: Sequence[float]) -> None:
        """Host side of a step: upload what changed. Not to be captured in a graph."""
        if self._steps_left == 0:
            self._refill()
        self._steps_left -= 1
        lrs = list(lrs)
        if lrs != self._uploaded_lrs:
            self._lr.copy_(torch.tensor(lrs), non_blocking=True)
            self._uploaded_lrs = lrs

    def _refill(self) -> None:
        base = int(self.count)  # waits for the device, once per window
        width = self._rows.shape[-1]
        rows = torch.zeros((self._window, len(self._groups), width), dtype=torch.float64)
        for index, (rule, options) in enumerate(self._groups):
            values = [rule.hyperparameters(options, base + 1 + row) for row in range(self._window)]
            rows[:, index, : self._lengths[index]] = torch.tensor(values, dtype=torch.float64)
        self._rows.copy_(rows)
        self._base.fill_(base)
        self._steps_left = self._window

    def select(self, apply_flag: Tensor | None, grad_scale: Tensor | None) -> None:
        """Device side, before the update: the row of the coming applied step, with this step's values."""
        row = (self.count - self._base).view(1)
        torch.index_select(self._rows, 0, row, out=self._current)
        self._current[0, :, _LR] = self._lr
        if apply_flag is not None:
            self._current[0, :, _APPLY] = apply_flag.to(torch.float32)
        if grad_scale is not None:
            self._current[0, :, _GRAD_SCALE] = grad_scale.to(torch.float32)

    def advance(self, apply_flag: Tensor | None) -> None:
        """Device side, after the update: count the step if it was applied."""
        if apply_flag is None:
            self.count += 1
        else:
            self.count += (apply_flag != 0).to(torch.int64)
