"""Time left, from the wall clock of the steps done."""

from __future__ import annotations


class EtaEstimator:
    """Seconds per step as an exponential average over log intervals, evaluations and saves included.

    The first interval of a process holds compilation and warm-up, so it counts only until there is a second.

    Args:
        total_steps: the last step of the run.
        decay: weight of the past at each new interval.
    """

    def __init__(self, total_steps: int, decay: float = 0.8) -> None:
        self.total_steps = total_steps
        self.decay = decay
        self._seconds_per_step: float | None = None
        self._intervals = 0

    def update(self, step: int, steps: int, seconds: float) -> float | None:
        """``steps`` more steps took ``seconds``; returns the seconds left after ``step``, None if unknown."""
        if steps > 0:
            current = seconds / steps
            if self._seconds_per_step is None or self._intervals == 1:
                self._seconds_per_step = current
            else:
                self._seconds_per_step = self.decay * self._seconds_per_step + (1 - self.decay) * current
            self._intervals += 1
        if self._seconds_per_step is None:
            return None
        return max(0, self.total_steps - step) * self._seconds_per_step
