"""Linears of one module that read the same input, multiplied as one: q, k and v, or gate and up.

Their weights are laid one below the other in memory, and each stays the parameter that it was. Forward and
the input's gradient then take one product where they took two or three; the partial gradients of the input
are summed in that product's accumulator, not in the model's dtype. Each weight keeps its own sink: what is
done with its own gradient, and every bit of that, does not depend on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from titanforge.forge.adjacent import adjacent_parts
from titanforge.forge.coverage import Covered
from titanforge.forge.plan import ParamPlan

_ARGUMENTS = ("self", "x", "names")


@dataclass(frozen=True)
class Group:
    """module: the linears' parent. attributes: theirs in it. names: their weights'."""

    module: nn.Module
    attributes: tuple[str, ...]
    names: tuple[str, ...]


def groups_of_linears(
    model: nn.Module,
    covered: Mapping[str, Covered],
    plans: Mapping[str, ParamPlan],
    apart: Collection[str] = (),
) -> list[Group]:
    """Every group that can be multiplied as one. Changes nothing; the model may be on meta.

    A module with such groups lists the attributes of their linears in `projections` and reads them through
    `project(x, names)`; what other classes mean by these two names is left alone. apart: names of weights
    whose linears are called one by one.

    A group is left alone if one of its linears is not fused as a plain product on one device, has a bias or a
    hook, or if its weights differ in dtype, device or columns. Whether a module lets its class be replaced
    is `with_willing_owners`' to say.
    """
    fused = {
        id(owner.module): name
        for name, owner in covered.items()
        if owner.placement.kind == "linear"
        and plans[name].fused
        and not plans[name].by_hook
        and name not in apart
    }
    return [
        Group(module, attributes, tuple(fused[id(one)] for one in linears))
        for module, attributes, linears in _candidates(model)
        if all(id(one) in fused for one in linears) and _can_merge(linears)
    ]


@torch.no_grad()
def lay_side_by_side(groups: Sequence[Group], covered: Mapping[str, Covered]) -> list[Tensor]:
    """Move the weights of each group: all of them, [sum of N, K].

    Each group is copied before its former places are free: see `joint.check_room`. Values and parameters are
    as they were.
    """
    together = [_lay([covered[name].param for name in group.names]) for group in groups]
    if any(weight.is_cuda for weight in together):
        torch.cuda.empty_cache()  # the places that the weights have left are too small for the next group
    return together


def _candidates(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...], list[nn.Module]]]:
    for module in model.modules():
        if not _projects_as_declared(type(module)):
            continue
        for attributes in _declared(type(module)):
            linears = [module._modules.get(attribute) for attribute in attributes]
            if all(isinstance(linear, nn.Linear) for linear in linears):
                yield module, attributes, linears  # pyright: ignore[reportReturnType]


def _declared(kind: Any) -> list[tuple[str, ...]]:
    """The groups that a class lists; none if it means something else by the name."""
    groups = kind.projections
    if not isinstance(groups, (tuple, list)):
        return []
    named = [
        tuple(group)
        for group in groups
        if isinstance(group, (tuple, list)) and group and all(isinstance(name, str) for name in group)
    ]
    return named if len(named) == len(groups) else []


def _projects_as_declared(kind: Any) -> bool:
    """Whether `project` is that of the class that brought `projections` in, and no override of it, and takes
    what `Projecting.project` takes.
    """
    origin: Any = next((base for base in reversed(kind.__mro__) if "projections" in vars(base)), None)
    if origin is None or not isinstance(vars(origin).get("project"), FunctionType):
        return False
    return kind.project is origin.project and tuple(signature(origin.project).parameters) == _ARGUMENTS


def _can_merge(linears: Sequence[nn.Module]) -> bool:
    if any(getattr(one, "bias", None) is not None or hooked(one) for one in linears):
        return False
    weights: list[Any] = [one.weight for one in linears]
    return len({(weight.dtype, weight.device, weight.shape[1]) for weight in weights}) == 1


def hooked(module: nn.Module) -> bool:
    """Whether someone waits for the module to be called, or took its forward's place."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _lay(weights: Sequence[nn.Parameter]) -> Tensor:
    together = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, adjacent_parts(together, [weight.shape[0] for weight in weights])):
        weight.data = part
    return together
