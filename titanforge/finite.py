"""Which steps may change anything: not those whose loss or gradient is not finite. Decided on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titanforge.interruption import NonFiniteLoss


class FiniteGuard:
    """Keeps count of steps that are not finite, without making the host wait for the device.

    Args:
        stops: nothing after the first such step is applied either, however late the host looks
            (`training.nonfinite_loss = "stop"`); else each is left out by itself.
        fused: weights change during backward, one by one (`forge.enable`).
        replicas: how many there are.

    Replicas that train by themselves leave a step out each for itself, and tell the others of it in `share`.

    Attributes:
        steps: how many steps were not finite, one that a replica took by itself counted as one, as far as was
            shared; an int64 scalar on the device.
    """

    def __init__(self, stops: bool, fused: bool, device: torch.device, replicas: int = 1) -> None:
        self._stops, self._fused, self._replicas = stops, fused, replicas
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self._of_replicas = torch.zeros_like(self.steps)  # those of them that replicas took by themselves
        self._first = torch.full((), -1, dtype=torch.int64, device=device)
        self._own = torch.zeros_like(self.steps)  # of this replica alone, not shared yet
        self._untold = self._were_alone = False

    @property
    def skipped(self) -> Tensor:
        """The same in steps of the whole run, which a replica's own is a part of; a scalar on the device."""
        if not self._were_alone:
            return self.steps
        return self.steps - self._of_replicas + self._of_replicas / self._replicas

    def may_apply(self, loss: Tensor) -> Tensor:
        """Device flag before the backward of ``loss``, 1 to apply its gradient."""
        finite = torch.isfinite(loss)
        if self._stops:
            finite &= self._first < 0
        return finite

    def check(self, loss: Tensor, grad_norm: Tensor | None, step: Tensor, alone: bool = False) -> Tensor:
        """Device flag, 1 to apply the step: equal on all ranks because loss and norm are already reduced.

        Args:
            step: number of this step, an int64 scalar on the device.
            alone: they are reduced over this replica, and the flag is its own; for all replicas or none.
        """
        finite = torch.isfinite(loss)
        if grad_norm is not None:
            finite &= torch.isfinite(grad_norm)
        (self._own if alone else self.steps).add_(~finite)
        self._untold |= alone
        self._were_alone |= alone
        first = torch.where(finite, self._first, step)
        self._first.copy_(torch.where(self._first < 0, first, self._first))
        if self._stops:
            finite = self._first < 0
        return finite.to(torch.float32)

    def share(self, replica: int, replicas: int, reduce: Callable[[Tensor], object]) -> None:
        """Let all replicas know of each other's steps; nothing if none was taken alone since the last call.

        Args:
            reduce: sums an int64 tensor on the device over the replicas, in place.
        """
        if self._untold:
            told = self.told(replica, replicas)
            reduce(told)
            self.heard(told)

    def told(self, replica: int, replicas: int) -> Tensor:
        """What this replica has to tell: int64 [1 + replicas], to be summed over them and for `heard`."""
        told = self.steps.new_zeros(1 + replicas)
        told[0] = self._own
        told[1 + replica] = self._first + 1
        return told

    def heard(self, told: Tensor) -> None:
        """Take over the sum of what was told."""
        self._untold = False
        self.steps += told[0]
        self._of_replicas += told[0]
        self._own.zero_()
        never = torch.iinfo(torch.int64).max
        first = torch.where(told[1:] > 0, told[1:] - 1, never).min()
        self._first.copy_(torch.where(first == never, -1, first))

    def failure(self) -> NonFiniteLoss | None:
        """What ends the run, if anything does. Waits for the device."""
        if not int(self.steps) or not self._stops:
            return None
        whose = " of its replica" if self._were_alone else ""
        but = " but fused ones whose own gradient was finite" if self._fused else ""
        return NonFiniteLoss(
            f"the loss or gradient of step {int(self._first)} is not finite. No weight{whose} was changed by "
            f"it{but}. Resume from the last checkpoint with a lower optimizer.lr or another debug.seed, or "
            'set training.nonfinite_loss = "skip" to leave such steps out.'
        )
