"""Which steps may change anything: not those whose loss or gradient is not finite. Decided on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from titanforge.interruption import NonFiniteLoss


class FiniteGuard:
    """Keeps count of steps that are not finite, without making the host wait for the device.

    Args:
        stops: nothing after the first such step is applied either, however late the host looks
            (`training.nonfinite_loss = "stop"`); else each is left out by itself.
        fused: weights change during backward, one by one (`forge.enable`).

    Attributes:
        steps: how many steps were not finite, an int64 scalar on the device.
    """

    def __init__(self, stops: bool, fused: bool, device: torch.device) -> None:
        self._stops, self._fused = stops, fused
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self._first = torch.full((), -1, dtype=torch.int64, device=device)

    def may_apply(self, loss: Tensor) -> Tensor:
        """Device flag before the backward of ``loss``, 1 to apply its gradient."""
        finite = torch.isfinite(loss)
        if self._stops:
            finite &= self._first < 0
        return finite

    def check(self, loss: Tensor, grad_norm: Tensor | None, step: Tensor) -> Tensor:
        """Device flag, 1 to apply the step: equal on all ranks because loss and norm are already reduced.

        Args:
            step: number of this step, an int64 scalar on the device.
        """
        finite = torch.isfinite(loss)
        if grad_norm is not None:
            finite &= torch.isfinite(grad_norm)
        self.steps += ~finite
        first = torch.where(finite, self._first, step)
        self._first.copy_(torch.where(self._first < 0, first, self._first))
        if self._stops:
            finite = self._first < 0
        return finite.to(torch.float32)

    def failure(self) -> NonFiniteLoss | None:
        """What ends the run, if anything does. Waits for the device."""
        if not int(self.steps) or not self._stops:
            return None
        return NonFiniteLoss(
            f"the loss or gradient of step {int(self._first)} is not finite. No weight was "
            f"changed by it{' but fused ones whose own gradient was finite' * self._fused}. Resume from the "
            "last checkpoint with a lower optimizer.lr or another "
            'debug.seed, or set training.nonfinite_loss = "skip" to leave such steps out.'
        )
