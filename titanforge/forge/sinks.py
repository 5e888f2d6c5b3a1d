"""A weight's sink: takes what its gradient is made of during backward, and consumes it at the planned
granule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from titanforge.forge.hyper import Hyper
from titanforge.forge.plan import Granule, ParamPlan, Placement
from titanforge.forge.sources import Launch, Product, Rows, Source, Whole, no_tokens
from titanforge.kernels.codecs import Encoded, as_encoded, fp8_calibrate
from titanforge.kernels.epilogues import EPILOGUES, Epilogue
from titanforge.kernels.step import Target, make_target
from titanforge.optim.local_update import (
    LocalWeight,
    update_elementwise,
    update_layers,
    update_state_global,
)
from titanforge.optim.rule import ElementwiseRule, LocalStateRule, StateGlobalRule, UpdateRule

_MOMENTUM_STATE = EPILOGUES["momentum_state"]
_ID_MASK = 0x7FFFFFFF


class Clock:
    """Where the step stands; one for all sinks of an optimizer.

    rng: int64 (seed, step). nonfinite: int32 [1], counts tiles left out. index: of the micro-batch. running:
    between `before_backward` and the end of the step. observe: this step chooses the first scales of fp8
    states, so a pass that only looks comes before each update.
    """

    def __init__(self, rng: Tensor, nonfinite: Tensor) -> None:
        self.rng = rng
        self.nonfinite = nonfinite
        self.micro_batches = 1
        self.index = -1
        self.running = False
        self.observe = False
        # `momentum_state`'s (apply, -, -, scale, decay, gain) for an fp32 sum of micro-batches.
        self.sum_first = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0], device=rng.device)
        self.sum_later = torch.ones(6, device=rng.device)

    @property
    def last(self) -> bool:
        """Whether this is the step's last micro-batch."""
        return self.index == self.micro_batches - 1


