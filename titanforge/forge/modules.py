"""Putting fused forwards into a model: a module gets a subclass of its own class, so its names, hooks and
state dicts stay what they are, and blocks of one kind share compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanforge.forge.embedding import FusedEmbedding
from titanforge.forge.experts import fused_experts
from titanforge.forge.head import fused_head_loss
from titanforge.forge.joint import JointSink
from titanforge.forge.linear import fused_linear
from titanforge.forge.plan import Kind
from titanforge.forge.projections import Group, hooked
from titanforge.forge.side_by_side import SplitColumns
from titanforge.forge.vector import Tap


def fuse_module(
    module: nn.Module, kinds: Mapping[str, Kind], handles: Mapping[str, Tensor], keep_logits: bool = False
) -> None:
    """Let a module's parameters be consumed in backward.

    kinds, handles: of its fused parameters, by attribute. keep_logits: of a head.
    """
    fused = _fused_class(type(module), *_key(kinds))
    # What the module computes in: a mixed-precision class reads its weights as their cast.
    dtypes = {attribute: getattr(module, attribute).dtype for attribute in handles}
    _become(module, fused)
    held = vars(module)  # and not by setattr: a module may have one of its own, that refuses
    for attribute, handle in handles.items():
        weight = module._parameters[attribute]
        assert weight is not None
        held[f"_forge_{attribute}"] = handle
        held[f"_forge_{attribute}_data"] = weight.detach()
        held[f"_forge_{attribute}_dtype"] = dtypes[attribute]
    if kinds.get("weight") in ("head", "tied"):
        held["_forge_keep_logits"] = keep_logits


def fuse_projections(group: Group, weight: Tensor, handle: Tensor) -> None:
    """Let a group of fused linears be multiplied as one. weight: as laid side by side. handle: of all their
    sinks.
    """
    name, held = _group_name(group.attributes), vars(group.module)
    linears: list[Any] = [getattr(group.module, attribute) for attribute in group.attributes]
    dtype, rows = linears[0].weight.dtype, [linear.weight.shape[0] for linear in linears]
    if not hasattr(type(group.module), "_forge_projecting"):
        _become(group.module, _projecting_class(type(group.module)))
    held |= {name: handle, f"{name}_data": weight, f"{name}_dtype": dtype}
    held |= {f"{name}_linears": linears, f"{name}_rows": rows}


def check_classes(fused: Sequence[tuple[nn.Module, Mapping[str, Kind]]]) -> None:
    """Try what `fuse_module` will do to the modules' classes, and undo it.

    fused: modules, with the kinds of their fused parameters by attribute.
    Raises what a class does that allows no other to be derived from it, or an instance none in its place.
    """
    for module, kinds in fused:
        _try(module, _fused_class(type(module), *_key(kinds)))


def with_willing_owners(
    groups: Sequence[Group], fused: Sequence[tuple[nn.Module, Mapping[str, Kind]]]
) -> list[Group]:
    """Groups without those whose module has a class that cannot be replaced: they need not be merged.

    fused: as of `check_classes`.
    """
    kinds_of = {id(module): kinds for module, kinds in fused}
    willing = []
    for group in groups:
        module, base = group.module, type(group.module)
        try:
            if id(module) in kinds_of:
                base = _fused_class(base, *_key(kinds_of[id(module)]))
            _try(module, _projecting_class(base))
        except Exception:  # whatever the class's author raises there
            continue
        willing.append(group)
    return willing


def _try(module: nn.Module, kind: type[nn.Module]) -> None:
    before = type(module)
    _become(module, kind)
    _become(module, before)


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", kind)


@dataclass(frozen=True)
class Projection:
    """A group of linears with the sink and the handle under which its module multiplies it."""

    group: Group
    sink: JointSink
    handle: Tensor

    @property
    def held(self) -> bool:
        """Whether the module does so for this optimizer, and for no later one."""
        return self.group.module.__dict__.get(_group_name(self.group.attributes)) is self.handle


def _group_name(attributes: tuple[str, ...]) -> str:
    return "_forge_" + "_".join(attributes)


@dataclass(frozen=True)
class FusedRead:
    """A fused weight as its module's forward reads it: by a tensor of its own on the parameter's memory."""

    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter
    address: int
    handle: Tensor

    @property
    def held(self) -> bool:
        """Whether the module reads it for this optimizer, and for no later one."""
        return self.module.__dict__.get("_forge_" + self.attribute) is self.handle

    def check(self) -> None:
        """Raises RuntimeError if the module has another weight by now, or another optimizer."""
        param, held = self.param, self.module._parameters.get(self.attribute)
        if held is not param or param.data_ptr() != self.address:
            what = "moved or was replaced (load_state_dict with assign = True?) after it was attached"
        elif not param.requires_grad:
            what = "was frozen after it was attached"
        elif not self.held:
            what = "has another optimizer by now"
        else:
            return
        raise RuntimeError(f"the fused weight {self.name!r} {what}: attach again")


def is_fused(module: nn.Module) -> bool:
    """Whether `fuse_module` was here."""
    return any(name.startswith("_forge_") for name in vars(module))


def restore_module(module: nn.Module) -> None:
    """Undo `fuse_module` and `fuse_projections`."""
    _become(module, _ordinary(type(module)))
    for name in [name for name in vars(module) if name.startswith("_forge_")]:
        del vars(module)[name]


@contextmanager
def ordinary_forwards(model: nn.Module) -> Iterator[None]:
    """A model without the fused forwards of a former optimizer; which come back if the block fails."""
    former = [
        (module, type(module), {name: held for name, held in vars(module).items() if name[:7] == "_forge_"})
        for module in model.modules()
        if is_fused(module)
    ]
    for module, _, _ in former:
        restore_module(module)
    try:
        yield
    except BaseException:
        for module, fused, held in former:
            _become(module, fused)
            vars(module).update(held)
        raise


def _key(kinds: Mapping[str, Kind]) -> tuple[Kind | None, tuple[str, ...], tuple[str, ...]]:
    vectors = tuple(sorted(attribute for attribute, kind in kinds.items() if kind == "vector"))
    experts = tuple(sorted(attribute for attribute, kind in kinds.items() if kind == "experts"))
    return kinds.get("weight"), vectors, experts


@functools.cache
def _fused_class(
    base: type[nn.Module], kind: Kind | None, vectors: tuple[str, ...], experts: tuple[str, ...]
) -> type[nn.Module]:
    members = _members(base)
    members |= {attribute: _tapped(attribute) for attribute in vectors}
    if kind == "linear":
        members["forward"] = _linear_forward(base)
    elif kind == "embedding":
        members["forward"] = _embedding_forward(base)
    elif kind in ("head", "tied"):
        members["forward"] = _head_forward(base, tied=kind == "tied")
    if experts:
        members["product"] = _grouped_product(base, experts)
    return type(base.__name__, (base,), members)


@functools.cache
def _projecting_class(base: type[nn.Module]) -> type[nn.Module]:
    members = _members(base) | {"_forge_projecting": True, "project": _merged_project(base)}
    return type(base.__name__, (base,), members)


def _members(base: type[nn.Module]) -> dict[str, Any]:
    return {"__module__": base.__module__, "__reduce_ex__": _reduced(base), "_forge_made": True}


def _reduced(base: type[nn.Module]):
    """For copies (of averaged weights, say) and pickles: ordinary modules, which no backward changes."""

    def reduced(self: nn.Module, _protocol: int) -> tuple[Any, ...]:
        kept = {name: it for name, it in vars(self).items() if not name.startswith("_forge_")}
        return _new, (_ordinary(base),), kept

    return reduced


def _new(base: type[nn.Module]) -> nn.Module:
    return base.__new__(base)


def _ordinary(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before it was fused."""
    while "_forge_made" in vars(kind):
        kind = kind.__bases__[0]
    return kind


