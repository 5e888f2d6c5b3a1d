"""Weights whose gradient is complete only after ranks have summed it: consumed as it arrives, and then freed.

With FSDP2 a gradient arrives as this rank's shard, reduced by then; between replicas as a piece of an
all-reduced bucket. No module is changed for it: whatever reads a weight, and however often, autograd and the
reduction have added it all up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from titanforge.forge.coverage import Covered
from titanforge.forge.ranks import Ranks
from titanforge.forge.sinks import Sink, choose_scales
from titanforge.optim.local_update import update_elementwise, update_layers, update_state_global
from titanforge.optim.placement import local_tensor
from titanforge.optim.rule import ElementwiseRule, LocalStateRule, StateGlobalRule


@dataclass(frozen=True, eq=False)
class _Hold:
    """Whose a weight is. hook: on its gradient; None where the sync policy hands it over."""

    hook: RemovableHandle | None


_HOLDS = WeakTensorKeyDictionary()
"""By weight, the hold of the sink that was attached last: it refers to no weight, which may go."""


def take_from_former(param: Tensor) -> None:
    """No former optimizer's sink has the weight any more: it would take the gradients of the next one."""
    former: _Hold | None = _HOLDS.pop(param, None)
    if former is not None and former.hook is not None:
        former.hook.remove()


@dataclass(eq=False)
class HookedSink(Sink):
    """The sink of a weight that is handed its whole gradient, or its shard of it. Call `hold` after it is
    made.
    """

    param: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.empty(0)))
    queue: ArrivalQueue | None = None
    _hold: _Hold | None = None
    _owners: Sequence[tuple[nn.Module, str]] = ()

    def hold(self, owner: Covered, queue: ArrivalQueue, listen: bool) -> None:
        """Take the weight, from a former optimizer's sink if there is one. listen: to its `.grad`."""
        param = owner.param
        self.param, self.queue = param, queue
        self._owners = [(module, owner.attribute) for module, _ in owner.readers()]
        take_from_former(param)
        self._hold = _Hold(param.register_post_accumulate_grad_hook(self.arrived) if listen else None)
        _HOLDS[param] = self._hold

    def release(self) -> None:
        """Let the weight go, unless another sink has it by now."""
        if self._hold is not None and _HOLDS.get(self.param) is self._hold:
            if self._hold.hook is not None:
                self._hold.hook.remove()
            del _HOLDS[self.param]

    @property
    def in_place(self) -> bool:
        """Whether its modules have it; not while FSDP has them hold the gathered weight."""
        return all(module._parameters.get(attribute) is self.param for module, attribute in self._owners)

    def check(self) -> None:
        """Raises RuntimeError if the weight is another optimizer's by now, or gets no gradient any more."""
        if not self.in_place:
            what = "was replaced (load_state_dict with assign = True?) after it was attached"
        elif _HOLDS.get(self.param) is not self._hold:
            what = "has another optimizer by now"
        elif not self.param.requires_grad:
            what = "was frozen after it was attached"
        else:
            return
        raise RuntimeError(f"the fused weight {self.name!r} {what}: attach again")

    def arrived(self, param: Tensor) -> None:
        """As a hook after accumulation: of the last micro-batch, consume `.grad` and drop it."""
        self.begin()
        if self.clock.last:
            self._take_gradient()

    def reduced(self) -> None:
        """Note that a summed gradient is here."""
        if not self.clock.running:
            self.begin()  # raises
        self.touched += 1
        self.done = True

    def finish(self) -> None:
        """A weight that the last micro-batch passed by has what the others left, or no gradient at all."""
        if not self.done:
            self._take_gradient()
        self.touched, self.done = 0, False

    def forget(self) -> None:
        super().forget()
        self._norms.clear()

    def _take_gradient(self) -> None:
        assert self.queue is not None
        gradient, self.param.grad, self.done = self.param.grad, None, True
        shape = local_tensor(self.param).shape
        if gradient is not None:
            self.queue.add(self, local_tensor(gradient))
        else:
            self.queue.add(self, torch.zeros(shape, device=self.clock.rng.device))


class ArrivalQueue:
    """Gradients that have arrived, a few megabytes of them: one launch updates many small weights.

    What FSDP2 hands over was reduced on a stream of its own, which is current in its hooks; the backward pass
    ends with the default stream behind it, so the rest is safe to consume there.
    """

    LIMIT = 2**24
    """Elements at which the queue is emptied."""

    def __init__(self) -> None:
        self._waiting: list[tuple[HookedSink, Tensor]] = []
        self._elements = 0

    def add(self, sink: HookedSink, gradient: Tensor) -> None:
        self._waiting.append((sink, gradient))
        self._elements += gradient.numel()
        if self._elements >= self.LIMIT:
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting, self._elements = self._waiting, [], 0
        consume(waiting)

    def clear(self) -> None:
        """Drop what a step has left behind that will not be finished."""
        self._waiting, self._elements = [], 0


@torch.no_grad()
def consume(arrived: Sequence[tuple[HookedSink, Tensor]]) -> None:
    """A and U (A alone where U is deferred) of weights from their summed gradients, of local shapes."""
    by_rule: dict[int, list[tuple[HookedSink, Tensor]]] = {}
    for sink, gradient in arrived:
        sink.keep_norms(set())
        if gradient.numel():  # a shard of nothing has nothing to do
            by_rule.setdefault(id(sink.hyper), []).append((sink, gradient))
    for members in by_rule.values():
        gradients = [gradient for _, gradient in members]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        for (sink, _), norm in zip(members, norms):
            sink.note_square(norm * norm)
        items = [replace(sink.item(), gradient=gradient) for sink, gradient in members]
        first, clock = members[0][0], members[0][0].clock
        rule, table = first.rule, first.hyper.table
        if isinstance(rule, LocalStateRule):
            if clock.observe:
                update_elementwise(rule, items, table, clock.rng, clock.nonfinite, observe=True)
                for item in items:
                    choose_scales(item.states)
            update_elementwise(rule, items, table, clock.rng, clock.nonfinite)
        if isinstance(rule, ElementwiseRule):
            continue
        at_once = [item for (sink, _), item in zip(members, items) if not sink.plan.deferred]
        for row in sorted({item.hyper_row for item in at_once}):
            of_row = [item for item in at_once if item.hyper_row == row]
            if isinstance(rule, StateGlobalRule):
                update_state_global(rule, of_row, table[row], clock.rng, clock.nonfinite)
            else:
                update_layers(rule, of_row, table[row])


def total_square(parts: Iterable[tuple[Tensor, list[Tensor]]], ranks: Ranks, device: torch.device) -> Tensor:
    """Sum of squares of all gradients, each weight counted once however it is shared out: fp32 scalar.

    parts: every weight, with the sums of squares of what is here of its gradient. All ranks issue the same
    reductions, also where one holds nothing of a weight.
    """
    shares: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for param, squares in parts:
        shares.setdefault(_sharing(param), []).extend(squares)
    total = torch.zeros((), device=device)
    for groups, squares in shares.items():
        square = torch.zeros((), device=device)
        if squares:
            square += torch.stack(torch._foreach_norm(squares, 1)).sum()  # pyright: ignore[reportPrivateImportUsage]
        for group in groups:
            ranks.sum_over(square, group)
        total += square
    return total


def _sharing(param: Tensor) -> tuple[ProcessGroup, ...]:
    """Groups whose ranks hold other parts of a weight."""
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    return tuple(
        mesh.get_group(axis) for axis, place in enumerate(param.placements) if not place.is_replicate()
    )