@dataclass(eq=False)
class Sink:
    """One fused weight.

    make_item: makes its tensors as the ordinary engine sees them. padding_idx: of an embedding; that row gets
    no gradient. touched: micro-batches of this step that have reached it. done: the step's gradient is
    consumed. when_complete: called in the backward that has consumed it whole.
    """

    name: str
    rule: UpdateRule
    placement: Placement
    plan: ParamPlan
    make_item: Callable[[], LocalWeight]
    hyper: Hyper
    hyper_row: int
    clock: Clock
    padding_idx: int | None = None
    touched: int = 0
    done: bool = False
    when_complete: Callable[[Sink], None] | None = None
    _norms: dict[int, Tensor] = field(default_factory=dict)
    _stash: list[Source] = field(default_factory=list)
    _sum: Tensor | None = None
    _given: Tensor | None = None
    _target: Target | None = None
    _address: int = 0

    # ------------------------------------------------------------ what backward calls

    def product(self, dy: Tensor, x: Tensor) -> None:
        """A linear's operands, dy [T, N] and x [T, K]."""
        self.begin()
        self._take(Product(dy, x))
        self._tell()

    def experts(self, dy: Tensor, x: Tensor, ends: Tensor) -> None:
        """Grouped operands: rows sorted by expert, and the row after each expert's last, int32 [E]."""
        self.begin()
        self._take(Product(dy, x, torch.cat((torch.zeros_like(ends[:1]), ends))))
        self._tell()

    def rows(self, dy: Tensor, ids: Tensor) -> None:
        """An embedding's, dy [T, D] and ids [T]."""
        self.begin()
        self._take(self.own_rows(dy, ids))
        self._tell()

    def own_rows(self, dy: Tensor, ids: Tensor) -> Rows:
        """Without those of the padding."""
        if self.padding_idx is not None:
            ids = ids.masked_fill(ids == self.padding_idx, -1)
        return Rows(dy, ids)

    def whole(self, gradient: Tensor) -> None:
        """A complete gradient that lies in memory."""
        self.begin()
        if self.plan.join:
            total = self._fp32_sum(gradient.shape, gradient.device)
            if self.touched == 1:
                total.copy_(gradient)
            else:
                total += gradient
            gradient = total
        if self.clock.last:
            self._consume_whole(gradient)
        self._tell()

    def _tell(self) -> None:
        if self.done and self.when_complete is not None:
            self.when_complete(self)

    def _consume_whole(self, gradient: Tensor) -> None:
        if self.plan.granule is Granule.LAYER:
            self.update_whole(gradient)
        else:
            self.consume(Whole(gradient))

    def begin(self) -> None:
        """Note that a micro-batch is here. Raises RuntimeError where it must not be."""
        self.check_running()
        self.touched += 1
        if self.touched > self.clock.index + 1:
            raise RuntimeError(
                f"the fused weight {self.name!r} was used twice in one forward, but once in the probe: its "
                "first update came before its last use. Probe with what training runs, or set forge.enable = "
                "false"
            )

    def check_running(self) -> None:
        """Raises RuntimeError outside of a step."""
        if not self.clock.running:
            raise RuntimeError(
                f"backward reached the fused weight {self.name!r} outside of a step: call begin_step and "
                "before_backward of its optimizer first, or run under torch.no_grad()"
            )

    def consume(self, source: Source, first_row: int | None = None, rows: int | None = None) -> None:
        """The step's whole gradient, or that of `rows` rows from `first_row` on."""
        self.done = True
        if self.plan.granule is Granule.LAYER:
            self.update_whole(source.form(self.target()))
            return
        launch = self._launch(self.epilogue, self.hyper.table)
        self._fold(source, self.rows_of(first_row, rows), launch, first_row or 0)

    @staticmethod
    def consume_together(sinks: Sequence[Sink], source: Source, target: Target) -> None:
        """The whole gradient of several weights that lie side by side in `target`, whose launch is that of
        the first. The sum of its squares is noted there.
        """
        for sink in sinks:
            sink.begin()
            sink.done = True
            sink.keep_norms({0} if sink is sinks[0] else set())
        first = sinks[0]
        first._fold(source, target, first._launch(first.epilogue, first.hyper.table), 0)
        for sink in sinks:
            sink._tell()

    def look(self, source: Source, first_row: int, rows: int) -> None:
        """Note the magnitudes that fp8 states of these rows would have; before the first of them is
        consumed.
        """
        launch = self._launch(self.epilogue, self.hyper.table)
        self._look(source, self.rows_of(first_row, rows), launch)

    def add_to_state(self, source: Source, first_row: int | None = None, rows: int | None = None) -> None:
        """One micro-batch of an affine rule: M <- decay M + G, the decay only at the first."""
        target, first = self.rows_of(first_row, rows), self.touched == 1
        if isinstance(self.rule, ElementwiseRule) and self.clock.last:
            # The rule's own epilogue closes the step; what decays has decayed already unless this is all.
            self.done = True
            table = self.hyper.table if first else self.hyper.closing
            self._fold(source, target, self._launch(self.epilogue, table), None)
            return
        if not self.clock.last:  # other random bits than those of the step's last word
            number = 0x9E3779B1 * (self.clock.index + 1)
            target = replace(target, tensor_id=(target.tensor_id + number) & _ID_MASK)
        else:
            self.done = True
        target = replace(target, weight=None, master=None)
        table = self.hyper.first if first else self.hyper.later
        self._fold(source, target, self._launch(_MOMENTUM_STATE, table), None)

    def update_whole(self, gradient: Tensor) -> None:
        """A and U (A alone where U is deferred) from a complete gradient that lies in memory."""
        self.done = True
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self.note_square(norm * norm)
        item, table = replace(self.item(), gradient=gradient), self.hyper.table
        if isinstance(self.rule, LocalStateRule):
            if self.clock.observe:
                self._update_elementwise(self.rule, item, observe=True)
                choose_scales(item.states)
            self._update_elementwise(self.rule, item)
        if isinstance(self.rule, StateGlobalRule):
            if not self.plan.deferred:
                update_state_global(self.rule, [item], table[self.hyper_row])
        elif not isinstance(self.rule, ElementwiseRule):
            update_layers(self.rule, [item], table[self.hyper_row])

    def _update_elementwise(self, rule: LocalStateRule, item: LocalWeight, observe: bool = False) -> None:
        clock = self.clock
        update_elementwise(rule, [item], self.hyper.table, clock.rng, clock.nonfinite, observe=observe)

    # ------------------------------------------------------------ micro-batches

    def _take(self, source: Source) -> None:
        if self.plan.join == "state":
            self.add_to_state(source)
        elif self.plan.join == "stash":
            self._stash.append(source.copy())
            if self.clock.last:
                self._consume_stash()
        elif self.plan.join == "buffer":
            self._add_to_sum(source)
            if self.clock.last:
                self.update_whole(self._sum_so_far())
        else:
            self.consume(source)

    def _consume_stash(self) -> None:
        first, *others = self._stash
        self._stash.clear()
        self.consume(first.joined(others))

    def _add_to_sum(self, source: Source) -> None:
        shape, clock = self.placement.shape, self.clock
        total = self._fp32_sum(torch.Size(shape), clock.rng.device)
        hyper = clock.sum_first if self.touched == 1 else clock.sum_later
        target = Target(total.shape, None, (as_encoded(total),))
        source.fold(target, Launch(_MOMENTUM_STATE, hyper, clock.rng, clock.nonfinite), None)

    def _fp32_sum(self, shape: torch.Size, device: torch.device) -> Tensor:
        if self._sum is None:
            self._sum = torch.zeros(shape, device=device)
        return self._sum

    def _sum_so_far(self) -> Tensor:
        assert self._sum is not None
        return self._sum

    # ------------------------------------------------------------ the end of a step

    def finish(self) -> None:
        """After the step's last backward, which may have passed this weight by: a weight that nothing reached
        still takes the part of its step that is free of the gradient (FORGE, remark 1).
        """
        if not self.done:
            if self._stash:
                self._consume_stash()
            elif self.touched and self.plan.join == "buffer":
                whole = self._consume_whole if self.placement.kind == "vector" else self.update_whole
                whole(self._sum_so_far())
            else:
                self._without_gradient()
        self.touched, self.done = 0, False

    def _without_gradient(self) -> None:
        self._norms.clear()
        self.touched += 1
        if self.plan.granule is Granule.LAYER:
            self.update_whole(torch.zeros(self.placement.shape, device=self.clock.rng.device))
        elif self.plan.join == "state":
            self.add_to_state(no_tokens(self.placement.kind, self.target()))
        else:
            self.consume(no_tokens(self.placement.kind, self.target()))

    def keep_norms(self, keys: set[int]) -> None:
        """Drop the norms of parts that this step does not have."""
        self._norms = {key: norm for key, norm in self._norms.items() if key in keys}

    def note_square(self, square: Tensor) -> None:
        """The sum of squares of the whole gradient: fp32 scalar."""
        self._norms = {0: square.reshape(1)}

    def forget(self) -> None:
        """Drop what a step has left behind that will not be finished."""
        self.touched, self.done = 0, False
        self._stash.clear()

    @property
    def squared_norms(self) -> list[Tensor]:
        """Sums of squares, by tile or of the whole, of this step's gradient: fp32 vectors."""
        return list(self._norms.values())

    # ------------------------------------------------------------ tensors

    @property
    def epilogue(self) -> Epilogue:
        """The rule's, or A's alone where U reads more than a coordinate."""
        assert isinstance(self.rule, LocalStateRule)
        return self.rule.epilogue

    @contextmanager
    def writing_to(self, weight: Tensor) -> Iterator[None]:
        """Update this tensor instead of the parameter: a compiled graph may hand a copy, and copy it back."""
        self._given = weight
        try:
            yield
        finally:
            self._given = None

    @property
    def writes_copy(self) -> bool:
        """Whether a compiled graph has handed a copy of the weight, for the time of its call."""
        self.target()  # finds the address
        return self._given is not None and self._given.data_ptr() != self._address

    def item(self) -> LocalWeight:
        """The weight's tensors as the ordinary engine sees them."""
        item = self.make_item()
        if self._given is None:
            return item
        return replace(item, **{"weight" if item.copy is None else "copy": self._given.detach()})

    def target(self) -> Target:
        """Weight and states as kernels take them; a vector as a matrix of one row."""
        if self._target is None:
            self._target = self._new_target()
            item = self.make_item()
            self._address = (item.weight if item.copy is None else item.copy).data_ptr()
        if self._given is None or self._given.data_ptr() == self._address:
            return self._target
        return self._new_target()

    def _new_target(self) -> Target:
        item = self.item()
        if not isinstance(self.rule, LocalStateRule):  # its gradient is formed, and no kernel updates it
            return Target(item.weight.shape, as_encoded(item.weight), ())
        weight = item.weight if item.copy is None else item.copy
        stored = Encoded(weight, item.codec) if item.codec is not None else as_encoded(weight)
        master = item.weight if item.copy is not None and self.epilogue.updates_weight else None
        states = item.states
        if weight.dim() == 1:
            stored, states = _as_row(stored), tuple(_as_row(state) for state in states)
            master = None if master is None else master.view(1, -1)
        return make_target(self.epilogue, stored, states, master=master, tensor_id=item.tensor_id)

    def rows_of(self, first_row: int | None, rows: int | None) -> Target:
        """The target's rows from `first_row` on; all of it for None."""
        target = self.target()
        if first_row is None or rows is None:
            return target
        span = slice(first_row, first_row + rows)

        def cut(part: Encoded) -> Encoded:
            meta = part.meta[span] if part.codec.kind == "block" and part.meta is not None else part.meta
            return Encoded(part.values[span], part.codec, meta)

        return Target(
            torch.Size((rows, *target.shape[1:])),
            None if target.weight is None else cut(target.weight),
            tuple(cut(state) for state in target.states),
            None if target.master is None else target.master[span],
            # Random bits go by the row of what a kernel is given: another id sets the slices apart.
            (target.tensor_id + first_row) & _ID_MASK,
        )

    def _launch(self, epilogue: Epilogue, table: Tensor) -> Launch:
        return Launch(epilogue, table[self.hyper_row], self.clock.rng, self.clock.nonfinite)

    def _fold(self, source: Source, target: Target, launch: Launch, norm_key: int | None) -> None:
        norm = None
        if norm_key is not None:
            count = source.tiles(target)
            norm = self._norms.get(norm_key)
            if norm is None or norm.numel() != count:
                norm = self._norms[norm_key] = torch.zeros(count, device=self.clock.rng.device)
        if self.clock.observe and not norm_key:
            self._look(source, target, launch)
        source.fold(target, launch, norm)

    def _look(self, source: Source, target: Target, launch: Launch) -> None:
        if any(part.codec.kind == "tensor" for part in target.parts):
            source.fold(target, replace(launch, observe=True), None)
            choose_scales(target.parts)


def _as_row(part: Encoded) -> Encoded:
    return Encoded(part.values.view(1, -1), part.codec, part.meta)


def choose_scales(parts: tuple[Encoded, ...]) -> None:
    """The scales of fp8 states whose first magnitudes were looked at."""
    for part in parts:
        if part.codec.kind == "tensor" and part.meta is not None:
            fp8_calibrate(part.meta, part.codec.levels)
