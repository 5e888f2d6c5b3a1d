"""The ordinary optimizer engine: gradients are complete in `.grad`, and a step goes over all weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanforge.optim.hyper_table import HyperTable
from titanforge.optim.local_update import (
    LocalWeight,
    update_elementwise,
    update_layers,
    update_state_global,
)
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.rule import ElementwiseRule, LocalStateRule, StateGlobalRule, UpdateRule
from titanforge.optim.states import MASTER_SLOT, load_states, local_tensor, new_state, refuse_sharded

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class _Entry:
    """One parameter with its states; `master` is the fp32 weight behind a bfloat16 one."""

    name: str
    param: nn.Parameter
    states: dict[str, Tensor]
    master: Tensor | None

    def saved(self) -> dict[str, Tensor]:
        return self.states if self.master is None else {**self.states, MASTER_SLOT: self.master}


class RuleOptimizer:
    """Applies one update rule per group to the gradients in `.grad`.

    Every parameter's states exist from the start, so checkpoints have the same keys on every rank and can be
    read in place. A parameter without gradient counts as one with a zero gradient: its states decay and its
    weight decay is applied, as for an expert that no token reached (FORGE, remark 1). States of a distributed
    parameter are DTensors of its placement; updates run on the local parts, which may be empty.

    groups: every trainable parameter once (see `build_param_groups`).
    state_dtype: storage of the states that have the weight's shape; statistics stay float32.
    master_weights: `float32` keeps an fp32 copy of each bfloat16 weight, which the rule updates.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroupSpec],
        *,
        state_dtype: str = "float32",
        master_weights: str = "none",
    ) -> None:
        if state_dtype not in STATE_DTYPES:
            raise ValueError(
                f"optimizer.state_dtype = {state_dtype!r} is not supported by the unfused engine; "
                f"valid: {', '.join(STATE_DTYPES)}"
            )
        if master_weights not in ("none", "float32"):
            raise ValueError(
                f"optimizer.master_weights = {master_weights!r} is not supported by the unfused engine; "
                "valid: none, float32"
            )
        self.groups = list(groups)
        devices = {param.device for group in self.groups for param in group.params}
        if len(devices) != 1:
            raise ValueError(
                f"one optimizer needs all weights on one device, not on {sorted(map(str, devices))}"
            )
        self._device = devices.pop()
        if self._device.type == "meta":
            raise ValueError("build the optimizer after the model has been given memory (it is on meta)")
        dtype = STATE_DTYPES[state_dtype]
        self._entries = [
            [self._new_entry(group.rule, name, param, dtype, master_weights) for name, param in _named(group)]
            for group in self.groups
        ]
        self._table = HyperTable([(group.rule, group.options) for group in self.groups], self._device)
        self._lr_factor = 1.0

    @staticmethod
    def _new_entry(
        rule: UpdateRule, name: str, param: nn.Parameter, dtype: torch.dtype, master_weights: str
    ) -> _Entry:
        refuse_sharded(rule, name, param, "optimizer.name")
        states = {slot.name: new_state(param, slot, dtype) for slot in rule.slots_for(param.shape)}
        needs_master = master_weights == "float32" and param.dtype != torch.float32
        return _Entry(name, param, states, param.detach().float() if needs_master else None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups in torch.optim's form, with the current learning rate."""
        return [
            {"name": group.name, "names": group.names, "params": group.params, **group.options, "lr": lr}
            for group, lr in zip(self.groups, self._lrs())
        ]

    @property
    def step_count(self) -> Tensor:
        """Steps applied so far: an int64 scalar on the device."""
        return self._table.count

    def set_lr(self, factor: float) -> None:
        """Set each group's learning rate to `factor` times its peak, from the next step on."""
        self._lr_factor = factor

    def _lrs(self) -> list[float]:
        return [group.options["lr"] * self._lr_factor for group in self.groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or fill them with zeros."""
        for entry in self._all_entries():
            if set_to_none:
                entry.param.grad = None
            elif entry.param.grad is not None:
                local_tensor(entry.param.grad).zero_()

    @torch.no_grad()
    def step(self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """Update all weights and states in place.

        apply_flag: scalar on the device; where 0, weights, states and the step count keep their bits. It must
            be the same on all ranks.
        grad_scale: scalar on the device that multiplies every gradient (the clip factor).
        The host never waits for the device, but for one read of the step count every few hundred steps.
        """
        if self._device.type == "cpu" and apply_flag is not None and not bool(apply_flag):
            return  # the flag is in host memory anyway
        self.prepare_step()
        self.apply_step(apply_flag, grad_scale)

    def prepare_step(self) -> None:
        """Host side of `step`: call it before each replay of a graph that captured `apply_step`."""
        self._table.prepare(self._lrs())

    @torch.no_grad()
    def apply_step(self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """Device side of `step`: launches only, so that it can be captured in a CUDA graph."""
        flag = None if apply_flag is None else apply_flag.to(self._device)
        self._table.select(flag, None if grad_scale is None else grad_scale.to(self._device))
        for group, entries, h in zip(self.groups, self._entries, self._table.vectors()):
            self._update_group(group.rule, entries, h)
        self._table.advance(flag)

    def _update_group(self, rule: UpdateRule, entries: Sequence[_Entry], h: Tensor) -> None:
        items = [item for entry in entries if (item := _local_item(entry)).weight.numel() > 0]
        if not items:
            return
        if isinstance(rule, LocalStateRule):
            update_elementwise(rule, items, h)
        if isinstance(rule, StateGlobalRule):
            update_state_global(rule, items, h)
        elif not isinstance(rule, ElementwiseRule):
            update_layers(rule, items, h)
        masters = [
            (local_tensor(entry.param), local_tensor(entry.master))
            for entry in entries
            if entry.master is not None
        ]
        if masters:
            torch._foreach_copy_([weight for weight, _ in masters], [master for _, master in masters])  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Take the fp32 copies from the weights: after weights were loaded without their optimizer states."""
        for entry in self._all_entries():
            if entry.master is not None:
                local_tensor(entry.master).copy_(local_tensor(entry.param))

    def _all_entries(self) -> list[_Entry]:
        return [entry for entries in self._entries for entry in entries]

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
        ours, theirs = {group.rule.name for group in self.groups}, set(state_dict["rule"])
        if ours != theirs:
            raise ValueError(
                f"the checkpoint was written with optimizer rule {sorted(theirs)}, this run uses "
                f"{sorted(ours)}: set optimizer.name back, or leave the states out with "
                'checkpoint.exclude_from_loading = ["optimizer"]'
            )
        own = {entry.name: entry.saved() for entry in self._all_entries()}
        rule_of = {name: group.rule.name for group in self.groups for name in group.names}
        load_states(own, state_dict["state"], rule_of)
        self._table.count.copy_(torch.as_tensor(state_dict["step"]))
        self._table.invalidate()


def _named(group: ParamGroupSpec) -> list[tuple[str, nn.Parameter]]:
    return list(zip(group.names, group.params))


def _local_item(entry: _Entry) -> LocalWeight:
    weight = local_tensor(entry.param if entry.master is None else entry.master)
    gradient = None if entry.param.grad is None else local_tensor(entry.param.grad)
    return LocalWeight(
        weight.detach(), gradient, tuple(local_tensor(state) for state in entry.states.values())
    )
