"""Cells of `sync_quality.py` that run at the same time, in step with each other, and end in time together.

How many steps fit is known only on the way. So a cell trains at its peak rate until the parent, which sees
all of them, settles the number; the decay is its last part. A cell that is ahead waits for the others: what
it leaves of a GPU is theirs, and all take equally many steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

LEAD = 40
"""Steps that a cell may be ahead of the slowest."""
ENDED = 1 << 62
SETTLE_AT = 0.6
"""Share of the time after which the number of steps is settled: before the decay may begin."""
MARGIN = 0.93
"""Of what the pace so far promises for the rest of the time."""


class Pace:
    """int64 in a file that all processes map: the number of steps, 0 until it is settled; each cell's."""

    def __init__(self, path: Path, cells: int, create: bool = False) -> None:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(8 * (cells + 1)))
        self._all = torch.from_file(str(path), shared=True, size=cells + 1, dtype=torch.int64)

    @property
    def settled(self) -> int:
        return int(self._all[0])

    def settle(self, steps: int) -> None:
        self._all[0] = steps

    @property
    def slowest(self) -> int:
        """Steps of the cell that has taken fewest; `ENDED` when all have ended."""
        return int(self._all[1:].min())

    def note(self, cell: int, step: int) -> None:
        self._all[1 + cell] = step

    def leave(self, cell: int) -> None:
        """This cell takes no more steps; none waits for it."""
        self.note(cell, ENDED)

    def wait(self, cell: int, step: int, end: float) -> None:
        """Until the cell, at this step, is not too far ahead; not after `end` (monotonic)."""
        self.note(cell, step)
        while step > self.slowest + LEAD and time.monotonic() < end:
            time.sleep(0.005)


class Planner:
    """Settles the number of steps from the pace of the slowest cell; to be asked often.

    end: monotonic, when all cells are to have ended. most: greatest number of steps. decay: its last part.
    """

    def __init__(
        self, pace: Pace, end: float, most: int, decay: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pace, self._end, self._most, self._decay, self._clock = pace, end, most, decay, clock
        self._first: tuple[float, int] | None = None
        self._begin = clock()

    def look(self) -> int:
        """The number of steps, 0 as long as it is open."""
        if self._pace.settled:
            return self._pace.settled
        now, slowest = self._clock(), self._pace.slowest
        if slowest == ENDED:
            return 0
        if self._first is None and slowest >= LEAD:  # later than start-up and captures
            self._first = now, slowest
        first = self._first
        # The fastest cell must not have come to where its decay is to begin.
        least = math.ceil((slowest + 2 * LEAD) / (1 - self._decay)) + 1 if self._decay < 1 else self._most
        late = now >= self._begin + SETTLE_AT * (self._end - self._begin)
        if least >= self._most:
            self._pace.settle(self._most)
        elif late and first is not None and now > first[0]:
            rate = (slowest - first[1]) / (now - first[0])
            fits = slowest + int(MARGIN * rate * (self._end - now))
            self._pace.settle(min(self._most, max(least, fits)))
        return self._pace.settled
