"""Hooks that add up block second moments of what linears and experts read (side A) or of their output
gradients (side G): in place, with nothing retained (Dobb, appendix B).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanforge.optim.dobb.rule import Dobb
from titanforge.optim.param_groups import ParamGroupSpec, clean_name

_TOTAL, _COUNT, _GATE, _HOOKED = "_second_moment_{}", "_positions_{}", "_captures_{}", "_second_moment_side"


def _in_backward() -> bool:
    """Activation checkpointing computes a forward again there, whose inputs were counted before."""
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("titanforge::add_second_moment", mutates_args=("total", "count"))
def add_second_moment(total: Tensor, count: Tensor, gate: Tensor, x: Tensor) -> None:
    """total [B, w, w] += the block second moments of x [..., B w], count += its positions.

    Products are formed in x's dtype. Within backward, and where gate (a bool scalar on the CPU) is False, it
    does nothing. It is a tensor because compiled code must not depend on it: a block that is computed again
    in backward has to save what it saved before, and so has to run the code that it ran before.
    """
    if bool(gate) and not _in_backward():
        accumulate(total, count, x)


@add_second_moment.register_fake
def _(total: Tensor, count: Tensor, gate: Tensor, x: Tensor) -> None:
    return None


def accumulate(total: Tensor, count: Tensor, x: Tensor) -> None:
    """What `add_second_moment` does, wherever it is called."""
    blocks = x.reshape(-1, total.shape[0], total.shape[1]).transpose(0, 1)  # [B, N, w]
    if blocks.dtype == total.dtype:
        total.baddbmm_(blocks.mT, blocks)
    else:
        total += torch.bmm(blocks.mT, blocks)
    count += blocks.shape[1]


@torch.library.custom_op("titanforge::add_expert_second_moments", mutates_args=("total", "count"))
def add_expert_second_moments(total: Tensor, count: Tensor, gate: Tensor, x: Tensor, ends: Tensor) -> None:
    """As `add_second_moment`, for rows x [S, B w] sorted by expert: total [E, B, w, w], count [E].

    ends: int32 [E], the row after each expert's last.
    """
    if bool(gate) and not _in_backward():
        accumulate_experts(total, count, x, ends)


@add_expert_second_moments.register_fake
def _(total: Tensor, count: Tensor, gate: Tensor, x: Tensor, ends: Tensor) -> None:
    return None


def accumulate_experts(total: Tensor, count: Tensor, x: Tensor, ends: Tensor) -> None:
    """What `add_expert_second_moments` does, wherever it is called. bfloat16 on CUDA does not wait for
    `ends`; anything else does.
    """
    blocks, width = total.shape[1:3]
    count += torch.diff(ends, prepend=ends.new_zeros(1))
    if x.is_cuda and x.dtype == torch.bfloat16 and width % 8 == 0:  # rows of 16 bytes, as the product wants
        for b in range(blocks):
            part = x[:, b * width : (b + 1) * width]
            total[:, b] += F.grouped_mm(part.mT, part, offs=ends)
        return
    begin, nobody = 0, torch.zeros((), device=x.device)
    for expert, end in enumerate(ends.tolist()):
        accumulate(total[expert], nobody, x[begin:end])
        begin = end


def _capture_input(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    m: Any = module
    if m._second_moment_weight is not None and m.training:
        add_second_moment(
            m._second_moment_weight, m._positions_weight, m._captures_weight, inputs[0].detach()
        )


def _capture_output_gradient(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    reader = Reader(module, "weight")
    total, count = reader.sums
    if total is None or count is None or not module.training or not output.requires_grad:
        return
    if not _in_backward():
        output.register_hook(lambda gradient: reader.gradient_seen(accumulate, total, count, gradient))


def _observed_product(module: Any, inner: Any, side: str, x: Tensor, weight: str, ends: Tensor) -> Tensor:
    """`module.product`, captured. inner: what had taken its place before; classes may yet be changed."""
    found = type(module).product(module, x, weight, ends) if inner is None else inner(x, weight, ends)
    total, count = getattr(module, f"_second_moment_{weight}"), getattr(module, f"_positions_{weight}")
    if total is None or not module.training:
        return found
    if side == "A":
        gate = getattr(module, f"_captures_{weight}")
        add_expert_second_moments(total, count, gate, x.detach(), ends)
    elif found.requires_grad and not _in_backward():
        reader = Reader(module, weight)
        add = functools.partial(accumulate_experts, ends=ends)
        found.register_hook(lambda gradient: reader.gradient_seen(add, total, count, gradient))
    return found


@dataclass(frozen=True)
class Reader:
    """The module that reads a weight, and under which attribute; where its hook finds what to add to."""

    module: nn.Module
    attribute: str = "weight"

    @property
    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        """Sum of outer products and count of positions, or None while nothing is captured."""
        return (
            getattr(self.module, _TOTAL.format(self.attribute)),
            getattr(self.module, _COUNT.format(self.attribute)),
        )

    def open(self, total: Tensor, count: Tensor, gate: Tensor) -> None:
        """Capture into these from now on, while gate (bool scalar on the CPU) is True."""
        self._set(total, count, gate)

    def close(self) -> None:
        """Capture no more, in code that knows nothing of it."""
        self._set(None, None, None)

    def _set(self, *values: Tensor | None) -> None:
        for form, value in zip((_TOTAL, _COUNT, _GATE), values):
            setattr(self.module, form.format(self.attribute), value)

    def when_gradient_seen(self, then: Callable[[], None] | None) -> None:
        """Call this after each output gradient that was added (side G)."""
        self.module.__dict__[f"_gradient_seen_{self.attribute}"] = then

    def gradient_seen(self, add: Callable[..., None], total: Tensor, count: Tensor, gradient: Tensor) -> None:
        add(total, count, gradient)
        then = self.module.__dict__.get(f"_gradient_seen_{self.attribute}")
        if then is not None:
            then()


def install_hooks(model: nn.Module, groups: Sequence[ParamGroupSpec]) -> dict[str, Reader]:
    """Put Dobb's hooks, idle as yet, on the linears and experts that read weights under Dobb; before anything
    is compiled or run. Returns who reads what, by weight name.

    Experts are modules with `grouped_weights`, read by their `product(x, weight, ends)`. Nothing is hooked
    where statistics come from gradients. Raises ValueError for a weight that neither reads.
    """
    readers: dict[str, Reader] = {}
    for module_name, module in model.named_modules():
        attributes = ("weight",) if isinstance(module, nn.Linear) else getattr(module, "grouped_weights", ())
        for attribute in attributes:
            readers[clean_name(f"{module_name}.{attribute}".lstrip("."))] = Reader(module, attribute)
    found: dict[str, Reader] = {}
    for group in groups:
        if not isinstance(group.rule, Dobb) or group.rule.dobb.source == "gradient":
            continue
        for name, param in zip(group.names, group.params):
            if name not in readers:
                raise ValueError(
                    f'optimizer.name = "dobb" captures what a linear layer or experts read, and {name!r} '
                    f"{tuple(param.shape)} belongs to neither: take another optimizer.name, or "
                    'optimizer.dobb.source = "gradient"'
                )
            found[name] = readers[name]
            _hook(readers[name], group.rule.dobb.side)
    return found


def _hook(reader: Reader, side: str) -> None:
    module = reader.module
    if not hasattr(module, _TOTAL.format(reader.attribute)):
        reader.close()
    there = module.__dict__.get(_HOOKED)
    if there is not None:
        if there[0] == side:
            return  # by an earlier optimizer of this model, or for another weight of these experts
        there[1]()
    if isinstance(module, nn.Linear):
        hook = _capture_input if side == "A" else _capture_output_gradient
        remove = module.register_forward_hook(hook).remove
    else:
        inner = module.__dict__.get("product")
        module.__dict__["product"] = functools.partial(_observed_product, module, inner, side)
        remove = functools.partial(_restore_product, module, inner)
    module.__dict__[_HOOKED] = (side, remove)


def _restore_product(module: nn.Module, inner: Any) -> None:
    if inner is None:
        del module.__dict__["product"]
    else:
        module.__dict__["product"] = inner
