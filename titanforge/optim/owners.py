"""Whether a model still reads the weights that its optimizer updates.

A weight that was replaced gets no gradient any more, and a step without one is taken for a step with a zero
gradient: the run would go on and learn nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from titanforge.optim.param_groups import ParamGroupSpec

AGAIN = "after the optimizer was built: build it again"


def note_owners(model: nn.Module, groups: Sequence[ParamGroupSpec]) -> list[ParamGroupSpec]:
    """Write into the groups which modules of the model have their weights, and return them."""
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                owners[id(param)].append((module, attribute))
    for group in groups:
        group.owners = {name: owners[id(param)] for name, param in zip(group.names, group.params)}
        group.model = model
    return list(groups)


class OwnedWeights:
    """The weights of all groups that know their owners, with these."""

    def __init__(self, groups: Sequence[ParamGroupSpec]) -> None:
        self._reads = [
            (param, module._parameters, attribute, name, module)
            for group in groups
            for name, param in zip(group.names, group.params)
            for module, attribute in group.owners.get(name, ())
        ]
        self._models = {id(group.model): group.model for group in groups if group.model is not None}
        self._children = self._find_children()

    def check(self) -> None:
        """Once a step, on the host. Raises RuntimeError if a module has another weight by now, or one that
        nobody trains any more, or if the model has another module in its place.
        """
        if not all(held.get(name) is child for held, name, child in self._children):
            self._look_again()
        for param, held, attribute, name, module in self._reads:
            if held.get(attribute) is param and param.requires_grad:
                continue
            if not param.requires_grad:
                raise RuntimeError(f"the weight {name!r} was frozen {AGAIN}")
            if not _still_has(module, attribute, param):
                what = "was replaced (load_state_dict with assign = True?)"
                raise RuntimeError(f"the weight {name!r} {what} {AGAIN}")

    def _find_children(self) -> list[tuple[dict[str, nn.Module | None], str, nn.Module]]:
        return [
            (module._modules, name, child)
            for model in self._models.values()
            for module in model.modules()
            for name, child in module._modules.items()
            if child is not None
        ]

    def _look_again(self) -> None:
        """After modules were replaced. Some are still there, under a wrapper; or another module has the
        weight.
        """
        inside = {id(module): module for model in self._models.values() for module in model.modules()}
        known = {(id(module), attribute) for _, _, attribute, _, module in self._reads}
        others = {
            id(param): (param, module._parameters, attribute, module)
            for module in inside.values()
            for attribute, param in module._parameters.items()
            if param is not None and (id(module), attribute) not in known
        }
        reads = []
        for read in self._reads:
            param, _, _, name, module = read
            if id(module) not in inside:
                if id(param) not in others:
                    raise RuntimeError(f"the module of the weight {name!r} was replaced or removed {AGAIN}")
                param, held, attribute, module = others[id(param)]
                read = (param, held, attribute, name, module)
            reads.append(read)
        self._reads, self._children = reads, self._find_children()


def _still_has(module: nn.Module, attribute: str, param: nn.Parameter) -> bool:
    """Under another name (pruned, parametrized); or as the shard of what FSDP has gathered."""
    held = module._parameters.get(attribute)
    if isinstance(param, DTensor) and held is not None:
        return not isinstance(held, DTensor) or held.device_mesh != param.device_mesh
    return any(own is param for own in module.parameters())
