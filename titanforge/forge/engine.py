"""The fused optimizer: the interface and checkpoints of `RuleOptimizer`, with updates inside of backward.

A step is `begin_step(micro_batches)`; for each micro-batch the forward pass, `before_backward(index, flag)`
and `backward()`, in which fused weights change; then `step()` for what is left: ordinary weights, and U of
those that backward could not finish (`weight_updates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanforge.forge.clip import LaggedClip
from titanforge.forge.coverage import Covered
from titanforge.forge.forwards import FusedForwards, fused_modules, merged_groups
from titanforge.forge.head import HeadSink
from titanforge.forge.hooked import ArrivalQueue, HookedSink, consume, take_from_former, total_square
from titanforge.forge.hyper import fill_folding, hyper_of
from titanforge.forge.joint import JointSink, check_room
from titanforge.forge.modules import check_classes
from titanforge.forge.ops import register_sink
from titanforge.forge.plan import Kind, ParamPlan, keeps_logits
from titanforge.forge.projections import Group, lay_side_by_side
from titanforge.forge.ranks import Ranks
from titanforge.forge.report import PlanLine, plan_report, switches_report
from titanforge.forge.side_by_side import teach_inductor
from titanforge.forge.sinks import Clock, Sink
from titanforge.forge.tied import TiedSink
from titanforge.forge.weight_updates import WeightUpdates
from titanforge.optim.dobb.hooks import Reader
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.entries import Entry, Family
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.placement import is_cut, local_tensor
from titanforge.optim.rule import StateGlobalRule, UpdateRule
from titanforge.optim.sharded import KnownShards, update_sharded
from titanforge.optim.states import Recipe


class ForgeOptimizer(RuleOptimizer):
    """Updates weights during backward where their plan says so, the others from `.grad` in `step`.

    Use `titanforge.forge.attach`, which makes `covered` and `plans`.

    update_in_backward: whether U of regime 2 runs during backward where it can; False: all of it in `step`,
    with the same bits. merge_projections: multiply linears of one input as one where that can be.
    """

    stacks_momenta: ClassVar[bool] = False  # `joint` has an order of its own
    splits_steps: ClassVar[bool] = False  # weights have changed before anyone could decide

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroupSpec],
        recipe: Recipe,
        covered: Mapping[str, Covered],
        plans: Mapping[str, ParamPlan],
        *,
        micro_batches: int = 1,
        max_norm: float = 0.0,
        keep_logits: bool = False,
        seed: int = 0,
        captured: Mapping[str, Reader] | None = None,
        ranks: Ranks | None = None,
        update_in_backward: bool = True,
        merge_projections: bool = True,
    ) -> None:
        super().__init__(groups, recipe, seed=seed, captured=captured)
        self._model = model
        self._ranks = ranks or Ranks()
        self._plans = plans
        self._keep_logits = keep_logits
        self._kinds: dict[str, Kind] = {name: one.placement.kind for name, one in covered.items()}
        self._micro_batches = micro_batches
        self._clip = LaggedClip(max_norm, self._device)
        self._clock = Clock(self._rng, self._nonfinite)
        self._clock.micro_batches = micro_batches
        self._flag = torch.ones((), device=self._device)
        self._norm: Tensor | None = None
        self._finished = True
        self._hyper = [hyper_of(table) for table in self._table.tables()]
        self._sinks: dict[str, Sink] = {}
        self._by_param: dict[int, HookedSink] = {}
        self._queue = ArrivalQueue()
        self._forwards = FusedForwards()
        self._updates = WeightUpdates(self._clock, self.capture, update_in_backward)
        apart = set(captured or ())  # Dobb's hooks wait for each linear
        merged = merged_groups(model, covered, plans, apart) if merge_projections else []
        check_classes(fused_modules(covered, plans))  # while all weights lie where they did
        check_room(merged, {entry.name: entry for entry, _ in self._entries_with_family()})
        self._fuse(covered, list(zip(merged, lay_side_by_side(merged, covered))))

    # ---------------------------------------------------------------- building

    def _entries_with_family(self) -> list[tuple[Entry, Family]]:
        return [(entry, family) for family in self._families for entry in family.entries]

    def _fuse(self, covered: Mapping[str, Covered], projections: Sequence[tuple[Group, Tensor]]) -> None:
        for family, hyper in zip(self._families, self._hyper):
            for entry in family.entries:
                param_plan, owner = self._plans[entry.name], covered[entry.name]
                if not param_plan.fused:
                    continue
                sink_class = {"head": HeadSink, "tied": TiedSink}.get(owner.placement.kind, Sink)
                sink = (HookedSink if param_plan.by_hook else sink_class)(
                    entry.name, family.rule, owner.placement, param_plan, entry.item, hyper, entry.hyper_row,
                    self._clock, getattr(owner.module, "padding_idx", None),
                )  # fmt: skip
                self._sinks[entry.name] = sink
                rule = family.rule
                if param_plan.deferred and isinstance(rule, StateGlobalRule) and not _gathers(rule, entry):
                    self._updates.add(entry, rule, hyper.table, sink)
                if isinstance(sink, HookedSink):
                    continue
                handle = register_sink(sink)
                if isinstance(sink, HeadSink):
                    sink.compile_like(owner.head or owner.module)
                keeps = self._keep_logits and keeps_logits(owner.placement.kind, param_plan)
                self._forwards.add(entry.name, owner, handle, keeps)
        try:
            self._forwards.install()
            self._merge(projections)
        except BaseException:
            self.detach()
            raise
        for entry, _ in self._entries_with_family():  # last: a former optimizer loses its weights for good
            self._hook(self._sinks.get(entry.name), covered[entry.name])

    def _merge(self, projections: Sequence[tuple[Group, Tensor]]) -> None:
        entries = {entry.name: entry for entry, _ in self._entries_with_family()}
        if any(weight.is_cuda for _, weight in projections):
            teach_inductor()
        for group, weight in projections:
            sinks, members = zip(*((self._sinks[name], entries[name]) for name in group.names))
            self._forwards.merge(group, JointSink(sinks, members, weight), weight)

    def _hook(self, sink: Sink | None, owner: Covered) -> None:
        if not isinstance(sink, HookedSink):
            take_from_former(owner.param)
            return
        self._by_param[id(owner.param)] = sink
        # Between replicas the sync policy hands over what it has reduced: see `take_reduced`.
        sink.hold(owner, self._queue, listen="dp_replicate" not in sink.plan.reduce_axes)

    def takes(self, param: Tensor) -> bool:
        """Whether `take_reduced` consumes this weight's gradient."""
        return id(param) in self._by_param

    def take_reduced(self, arrived: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Weights with their gradients summed over replicas, of their local shapes, all at once."""
        sinks = [(self._by_param[id(param)], gradient) for param, gradient in arrived]
        for sink, _ in sinks:
            sink.reduced()
        consume(sinks)

    def detach(self) -> None:
        """Give the model its ordinary forwards back, but what another optimizer has taken over; this one then
        has its states and no more use.
        """
        self._forwards.restore()
        for sink in self._by_param.values():
            sink.release()
        self._sinks.clear()
        self._by_param.clear()

    @property
    def plan(self) -> list[PlanLine]:
        """What happens to each trainable weight."""
        return [
            PlanLine(
                entry.name,
                tuple(entry.param.shape),
                entry.param.dtype,
                self._plans[entry.name],
                self._kinds[entry.name],
            )
            for entry, _ in self._entries_with_family()
        ]

    def report(self) -> str:
        """The plan, grouped, and what the rules send, for printing at start-up."""
        switches = switches_report(
            self.plan,
            self._forwards.groups,
            keep_logits=self._keep_logits,
        )
        parts = (plan_report(self.plan, self._model), *switches, super().report())
        return "\n".join(filter(None, parts))

    # ---------------------------------------------------------------- a step

    def begin_step(self, num_micro_batches: int) -> None:
        """Host side of a step: upload what changed. Before each replay of a captured step too.

        Raises ValueError for another number of micro-batches than planned, RuntimeError where the model's
        fused weights are not those that were attached.
        """
        if num_micro_batches != self._micro_batches:
            raise ValueError(
                f"the plan is for {self._micro_batches} micro-batches a step, not {num_micro_batches}: "
                "attach again"
            )
        if not all(sink.in_place for sink in self._by_param.values()):
            for module in self._model.modules():  # gathered in a forward that had no backward
                if isinstance(module, FSDPModule):
                    module.reshard()
        self._forwards.check()
        for sink in self._by_param.values():
            sink.check()
        super().begin_step(num_micro_batches)
        self.prepare_step()
        self._clock.index = -1
        self._clock.running = False
        self._queue.clear()
        for sink in self._sinks.values():
            sink.forget()
        self._updates.begin()

    def begin_captured_step(self, num_micro_batches: int) -> None:
        """The same: `begin_step` has uploaded by then."""
        self.begin_step(num_micro_batches)

    @torch.no_grad()
    def before_backward(self, micro_batch_index: int, apply_flag: Tensor | None = None) -> None:
        """Device side, before the backward of one micro-batch: fused weights change in it.

        apply_flag: scalar on the device, 0 to leave all weights and states as they are (the loss is not
            finite). It holds for the rest of the step.
        Raises RuntimeError for a micro-batch out of turn.
        """
        clock = self._clock
        if micro_batch_index != clock.index + 1:
            raise RuntimeError(
                f"micro-batch {micro_batch_index} follows {clock.index}: call begin_step, then "
                "before_backward with 0, 1, … in turn"
            )
        super().before_backward(micro_batch_index, apply_flag)
        clock.index, clock.running = micro_batch_index, True
        if micro_batch_index == 0:
            self._flag.fill_(1.0)
            self._rng[1] = self._table.count
            self._norm = None
            self._finished = False
        if apply_flag is not None:
            self._flag.mul_((apply_flag != 0).to(self._device, torch.float32))
        if clock.last:  # what ranks have summed is consumed on all of them or on none
            self._flag.copy_(self._ranks.agree(self._flag))
        self._table.select(self._flag, self._clip.factor())
        for hyper, family in zip(self._hyper, self._families):
            fill_folding(hyper, family.rule)
        clock.observe = not self._fp8.calibrated and bool(self._flag)

    def clip(
        self, from_gradients: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The norm of gradients that are gone by now (None: never seen), and no factor left to apply."""
        return self.gradient_norm(), None

    @torch.no_grad()
    def gradient_norm(self) -> Tensor | None:
        """Norm of the step's whole gradient, before any factor: fp32 scalar on the device, after the last
        backward.

        Fused weights bring the sums of squares that their kernels left. None where micro-batches were added
        to states one by one: the norm of their sum is then never seen.
        """
        if self._norm is None:
            if any(sink.plan.join == "state" for sink in self._sinks.values()):
                return None
            self._finish_sinks()
            entries = [entry for entry, _ in self._entries_with_family()]
            parts = [(entry.param, self._squares(entry)) for entry in entries]
            self._norm = total_square(parts, self._ranks, self._device).sqrt()
        return self._norm

    def _squares(self, entry: Entry) -> list[Tensor]:
        """Sums of squares of what is here of a weight's gradient."""
        if (sink := self._sinks.get(entry.name)) is not None:
            return sink.squared_norms
        if entry.param.grad is None:
            return []
        norm = torch.linalg.vector_norm(local_tensor(entry.param.grad), dtype=torch.float32)
        return [norm * norm]

    @torch.no_grad()
    def step(self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """What backward has left: see `apply_step`."""
        self.apply_step(apply_flag, grad_scale)

    @torch.no_grad()
    def apply_step(self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """The end of a step: weights that no micro-batch reached, U of regime 2, ordinary weights, step
        count.

        apply_flag, grad_scale: for the ordinary weights alone, beside the flags of `before_backward` and the
            lagged factor; fused weights have been updated by now.
        Raises RuntimeError if a micro-batch is missing, or if a fused weight got a `.grad`.
        """
        clock = self._clock
        if not clock.running or not clock.last:
            raise RuntimeError(
                f"{clock.index + 1} of {self._micro_batches} micro-batches of this step went through "
                "before_backward"
            )
        self._check_bypass()
        if self._clip.max_norm > 0:
            norm = self.gradient_norm()
            assert norm is not None, "the plan joins no micro-batches in states if it needs their norm"
        self._finish_sinks()
        tables = self._table.tables()
        applied = self._flag.clone()
        flag = applied if apply_flag is None else applied * (apply_flag != 0).to(self._device)
        scale = self._clip.factor() if grad_scale is None else grad_scale.to(self._device)
        if self.capture is not None:
            # What reads gradients belongs to ordinary weights, what reads activations to fused ones too.
            self.capture.refresh(flag if self.capture.reads_gradients else self._flag, scale)
        for family, hyper in zip(self._families, tables):
            self._update_gathered_states(family, hyper)
        self._updates.finish()
        if len(self._sinks) < len(self._plans):
            self._table.select(flag, scale)
            self._calibrate(tables, flag)
            for family, hyper in zip(self._families, tables):
                self._update_family(family, hyper)
        self._fp8.calibrated |= clock.observe
        self._fp8.advance(applied)
        if self._norm is not None:
            self._clip.update(self._norm, applied)
        self._table.advance(applied)
        clock.running = False

    def _finish_sinks(self) -> None:
        if not self._finished:
            self._finished = True
            for sink in self._sinks.values():
                sink.finish()
            self._queue.flush()

    def _entries(self, family: Family) -> list[Entry]:
        return [entry for entry in family.entries if entry.name not in self._sinks]

    def _update_gathered_states(self, family: Family, hyper: Tensor) -> None:
        """U of fused weights whose states other ranks have parts of."""
        rule = family.rule
        if not isinstance(rule, StateGlobalRule):
            return
        cut = [
            entry
            for entry in family.entries
            if entry.name in self._sinks and self._plans[entry.name].deferred and _gathers(rule, entry)
        ]
        for row in range(len(family.groups)):
            if members := [entry for entry in cut if entry.hyper_row == row]:
                known = family.sharded.setdefault((row, True), KnownShards(self.stacks_momenta))
                update_sharded(rule, members, hyper[row], self.links.record, known)

    def _check_bypass(self) -> None:
        for entry, _ in self._entries_with_family():
            if entry.name in self._sinks and entry.param.grad is not None:
                raise RuntimeError(
                    f"the fused weight {entry.name!r} got a .grad: something reads it past its module, which "
                    "the probe did not show. Its update of this step is not whole. Probe with what training "
                    "runs, or set forge.enable = false"
                )

    # ---------------------------------------------------------------- beside the states

    @property
    def held_norm(self) -> Tensor:
        """The norm that lagged clipping holds: fp32 scalar."""
        return self._clip.held

    def plain_state(self) -> dict[str, float]:
        """What lagged clipping knows of the steps before."""
        return {"held_norm": float(self.held_norm)}

    def load_plain_state(self, saved: Mapping[str, Any]) -> None:
        self.held_norm.fill_(saved.get("held_norm", 0.0))

    def metrics(self) -> dict[str, Tensor]:
        """Also the tiles that were not applied, so far in this process."""
        return super().metrics() | {"nonfinite_tiles": self.nonfinite_tiles}


def _gathers(rule: UpdateRule, entry: Entry) -> bool:
    """Whether U takes parts of the state from other ranks."""
    return rule.u_gathers and is_cut(entry.param, rule.u_dims)
