"""Hooks that add up block second moments of what linears and experts read (side A) or of their output
gradients (side G): in place, with nothing retained (Dobb, appendix B).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanforge.kernels.outer_products import add_outer_products
from titanforge.optim.dobb.rule import Dobb
from titanforge.optim.param_groups import ParamGroupSpec, clean_name

_SUMS = ("_second_moment_{}", "_positions_{}", "_captures_{}")
_HOOKED = "_second_moment_side"


def _in_backward() -> bool:
    """Activation checkpointing computes a forward again there, whose inputs were counted before."""
    return torch._C._current_graph_task_id() != -1


def _add_second_moment(total: Tensor, count: Tensor, gate: Tensor, x: Tensor) -> None:
    """total [B, w, w] += the block second moments of x [..., B w], count += its positions.

    Within backward, and where gate (a bool scalar on the CPU) is False, it does nothing. It is a tensor
    because compiled code must not depend on it: a block that is computed again in backward has to save what
    it saved before, and so has to run the code that it ran before.
    """
    if bool(gate) and not _in_backward():
        add_outer_products(total, count, x)


# For compiled code. Elsewhere the dispatch alone would cost the host 0.07 ms at each linear.
add_second_moment = torch.library.custom_op(
    "titanforge::add_second_moment", _add_second_moment, mutates_args=("total", "count")
)


@add_second_moment.register_fake
def _(total: Tensor, count: Tensor, gate: Tensor, x: Tensor) -> None:
    return None


def _add_expert_second_moments(total: Tensor, count: Tensor, gate: Tensor, x: Tensor, ends: Tensor) -> None:
    """As `add_second_moment`, for rows x [S, B w] sorted by expert: total [E, B, w, w], count [E].

    ends: int32 [E], the row after each expert's last.
    """
    if bool(gate) and not _in_backward():
        accumulate_experts(total, count, x, ends)


add_expert_second_moments = torch.library.custom_op(
    "titanforge::add_expert_second_moments", _add_expert_second_moments, mutates_args=("total", "count")
)


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
        add_outer_products(total[expert], nobody, x[begin:end])
        begin = end


@torch.library.custom_op("titanforge::add_gradient_second_moment", mutates_args=("total", "count"))
def add_gradient_second_moment(total: Tensor, count: Tensor, gate: Tensor, gradient: Tensor) -> None:
    """As `add_second_moment`, in the backward of an output [..., B w]."""
    if bool(gate):
        add_outer_products(total, count, gradient)


@add_gradient_second_moment.register_fake
def _(total: Tensor, count: Tensor, gate: Tensor, gradient: Tensor) -> None:
    return None


@torch.library.custom_op("titanforge::add_expert_gradient_second_moments", mutates_args=("total", "count"))
def add_expert_gradient_second_moments(
    total: Tensor, count: Tensor, gate: Tensor, gradient: Tensor, ends: Tensor
) -> None:
    """As `add_expert_second_moments`, in the backward of outputs [S, B w]."""
    if bool(gate):
        accumulate_experts(total, count, gradient, ends)


@add_expert_gradient_second_moments.register_fake
def _(total: Tensor, count: Tensor, gate: Tensor, gradient: Tensor, ends: Tensor) -> None:
    return None


class _Observed(torch.autograd.Function):
    """An output as it is, whose gradient is captured: in compiled code, where tensors have no hooks.

    ends: of experts, else None.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, total: Tensor, count: Tensor, gate: Tensor, ends: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(total, count, gate, ends)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        total, count, gate, ends = ctx.saved_tensors
        if ends is None:
            add_gradient_second_moment(total, count, gate, gradient)
        else:
            add_expert_gradient_second_moments(total, count, gate, gradient, ends)
        return gradient, None, None, None, None


def _sums_of(module: nn.Module, attribute: str) -> tuple[Tensor, Tensor, Tensor] | None:
    """Sum of outer products, count of positions and gate, or None while nothing is captured."""
    total = getattr(module, f"_second_moment_{attribute}")
    if total is None:  # nearly always, for every linear
        return None
    return total, getattr(module, f"_positions_{attribute}"), getattr(module, f"_captures_{attribute}")


