"""torch.optim as the baseline arm, behind the interface of `RuleOptimizer`.

The torch optimizer works on the local tensors, so every implementation runs with sharded weights. States
carry the names of our own rules: a checkpoint of one arm can be resumed by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from titanforge.kernels.codecs import plain_codec
from titanforge.optim.elementwise import SGD
from titanforge.optim.links import DataLinks
from titanforge.optim.owners import OwnedWeights
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.placement import address_of, local_tensor
from titanforge.optim.rule import UpdateRule
from titanforge.optim.states import check_rules, load_states, new_state

_SLOT_NAMES = {"m": "exp_avg", "v": "exp_avg_sq"}
BASELINE_RULES = ("adam", "adamw", "sgd")


class TorchOptimizer:
    """torch.optim.AdamW, Adam or SGD in one of torch's implementations.

    groups: every trainable parameter once, all of one rule.
    implementation: `fused` honours the apply flag and the gradient scale on the device, inside the update;
        `foreach` and `for-loop` have no such inputs: they wait for the flag on the host and scale the
        gradients in a pass of their own.
    A parameter without gradient is left alone, as torch.optim does.
    """

    splits_steps: ClassVar[bool] = False
    capturable: ClassVar[bool] = False
    usual_step: ClassVar[bool] = True

    def __init__(self, groups: Sequence[ParamGroupSpec], implementation: str) -> None:
        self.groups = list(groups)
        rules = {group.rule.name: group.rule for group in self.groups}
        if len(rules) != 1 or next(iter(rules)) not in BASELINE_RULES:
            raise ValueError(
                f"optimizer.implementation = {implementation!r} has no optimizer.name = {'/'.join(rules)!r}; "
                f'take one of {", ".join(BASELINE_RULES)}, or optimizer.implementation = "native"'
            )
        self.implementation = implementation
        self._fused = implementation == "fused"
        (self._rule,) = rules.values()
        self._params = [
            (name, param) for group in self.groups for name, param in zip(group.names, group.params)
        ]
        self._owned = OwnedWeights(self.groups)
        self._device = self._params[0][1].device
        self._locals = [local_tensor(param.detach()) for _, param in self._params]
        self._optimizer = self._build(self._rule)
        self._count = torch.zeros((), dtype=torch.int64, device=self._device)
        self._states = self._complete_states()
        self._lr_factor = 1.0

    def _build(self, rule: UpdateRule) -> torch.optim.Optimizer:
        locals_of = dict(zip((id(param) for _, param in self._params), self._locals))
        torch_groups = []
        for group in self.groups:
            options: dict[str, Any] = {
                "lr": group.options["lr"],
                "weight_decay": group.options["weight_decay"],
            }
            if isinstance(rule, SGD):
                options["momentum"] = group.options["momentum"]
                options["nesterov"] = rule.use_momentum and rule.u_reads_gradient
            else:
                options["betas"] = (group.options["beta1"], group.options["beta2"])
                options["eps"] = group.options["eps"]
            torch_groups.append({"params": [locals_of[id(param)] for param in group.params], **options})
        kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        forms = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
        return kinds[rule.name](torch_groups, lr=1e-3, **forms[self.implementation])

    def _complete_states(self) -> dict[str, dict[str, Tensor]]:
        # torch makes states at the first step; a checkpoint must find them before it.
        states: dict[str, dict[str, Tensor]] = {}
        rule = self.groups[0].rule
        for (name, param), local in zip(self._params, self._locals):
            own = {slot.name: new_state(param, slot, plain_codec(param.dtype)).values for slot in rule.slots}
            states[name] = own
            if isinstance(rule, SGD):
                if rule.use_momentum:
                    self._optimizer.state[local] = {"momentum_buffer": local_tensor(own["m"])}
                continue
            step_device = self._device if self._fused else torch.device("cpu")
            self._optimizer.state[local] = {
                "step": torch.zeros((), dtype=torch.float32, device=step_device),
                **{_SLOT_NAMES[slot]: local_tensor(tensor) for slot, tensor in own.items()},
            }
        return states

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's groups, over local tensors, with the current learning rate."""
        return self._optimizer.param_groups

    @property
    def step_count(self) -> Tensor:
        """Steps applied so far: an int64 scalar on the device."""
        return self._count

    def set_lr(self, factor: float) -> None:
        """Set each group's learning rate to `factor` times its peak, from the next step on."""
        for group, torch_group in zip(self.groups, self._optimizer.param_groups):
            torch_group["lr"] = group.options["lr"] * factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or fill them with zeros."""
        for _, param in self._params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                local_tensor(param.grad).zero_()

    def begin_step(self, num_micro_batches: int) -> None:
        """As `RuleOptimizer.begin_step`."""

    def before_backward(self, micro_batch_index: int, apply_flag: Tensor | None = None) -> None:
        """As `RuleOptimizer.before_backward`."""

    def begin_captured_step(self, num_micro_batches: int) -> None:
        """Raises ValueError: the learning rate is a number on the host, which a captured step would keep."""
        raise ValueError(
            'compile.cuda_graph = true needs optimizer.implementation = "native", '
            f"not {self.implementation!r}"
        )

    def clip(
        self, from_gradients: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor | None, Tensor | None]:
        """As `RuleOptimizer.clip`."""
        return from_gradients()

    def connect(self, links: DataLinks) -> None:
        """Nothing is needed of other ranks."""

    def report(self) -> str:
        """As `RuleOptimizer.report`."""
        return ""

    def metrics(self) -> dict[str, Tensor]:
        """As `RuleOptimizer.metrics`."""
        return {}

    def plain_state(self) -> dict[str, float]:
        """As `RuleOptimizer.plain_state`."""
        return {}

    def load_plain_state(self, saved: Mapping[str, Any]) -> None:
        """As `RuleOptimizer.load_plain_state`."""

    @torch.no_grad()
    def step(self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """Update in place; see `RuleOptimizer.step`. `foreach` and `for-loop` wait for `apply_flag`."""
        self._owned.check()
        if not self._fused and apply_flag is not None and not bool(apply_flag):
            return
        gradients = []
        for (_, param), local in zip(self._params, self._locals):
            if address_of(param) != local.data_ptr():  # it has moved, as padded shards do that FSDP loads
                local.data = local_tensor(param.detach())
            local.grad = None if param.grad is None else local_tensor(param.grad)
            if local.grad is not None and local.numel() > 0:
                gradients.append(local.grad)
        optimizer: Any = self._optimizer
        if self._fused:
            # The inputs torch's GradScaler uses; the kernel divides by the scale.
            optimizer.found_inf = (
                None if apply_flag is None else (apply_flag == 0).to(self._device, torch.float32)
            )
            optimizer.grad_scale = (
                None if grad_scale is None else grad_scale.to(self._device).float().reciprocal()
            )
        elif grad_scale is not None and gradients:
            torch._foreach_mul_(gradients, grad_scale.to(self._device))  # pyright: ignore[reportPrivateImportUsage]
        optimizer.step()
        for local in self._locals:
            local.grad = None
        self._count += 1 if apply_flag is None else (apply_flag != 0).to(self._device, torch.int64)

    def apply_step(self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """As `step`."""
        self.step(apply_flag, grad_scale)

    def refresh_master_weights(self) -> None:
        """There are none."""

    def state_dict(self) -> dict[str, Any]:
        """As `RuleOptimizer.state_dict`."""
        return {
            "step": self._count,
            "state": self._states,
            "rule": {self._rule.name: torch.ones((), dtype=torch.int64)},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `RuleOptimizer.load_state_dict`."""
        check_rules([self._rule], state_dict.get("rule", {}))
        load_states(self._states, state_dict["state"], {name: self._rule for name, _ in self._params})
        self._count.copy_(torch.as_tensor(state_dict["step"]))
        for local in self._locals:
            if "step" in self._optimizer.state[local]:
                self._optimizer.state[local]["step"].copy_(self._count)
