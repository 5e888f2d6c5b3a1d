"""Whether a model still reads the weights that its optimizer updates.

A weight that was replaced gets no gradient any more, and a step without one is taken for a step with a zero
gradient: the run would go on and learn nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from titanforge.optim.param_groups import ParamGroupSpec

AGAIN = "after the optimizer was built: build it again"


def note_owners(model: nn.Module, groups: Sequence[ParamGroupSpec]) -> list[ParamGroupSpec]:
    """Write into the groups which modules have their weights, and return them."""
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                owners[id(param)].append((module, attribute))
    for group in groups:
        group.owners = {name: owners[id(param)] for name, param in zip(group.names, group.params)}
    return list(groups)


class OwnedWeights:
    """The weights of all groups that know their owners, with these."""

    def __init__(self, groups: Iterable[ParamGroupSpec]) -> None:
        self._reads = [
            (param, module._parameters, attribute, name, module)
            for group in groups
            for name, param in zip(group.names, group.params)
            for module, attribute in group.owners.get(name, ())
        ]

    def check(self) -> None:
        """Once a step, on the host. Raises RuntimeError if a module has another weight by now, or one that
        nobody trains any more.
        """
        for param, held, attribute, name, module in self._reads:
            if held.get(attribute) is param and param.requires_grad:
                continue
            if not param.requires_grad:
                raise RuntimeError(f"the weight {name!r} was frozen {AGAIN}")
            if not _still_has(module, attribute, param):
                what = "was replaced (load_state_dict with assign = True?)"
                raise RuntimeError(f"the weight {name!r} {what} {AGAIN}")


def _still_has(module: nn.Module, attribute: str, param: nn.Parameter) -> bool:
    """Under another name (pruned, parametrized); or as the shard of what FSDP has gathered."""
    held = module._parameters.get(attribute)
    if isinstance(param, DTensor) and held is not None:
        return not isinstance(held, DTensor) or held.device_mesh != param.device_mesh
    return any(own is param for own in module.parameters())
