"""Python's garbage collector on a schedule, so that no rank stops for it in the middle of a step."""

from __future__ import annotations

import gc


class GarbageCollector:
    """Switches automatic collection off and collects every ``gc_freq`` steps, on all ranks at the same step.

    A rank that collects when its own counters say so makes every other rank wait in the next
    collective. What is alive at construction (model, states, compiled code) is frozen out of the
    collector, which keeps a full collection to about a millisecond: build this last.

    Args:
        gc_freq: steps between collections, at least 1.

    Raises:
        ValueError: ``gc_freq`` is below 1.
    """

    def __init__(self, gc_freq: int) -> None:
        if gc_freq < 1:
            raise ValueError(
                f"training.gc_freq = {gc_freq}: must be at least 1 (a large number means almost never)"
            )
        self.gc_freq = gc_freq
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()

    def run(self, step: int) -> bool:
        """Call once a step with the step's number; True when it collected."""
        if step % self.gc_freq:
            return False
        gc.collect()
        return True

    def close(self) -> None:
        """Give the process its automatic collection back."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