def _capture_input(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    sums = _sums_of(module, "weight")
    if sums is not None and module.training:
        x = inputs[0].detach()
        # On the tensor axis: the whole input, or this rank's columns of it.
        add = add_second_moment if torch.compiler.is_compiling() else _add_second_moment
        add(*sums, x.to_local() if isinstance(x, DTensor) else x)


def _capture_output_gradient(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    return _watched_output(module, "weight", output, None)


def _watched_output(module: nn.Module, attribute: str, output: Tensor, ends: Tensor | None) -> Tensor | None:
    """What takes the output's place; None: it stays, with a hook on its gradient if anything is captured."""
    sums = _sums_of(module, attribute)
    if sums is None or not module.training or not output.requires_grad:
        return None
    if torch.compiler.is_compiling():
        return _Observed.apply(output, *sums, ends)  # pyright: ignore[reportReturnType]
    if not _in_backward():
        reader = Reader(module, attribute)
        output.register_hook(lambda gradient: reader.gradient_seen(*sums, gradient, ends))
    return None


def _observed_product(module: Any, inner: Any, side: str, x: Tensor, weight: str, ends: Tensor) -> Tensor:
    """`module.product`, captured. inner: what had taken its place before; classes may yet be changed."""
    found = type(module).product(module, x, weight, ends) if inner is None else inner(x, weight, ends)
    if side == "G":
        watched = _watched_output(module, weight, found, ends)
        return found if watched is None else watched
    sums = _sums_of(module, weight)
    if sums is not None and module.training:
        add = add_expert_second_moments if torch.compiler.is_compiling() else _add_expert_second_moments
        add(*sums, x.detach(), ends)
    return found


@dataclass(frozen=True)
class Reader:
    """The module that reads a weight, and under which attribute; where its hook finds what to add to.

    runs_again: in backward, as compiled code (a block of `apply_compile(recompute_outside=True)`).
    """

    module: nn.Module
    attribute: str = "weight"
    runs_again: bool = False

    def open(self, total: Tensor, count: Tensor, gate: Tensor) -> None:
        """Capture into these from now on, while gate (bool scalar on the CPU) is True."""
        self._set(total, count, gate)

    def close(self) -> None:
        """Capture no more, in code that knows nothing of it."""
        # Setting an attribute of a module is slow, and all readers are closed twice in a refresh step.
        if self.module.__dict__.get(_SUMS[0].format(self.attribute), self) is not None:
            self._set(None, None, None)

    def _set(self, *values: Tensor | None) -> None:
        for form, value in zip(_SUMS, values):
            setattr(self.module, form.format(self.attribute), value)

    def when_gradient_seen(self, then: Callable[[], None] | None) -> None:
        """Call this after each output gradient that was added by a hook (side G, not in compiled code)."""
        self.module.__dict__[f"_gradient_seen_{self.attribute}"] = then

    def gradient_seen(
        self, total: Tensor, count: Tensor, gate: Tensor, gradient: Tensor, ends: Tensor | None
    ) -> None:
        """The hook on an output's gradient."""
        if not bool(gate):
            return
        if ends is None:
            add_outer_products(total, count, gradient)
        else:
            accumulate_experts(total, count, gradient, ends)
        then = self.module.__dict__.get(f"_gradient_seen_{self.attribute}")
        if then is not None:
            then()


def find_readers(model: nn.Module, groups: Sequence[ParamGroupSpec]) -> dict[str, Reader]:
    """The linears and experts that read weights under Dobb, by weight name; `install_hooks` changes them.

    Experts are modules with `grouped_weights`, read by their `product(x, weight, ends)`. Nobody is wanted
    where statistics come from gradients. Raises ValueError for a weight that neither reads.
    """
    readers: dict[str, Reader] = {}
    recomputed = [module for module in model.modules() if "compiled_forward" in module.__dict__]
    again = {part for module in recomputed for part in module.modules()}
    for module_name, module in model.named_modules():
        attributes = ("weight",) if isinstance(module, nn.Linear) else getattr(module, "grouped_weights", ())
        for attribute in attributes:
            readers[clean_name(f"{module_name}.{attribute}".lstrip("."))] = Reader(
                module, attribute, module in again
            )
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
    return found


def install_hooks(readers: Mapping[str, Reader], groups: Sequence[ParamGroupSpec]) -> None:
    """Put Dobb's hooks, idle as yet, on what `find_readers` has found; before anything is compiled or run."""
    for group in groups:
        for name in group.names:
            if isinstance(group.rule, Dobb) and name in readers:
                _hook(readers[name], group.rule.dobb.side)


def _hook(reader: Reader, side: str) -> None:
    module = reader.module
    if not hasattr(module, _SUMS[0].format(reader.attribute)):
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
