"""U of fused weights under rules of regime 2: block by block during backward, each as soon as all of its
states are complete.

A has then just written those states, and same-shape matrices of a block go together; what the update needs
beside weights and states is the room of one block's batches, which the allocator hands to the next. U of a
block that backward does not complete runs at the end of the step, over the same batches: the bits are the
same. These are:

- weights that are consumed as ranks hand over their summed gradient, whose states may be gathered;
- under Dobb, in steps that refresh its bases: they are complete only after backward;
- weights of which a compiled graph has handed a copy, that it will write back;
- what no token has reached, and a head that takes its loss a chunk of rows at a time.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titanforge.forge.sinks import Clock, Sink
from titanforge.optim.batches import BatchList
from titanforge.optim.dobb.capture import BasisKeeper
from titanforge.optim.entries import Entry
from titanforge.optim.local_update import update_state_global
from titanforge.optim.rule import StateGlobalRule

_BLOCK = re.compile(r"(.*?(?:^|\.)\d+)\.")


def block_of(name: str) -> str:
    """What a weight is updated with: the block that its name numbers (`layers.3`), else its module."""
    numbered = _BLOCK.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0]


@dataclass(eq=False)
class Block:
    """Weights of one rule and one row of hyperparameters that take U together.

    h: the row, on the device. waiting: names whose states this step has not completed. done: U has run.
    """

    rule: StateGlobalRule
    h: Tensor
    entries: list[Entry] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    done: bool = False
    _batches: BatchList = field(default_factory=BatchList)

    def begin(self) -> None:
        """A step starts."""
        self.waiting = {entry.name for entry in self.entries}
        self.done = False

    @torch.no_grad()
    def update(self, clock: Clock) -> None:
        """U, once in a step. The host does not wait for the device."""
        if self.done:
            return
        self.done = True
        items = [item for entry in self.entries if (item := entry.current()).weight.numel()]
        # Backward may be called under autocast, which is for the model's products.
        with torch.autocast(self.h.device.type, enabled=False):
            update_state_global(self.rule, items, self.h, clock.rng, clock.nonfinite, self._batches)
        for item in items:  # what reads a weight again in this backward, and must not, then finds out
            torch.autograd.graph.increment_version(item.weight if item.copy is None else item.copy)


class WeightUpdates:
    """All blocks of an optimizer.

    capture: of Dobb's bases. in_backward: False leaves all of them to the end of the step, to compare.
    """

    def __init__(self, clock: Clock, capture: BasisKeeper | None, in_backward: bool = True) -> None:
        self._clock = clock
        self._capture = capture
        self._in_backward = in_backward
        self._blocks: dict[tuple[int, int, str], Block] = {}

    def add(self, entry: Entry, rule: StateGlobalRule, table: Tensor, sink: Sink) -> None:
        """One weight, before the first step. table: of its rule, [groups, H]."""
        own = "" if sink.plan.by_hook else block_of(entry.name)
        key = (id(table), entry.hyper_row, own)
        if key not in self._blocks:
            self._blocks[key] = Block(rule, table[entry.hyper_row])
        block = self._blocks[key]
        block.entries.append(entry)
        if not sink.plan.by_hook and self._in_backward:
            sink.when_complete = functools.partial(self._complete, block)

    def begin(self) -> None:
        """A step starts."""
        for block in self._blocks.values():
            block.begin()

    def _complete(self, block: Block, sink: Sink) -> None:
        """A weight's states are: the last of its block sets U off."""
        if sink.writes_copy:
            return  # the graph would write its copy over what U has done: the block waits for the end
        block.waiting.discard(sink.name)
        if block.waiting or (block.rule.u_reads_capture and self._capture and self._capture.refreshing):
            return
        block.update(self._clock)

    def finish(self) -> None:
        """The end of a step: U of what is left."""
        for block in self._blocks.values():
            block.update(self._clock)
