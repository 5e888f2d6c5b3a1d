"""The fused forwards that one optimizer has put into a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from titanforge.forge.coverage import Covered
from titanforge.forge.joint import JointSink
from titanforge.forge.modules import (
    FusedRead,
    Projection,
    fuse_module,
    fuse_projections,
    restore_module,
    with_willing_owners,
)
from titanforge.forge.ops import register_sink
from titanforge.forge.plan import Kind, ParamPlan
from titanforge.forge.projections import Group, groups_of_linears


class FusedForwards:
    """`add` each fused weight, then `install`, then `merge`; `restore` undoes it."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[nn.Module, dict[str, Kind], dict[str, Tensor]]] = {}
        self._keeping: set[int] = set()
        self._modules: list[nn.Module] = []
        self._read: list[FusedRead] = []
        self._projections: list[Projection] = []

    @property
    def groups(self) -> list[Group]:
        """Linears that are multiplied as one."""
        return [projection.group for projection in self._projections]

    def add(self, name: str, owner: Covered, handle: Tensor, keep_logits: bool) -> None:
        """Note that this weight's modules shall read it for the sink of that handle."""
        for module, kind in owner.readers():
            _, kinds, handles = self._waiting.setdefault(id(module), (module, {}, {}))
            kinds[owner.attribute], handles[owner.attribute] = kind, handle
            param = owner.param
            self._read.append(FusedRead(name, module, owner.attribute, param, param.data_ptr(), handle))
            if keep_logits:
                self._keeping.add(id(module))

    def install(self) -> None:
        """Put the forwards in. Where `fuse_module` raises, `restore` takes out those before it."""
        for module, kinds, handles in self._waiting.values():
            fuse_module(module, kinds, handles, id(module) in self._keeping)
            self._modules.append(module)
        self._waiting.clear()

    def merge(self, group: Group, joint: JointSink, weight: Tensor) -> None:
        """Multiply a group of installed linears as one. weight: as laid side by side."""
        handle = register_sink(joint)
        fuse_projections(group, weight, handle)
        self._projections.append(Projection(group, joint, handle))

    def check(self) -> None:
        """Raises RuntimeError if a module has another weight by now, or another optimizer."""
        for read in self._read:
            read.check()

    def restore(self) -> None:
        """Give the modules their ordinary forwards back, but those that another optimizer has taken over."""
        held = {id(read.module) for read in self._read if read.held}
        for module in self._modules:
            if id(module) in held:
                restore_module(module)
        for projection in self._projections:
            if projection.held:
                restore_module(projection.group.module)
        self._modules.clear()
        self._read.clear()
        self._projections.clear()


def merged_groups(
    model: nn.Module, covered: Mapping[str, Covered], plans: Mapping[str, ParamPlan], apart: Collection[str]
) -> list[Group]:
    """The linears that `forge.merge_projections` multiplies together; see `groups_of_linears`."""
    groups = groups_of_linears(model, covered, plans, apart)
    return with_willing_owners(groups, fused_modules(covered, plans))


def fused_modules(
    covered: Mapping[str, Covered], plans: Mapping[str, ParamPlan]
) -> list[tuple[nn.Module, dict[str, Kind]]]:
    """Modules that get fused forwards, with the kinds of their fused parameters by attribute."""
    fused: dict[int, tuple[nn.Module, dict[str, Kind]]] = {}
    for name, owner in covered.items():
        if plans[name].fused and not plans[name].by_hook:
            for module, kind in owner.readers():
                fused.setdefault(id(module), (module, {}))[1][owner.attribute] = kind
    return list(fused.values())
