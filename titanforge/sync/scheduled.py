"""Replicas synchronise every so many steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from titanforge.sync.local_steps import LocalSteps


class Scheduled(LocalSteps):
    """interval - 1 local steps, in which the policy exchanges nothing at all, then a sync. A forced sync (a
    checkpoint) starts the count anew."""

    name = "scheduled"

    def __init__(self, interval: int, **options: Any) -> None:
        super().__init__(**options)
        if interval < 1:
            raise ValueError(f"sync.interval = {interval}: must be at least 1")
        self.interval = interval

    def wants_sync(self, apply_flag: Tensor | None = None, attention: bool = False) -> bool:
        return self.will_sync()

    def will_sync(self) -> bool:
        return self.local_steps + 1 >= self.interval
