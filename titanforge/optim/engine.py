"""The ordinary optimizer engine: gradients are complete in `.grad`, and a step goes over all weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanforge.optim import split
from titanforge.optim.batches import BatchList
from titanforge.optim.dion import Dion
from titanforge.optim.dobb.build import build_capture
from titanforge.optim.dobb.capture import BasisKeeper
from titanforge.optim.dobb.hooks import Reader
from titanforge.optim.entries import Entry, Family, by_rule, new_family, release
from titanforge.optim.exchanges import exchange_lines
from titanforge.optim.hyper_table import HyperTable
from titanforge.optim.links import DataLinks
from titanforge.optim.local_update import (
    LocalWeight,
    update_elementwise,
    update_in_one_pass,
    update_layers,
    update_state_global,
    write_copies,
)
from titanforge.optim.owners import AGAIN, OwnedWeights
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.placement import is_cut, local_tensor
from titanforge.optim.replica_factors import FactoredRule, Mean, update_by_factors
from titanforge.optim.rule import ElementwiseRule, LocalStateRule, StateGlobalRule
from titanforge.optim.sharded import KnownShards, update_sharded
from titanforge.optim.state_stacks import stack_auxiliary, stack_momenta
from titanforge.optim.states import Fp8Scales, Recipe, check_rules, load_states


class RuleOptimizer:
    """Applies one update rule per group to the gradients in `.grad`.

    Every parameter's states exist from the start, so checkpoints have the same keys on every rank and can be
    read in place. A parameter without gradient counts as one with a zero gradient: its states decay and its
    weight decay is applied, as for an expert that no token reached (FORGE, remark 1). States of a distributed
    parameter are DTensors of its placement; updates run on the local parts, which may be empty.

    groups: every trainable parameter once (see `build_param_groups`).
    recipe: how states and weights are stored.
    captured: for Dobb, from `find_readers`: who reads its weights, and has or gets hooks by `install_hooks`.
        Without it bases stay the identity.
    seed: of stochastic rounding; the bits depend on it, the step, the parameter's name and the coordinate.
    splits_steps: whether `accumulate_step` and `finish_step` may take the place of `step`.
    stacks_momenta: whether momenta of Dion that are updated together lie in one memory. Not where something
        else is to lie side by side.
    """

    splits_steps: ClassVar[bool] = True
    stacks_momenta: ClassVar[bool] = True

    def __init__(
        self,
        groups: Sequence[ParamGroupSpec],
        recipe: Recipe | None = None,
        *,
        seed: int = 0,
        captured: Mapping[str, Reader] | None = None,
    ) -> None:
        recipe = recipe or Recipe()
        self.groups = list(groups)
        devices = {param.device for group in self.groups for param in group.params}
        if len(devices) != 1:
            names = sorted(map(str, devices))
            raise ValueError(f"one optimizer needs all weights on one device, not on {names}")
        self._device = devices.pop()
        if self._device.type == "meta":
            raise ValueError("build the optimizer after the model has been given memory (it is on meta)")
        self._owned = OwnedWeights(self.groups)
        self._families = [new_family(members, recipe) for members in by_rule(self.groups)]
        for family in self._families:
            if isinstance(family.rule, Dion):
                stack_auxiliary(family.entries)
                if self.stacks_momenta:
                    stack_momenta(family.entries)
        self._table = HyperTable(
            [(family.rule, [group.options for group in family.groups]) for family in self._families],
            self._device,
        )
        self._lr_factor = 1.0
        self._whole_steps_wait = False
        self._watched: tuple[list[str], Tensor] | None = None
        self._rng = torch.tensor([seed, 0], dtype=torch.int64, device=self._device)
        self._nonfinite = torch.zeros(1, dtype=torch.int32, device=self._device)
        self.links = DataLinks()
        self._fp8 = Fp8Scales([entry.states for entry in self._all_entries()])
        self.capture: BasisKeeper | None = build_capture(self.groups, captured or {}, self._all_entries())
        if self.capture is not None:
            names = {weight.name for weight in self.capture.weights}
            for entry in self._all_entries():
                if entry.name in names:
                    entry.beside["captured_steps"] = self.capture.steps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups in torch.optim's form, with the current learning rate."""
        return [
            {
                "name": group.name,
                "names": group.names,
                "params": group.params,
                **group.options,
                "lr": group.options["lr"] * self._lr_factor,
            }
            for group in self.groups
        ]

    @property
    def step_count(self) -> Tensor:
        """Steps applied so far: an int64 scalar on the device."""
        return self._table.count

    def set_step_count(self, count: int) -> None:
        """Go on from so many applied steps, also between the halves of a step; the host waits."""
        self._table.move_to(count)
        self._rng[1] = count

    def set_lr(self, factor: float) -> None:
        """Set each group's learning rate to `factor` times its peak, from the next step on."""
        self._lr_factor = factor

    @property
    def nonfinite_tiles(self) -> Tensor:
        """Tiles that kernels left out because their gradient was not finite: int32 [1] on the device."""
        return self._nonfinite

    def connect(self, links: DataLinks) -> None:
        """How the other ranks are reached, for Dobb and for sharded matrices."""
        self.links = links
        if self.capture is not None:
            self.capture.links = links

    def report(self) -> str:
        """More about who updates which weights than `groups` says, for printing at start-up."""
        matrices = [param for group in self.groups for param in group.params if param.dim() == 2]
        if any(isinstance(param, DTensor) and param.device_mesh.ndim > 1 for param in matrices):
            return ""  # the tensor axis cuts them too, which the accounting does not know
        return "\n".join(exchange_lines(self.groups, self.links.shards, replicas=self.links.replicas))

    def metrics(self) -> dict[str, Tensor]:
        """Scalars worth logging, by metric name."""
        return {} if self.capture is None else {"dobb_failed_blocks": self.capture.all_failed}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or fill them with zeros."""
        for entry in self._all_entries():
            if set_to_none:
                entry.param.grad = None
            elif entry.param.grad is not None:
                local_tensor(entry.param.grad).zero_()

    def begin_step(self, num_micro_batches: int) -> None:
        """Before a step's first forward. Here gradients wait in `.grad`; only Dobb has something to do."""
        if self.capture is not None:
            self.capture.begin_step(num_micro_batches)

    @property
    def capturable(self) -> bool:
        """Whether a step's device side waits for nothing any more: it can be captured in a CUDA graph."""
        return self._fp8.calibrated

    @property
    def usual_step(self) -> bool:
        """Whether the step that has begun launches what most steps do; those that refresh Dobb's bases do
        not.
        """
        return self.capture is None or not self.capture.refreshing

    def begin_captured_step(self, num_micro_batches: int) -> None:
        """Host side of a step whose device side ends in `apply_step`: before it is captured or replayed.

        Raises RuntimeError where a weight has moved since an earlier step.
        """
        for entry in self._all_entries():
            if entry.moved:
                raise RuntimeError(
                    f"the weight {entry.name!r} moved (.data was assigned?) {AGAIN}; what was captured "
                    "(compile.cuda_graph = true) does not follow"
                )
        self.begin_step(num_micro_batches)
        self.prepare_step()

    def before_backward(self, micro_batch_index: int, apply_flag: Tensor | None = None) -> None:
        """Before each backward; for engines that update during it, and for Dobb."""
        if self.capture is not None:
            self.capture.before_backward(micro_batch_index)

    def clip(
        self, from_gradients: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor | None, Tensor | None]:
        """After the last backward: the norm of the whole gradient, and the factor that `step` is to apply.

        from_gradients: finds both where gradients wait in `.grad`, as they do here.
        """
        return from_gradients()

    @torch.no_grad()
    def step(self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """Update all weights and states in place.

        apply_flag: scalar on the device; where 0, weights, states and the step count keep their bits. It must
            be the same on all ranks.
        grad_scale: scalar on the device that multiplies every gradient (the clip factor).
        The host never waits for the device, but for one read of the step count every few hundred steps.
        Raises RuntimeError where the model has other weights by now, or where one with an fp32 master moved.
        """
        if self._device.type == "cpu" and apply_flag is not None and not bool(apply_flag):
            return  # the flag is in host memory anyway
        self.prepare_step()
        self.apply_step(apply_flag, grad_scale)

    def prepare_step(self) -> None:
        """Host side of `step`: call it before each replay of a graph that captured `apply_step`.

        Raises RuntimeError where the model has other weights by now (see `OwnedWeights`).
        """
        self._owned.check()
        self._table.prepare(
            [[group.options["lr"] * self._lr_factor for group in family.groups] for family in self._families]
        )

    @torch.no_grad()
    def apply_step(self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """Device side of `step`: launches only, so that it can be captured in a CUDA graph.

        With fp8 states the first applied step chooses the scales and waits for the flag: capture a later one.
        """
        flag = None if apply_flag is None else apply_flag.to(self._device)
        self._table.select(flag, None if grad_scale is None else grad_scale.to(self._device))
        self._rng[1] = self._table.count
        tables = self._table.tables()
        self._calibrate(tables, flag)
        if self.capture is not None:
            self.capture.refresh(tables[0][0, 0], tables[0][0, 3])
        # The largest first: while the device has it, the host makes the others' launches ready.
        for family, hyper in sorted(zip(self._families, tables), key=lambda pair: -pair[0].numel):
            self._update_family(family, hyper)
        self._fp8.advance(tables[0][0, 0])
        self._table.advance(flag)

    def _calibrate(self, tables: Sequence[Tensor], flag: Tensor | None) -> None:
        """Before the first applied step: choose the scales of fp8 states from what the step would store."""
        if self._fp8.calibrated or (flag is not None and not bool(flag)):
            return
        for family, hyper in zip(self._families, tables):
            if isinstance(family.rule, LocalStateRule) and (items := self._items(family)):
                update_elementwise(family.rule, items, hyper, self._rng, self._nonfinite, observe=True)
                release(items)
        self._fp8.calibrate()

    def _items(self, family: Family) -> list[LocalWeight]:
        """What a step goes over; empty shards left out."""
        return [item for entry in self._entries(family) if (item := entry.current()).weight.numel() > 0]

    def _entries(self, family: Family) -> list[Entry]:
        """Weights that a step goes over."""
        return family.entries

    def _update_family(self, family: Family, hyper: Tensor) -> None:
        rule = family.rule
        items = left = self._items(family)
        if items and isinstance(rule, StateGlobalRule):
            left = update_in_one_pass(rule, items, hyper, self._nonfinite, family.whole_batches)
        if left and isinstance(rule, LocalStateRule):
            family.elementwise(rule, left, hyper, self._rng, self._nonfinite)
        if not isinstance(rule, ElementwiseRule):
            self._update_weights(family, left, hyper)
        release(items)

    def _update_weights(
        self, family: Family, items: list[LocalWeight], hyper: Tensor, mean: Mean | None = None
    ) -> None:
        """What is left after the elementwise pass; of rules that split, U. items: of `_items`. mean: as of
        `finish_step`.
        """
        rule = family.rule
        if isinstance(rule, ElementwiseRule):
            split.finish(rule, items, hyper)
            return
        if isinstance(rule, StateGlobalRule):
            items = self._update_gathered(rule, family, items, hyper)
        for row in range(len(family.groups)):
            members = [item for item in items if item.hyper_row == row]
            if mean is not None and isinstance(rule, FactoredRule):
                if factored := [item for item in members if item.factored]:
                    update_by_factors(rule, factored, hyper[row], mean)
                members = [item for item in members if not item.factored]
            if isinstance(rule, StateGlobalRule):
                batches = family.batches.setdefault(row, BatchList())
                update_state_global(rule, members, hyper[row], self._rng, self._nonfinite, batches)
            else:
                update_layers(rule, members, hyper[row])

    # ---------------------------------------------------------------- a step in two halves

    @torch.no_grad()
    def accumulate_step(
        self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None, whole: bool = True
    ) -> None:
        """First half of a step, with the arguments of `step`: A of the rules that split (`split.splits`).

        whole: the other rules take their whole step. Else only the scale goes into their gradients, which may
            be averaged then, and `finish_step`, which follows, takes the step.
        """
        self.prepare_step()
        self.apply_accumulation(apply_flag, grad_scale, whole)

    @torch.no_grad()
    def apply_accumulation(
        self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None, whole: bool = True
    ) -> None:
        """Device side of `accumulate_step`: launches only. `prepare_step` comes before each, replayed or not;
        so is `finish_step` launches only, without `mean` and without a rate of the local step's own.
        """
        flag = None if apply_flag is None else apply_flag.to(self._device)
        self._table.select(flag, None if grad_scale is None else grad_scale.to(self._device))
        self._rng[1] = self._table.count
        if self.capture is not None:
            first = self._table.tables()[0][0]
            self.capture.refresh(first[0], first[3])
        for family, hyper in zip(self._families, self._table.tables()):
            if split.splits(family.rule):
                if items := self._items(family):
                    if isinstance(family.rule, StateGlobalRule):
                        family.elementwise(family.rule, items, hyper, self._rng, self._nonfinite)
                    else:
                        split.accumulate(family.rule, items, hyper)
                    release(items)
            elif whole:
                self._update_family(family, hyper)
            elif grad_scale is not None:
                for entry in family.entries:
                    if entry.param.grad is not None:
                        local_tensor(entry.param.grad).mul_(hyper[entry.hyper_row, 3])
        self._whole_steps_wait = not whole

    @torch.no_grad()
    def finish_step(self, local: split.LocalStep | None = None, mean: Mean | None = None) -> None:
        """Second half: U of the rules that split, or `local` in its place; gradients are as in the first.

        mean: overwrites tensors with their mean over replicas. If given, the momenta that can be reduced by
            their factors (`ReplicatedTensor.factored`) are not averaged yet, and U is of their mean.
        After a local step without U, a rule whose U decays the momentum (error feedback) has it decayed here:
        the momentum then is M <- mu M + G throughout.
        """
        tables = self._table.tables()
        for family, hyper in zip(self._families, tables):
            if not split.splits(family.rule):
                if self._whole_steps_wait:
                    hyper = hyper.clone()
                    hyper[:, 3] = 1.0  # the scale is in the gradients
                    self._update_family(family, hyper)
                continue
            if local is not None and local.lr is not None:
                hyper = hyper.clone()
                hyper[:, 1] = local.lr * self._lr_factor
            items = self._items(family)
            if local is None or local.kind == "orthonormal":
                self._update_weights(family, items, hyper, mean)
                release(items)
                continue
            for item in items:
                split.step_along(local, item, hyper[item.hyper_row])
            if family.rule.u_writes_state:
                for item in items:
                    factor = family.groups[item.hyper_row].options["momentum"]
                    item.states[0].values.mul_(torch.where(hyper[item.hyper_row, 0] != 0, factor, 1.0))
            release(items)
        self._table.advance(tables[0][0, 0])

    @property
    def finishes_if(self) -> bool:
        """Whether `finish_step_if` may be called. Not with Dobb, whose captures the host keeps account of."""
        return self.capture is None

    @torch.no_grad()
    def finish_step_if(self, condition: Tensor, local: split.LocalStep) -> None:
        """`finish_step(local)` if the device finds the condition true, else nothing; launches either way, so
        that the host need not know which by now.

        condition: scalar on the device, not 0 for true, the same on all ranks of a replica. Where it is 0
            weights, states and the step count keep their bits, as in a step that is not applied, gradients
            stay, and another `finish_step` is to follow. Where it is not, the step is over.
        """
        with self._table.only_if(condition):
            self.finish_step(local)

    def replicated_tensors(self) -> list[split.ReplicatedTensor]:
        """Weights and states, live and local, in one order on every rank.

        Raises ValueError for what has no mean over replicas: states stored as codes, weights that are rounded
        at random.
        """
        return split.replicated_tensors(self._families)

    def watch_momenta(self) -> tuple[list[str], Tensor]:
        """Have `accumulate_step` leave sums of squares of momenta: see `split.watch_momenta`. Call it before
        it is captured; another call returns the same tensor.
        """
        if self._watched is None:
            self._watched = split.watch_momenta(self._families)
        return self._watched

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the fp32 masters into the weights, after the masters were changed from outside."""
        write_copies([entry.item() for entry in self._all_entries()])

    def _update_gathered(
        self, rule: StateGlobalRule, family: Family, items: list[LocalWeight], hyper: Tensor
    ) -> list[LocalWeight]:
        """U of the sharded weights of a rule that gathers; returns the weights that are left."""
        entries = self._entries(family)
        sharded = [entry for entry in entries if rule.u_gathers and is_cut(entry.param, rule.u_dims)]
        if not sharded:
            return items
        for row in range(len(family.groups)):
            if members := [entry for entry in sharded if entry.hyper_row == row]:
                known = family.sharded.setdefault((row, False), KnownShards(self.stacks_momenta))
                update_sharded(rule, members, hyper[row], self.links.record, known)
        names = {entry.name for entry in sharded}
        return [entry.current() for entry in entries if entry.name not in names]

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Take the fp32 copies from the weights: after weights were loaded without their optimizer states."""
        for entry in self._all_entries():
            entry.take_master()

    def _all_entries(self) -> list[Entry]:
        return [entry for family in self._families for entry in family.entries]

    def plain_state(self) -> dict[str, float]:
        """Numbers beside the states that a resumed run needs."""
        return {}

    def load_plain_state(self, saved: Mapping[str, Any]) -> None:
        """Take over saved numbers; those of other engines are left alone."""

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, by parameter name: the same keys on every rank.

        step: int64 scalar; state: {parameter: {slot: tensor}}; rule: {rule name: 1}, so that a checkpoint of
        another rule is named even where its states look alike.
        """
        return {
            "step": self._table.count,
            "state": {entry.name: entry.saved() for entry in self._all_entries()},
            "rule": {group.rule.name: torch.ones((), dtype=torch.int64) for group in self.groups},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over saved states, in place. Raises ValueError, and changes nothing, if they do not fit."""
        if missing := {"step", "state", "rule"} - state_dict.keys():
            raise ValueError(
                f"optimizer state: {sorted(missing)} missing; this is no state of this optimizer"
            )
        check_rules([group.rule for group in self.groups], state_dict["rule"])
        own = {entry.name: entry.saved() for entry in self._all_entries()}
        rule_of = {name: group.rule for group in self.groups for name in group.names}
        load_states(own, state_dict["state"], rule_of)
        self._table.count.copy_(torch.as_tensor(state_dict["step"]))
        self._table.invalidate()
        if self.capture is not None:
            self.capture.loaded()
        self._fp8.calibrated |= int(self._table.count) > 0