def _tapped(attribute: str) -> property:
    handle, data, dtype = (f"_forge_{attribute}{suffix}" for suffix in ("", "_data", "_dtype"))

    def read(self: nn.Module) -> Tensor:
        tapped = Tap.apply(getattr(self, data), getattr(self, handle))
        assert isinstance(tapped, Tensor)
        return tapped.to(getattr(self, dtype))

    return property(read)


def _linear_forward(base: type[nn.Module]):
    def forward(self: Any, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return base.forward(self, input)
        return fused_linear(
            input, self._forge_weight_data, self.bias, self._forge_weight, self._forge_weight_dtype
        )

    return forward


def _embedding_forward(base: type[nn.Module]):
    def forward(self: Any, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return base.forward(self, input)
        return FusedEmbedding.apply(
            self._forge_weight_data, input, self._forge_weight, self._forge_weight_dtype
        )

    return forward


def _merged_project(base: Any):
    def project(self: Any, x: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        name = _group_name(names)
        if not hasattr(self, name) or not torch.is_grad_enabled():
            return base.project(self, x, names)
        for one, linear in zip(names, getattr(self, f"{name}_linears")):
            if getattr(self, one) is not linear or hooked(linear):  # wrapped, say
                return base.project(self, x, names)
        weight, handle, dtype = (getattr(self, name + suffix) for suffix in ("_data", "", "_dtype"))
        together = fused_linear(x, weight, None, handle, dtype)
        rows, head = getattr(self, f"{name}_rows"), getattr(self, "normalised_head", None)
        if head is not None and any(width % head for width in rows):
            head = None
        return SplitColumns.apply(together, rows, head)

    return project


def _grouped_product(base: Any, fused: tuple[str, ...]):
    def product(self: Any, x: Tensor, weight: str, ends: Tensor) -> Tensor:
        if weight not in fused or not torch.is_grad_enabled():
            return base.product(self, x, weight, ends)
        handle, data, dtype = (f"_forge_{weight}{suffix}" for suffix in ("", "_data", "_dtype"))
        return fused_experts(x, getattr(self, data), ends, getattr(self, handle), getattr(self, dtype))

    return product


def _head_forward(base: type[nn.Module], tied: bool):
    def forward(self: Any, input: Tensor, labels: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return base.forward(self, input, labels)
        weight, dtype = self._forge_weight_data, self._forge_weight_dtype
        if labels is None:
            return fused_linear(input, weight, None, self._forge_weight, dtype)
        keep_logits = self._forge_keep_logits
        return fused_head_loss(input, weight, labels, self._forge_weight, dtype, keep_logits, tied)

    return forward
