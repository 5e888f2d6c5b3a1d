"""What an exactness gate is, and the list of them.

A gate is a function of the world that yields readings. Adding one takes its decorator:

    @gate("PP", at_least(2))
    def pipeline(world: World) -> Iterator[Reading]:
        yield Reading("1f1b against one rank: losses apart", gap, 1e-5)

Every rank runs it; a reading counts with its largest value over the ranks. Modules of gates are named in
`scripts/gates.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from titanforge.parallelisms import Runtime


@dataclass(frozen=True)
class Reading:
    """One figure and what it may be at most. NaN passes nothing.

    paper: what the FORGE paper (appendix L, world size 2) reports for the gate, if it does.
    """

    what: str
    value: float
    tolerance: float
    paper: float | None = None

    @property
    def passed(self) -> bool:
        return self.value <= self.tolerance


@dataclass(frozen=True)
class World:
    """The ranks and the device that gates run on. full: sizes of the papers where they are larger."""

    runtime: Runtime
    full: bool = False

    @property
    def size(self) -> int:
        return self.runtime.world_size

    @property
    def rank(self) -> int:
        return self.runtime.rank

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


Needs = Callable[[World], str]
"""Why a world cannot run a gate; empty if it can."""
Body = Callable[[World], Iterator[Reading]]


@dataclass(frozen=True)
class Gate:
    """A name as in the FORGE paper's appendix L where it has one, and its check."""

    name: str
    needs: Needs
    run: Body

    @property
    def about(self) -> str:
        """The first line of the check's documentation."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]


GATES: dict[str, Gate] = {}


def gate(name: str, needs: Needs | None = None) -> Callable[[Body], Body]:
    """Enter a check into the list. Raises ValueError if the name is taken."""

    def enter(run: Body) -> Body:
        if name in GATES:
            raise ValueError(f"two gates are called {name!r}")
        GATES[name] = Gate(name, needs or (lambda _: ""), run)
        return run

    return enter


def at_least(ranks: int) -> Needs:
    """A gate that takes so many ranks or more."""
    return lambda world: "" if world.size >= ranks else f"needs {ranks} ranks, {world.size} started"


def multiple_of(ranks: int) -> Needs:
    """A gate that takes a multiple of so many ranks."""

    def needs(world: World) -> str:
        if world.size % ranks == 0:
            return ""
        return f"needs a multiple of {ranks} ranks, {world.size} started"

    return needs
