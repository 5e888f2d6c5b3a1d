"""Which parameters of a model can be consumed where their gradient is made, and why each other one cannot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanforge.forge.plan import Kind, Placement
from titanforge.forge.probe import Readers
from titanforge.optim.param_groups import clean_name

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Covered:
    """One trainable parameter, the module that owns it and under which attribute, and what can be done.

    head: of an embedding, the head that reads the same weight and owns the loss.
    """

    name: str
    param: nn.Parameter
    module: nn.Module
    attribute: str
    placement: Placement
    head: nn.Module | None = None

    def readers(self) -> list[tuple[nn.Module, Kind]]:
        """The modules whose forwards read it, and as what: a tied head knows that it is."""
        if self.head is None:
            return [(self.module, self.placement.kind)]
        return [(self.module, "embedding"), (self.head, "tied")]


def cover(model: nn.Module, readers: Readers | None) -> dict[str, Covered]:
    """Every trainable parameter by name, wrapper names removed; a tied one once, by its first name.

    readers: None where no probe was run, since nothing depends on who reads what.
    """
    owners: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for module_name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                name = f"{module_name}.{attribute}" if module_name else attribute
                owners[id(param)].append((clean_name(name), module, attribute))
    covered = {}
    for raw_name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        kind, module, attribute, head, excluded = _role_of(owners[id(param)], param)
        if readers is not None:
            modules = [module] if head is None else [module, head]
            shared = "" if head is not None else _shared(owners[id(param)])
            excluded = shared or _reads(readers, modules, param) or excluded
        placement = Placement(
            kind, tuple(param.shape), excluded or _unsupported(param), isinstance(param, DTensor)
        )
        name = clean_name(raw_name)
        covered[name] = Covered(name, param, module, attribute, placement, head)
    return covered


def _role_of(
    owners: list[tuple[str, nn.Module, str]], param: nn.Parameter
) -> tuple[Kind, nn.Module, str, nn.Module | None, str]:
    """Kind, owner, attribute, tied head, and why the parameter cannot be fused as far as its modules say."""
    if len(owners) == 2:
        roles = {_kind_of(module, attribute, param): module for _, module, attribute in owners}
        embedding, head = roles.get(("embedding", "")), roles.get(("head", ""))
        if embedding is not None and head is not None:
            return "tied", embedding, "weight", head, ""
    _, module, attribute = owners[0]
    kind, excluded = _kind_of(module, attribute, param)
    return kind, module, attribute, None, excluded


def frozen_parameters(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """Parameters that nothing updates."""
    return {clean_name(name): param for name, param in model.named_parameters() if not param.requires_grad}


def is_loss_head(module: nn.Module) -> bool:
    """Whether a linear also owns the loss: its class says `owns_loss = True`, and its
    `forward(hidden, labels)` is the sum of the cross-entropies of tokens whose label is not -100.
    """
    return isinstance(module, nn.Linear) and bool(getattr(module, "owns_loss", False))


def _kind_of(module: nn.Module, attribute: str, param: nn.Parameter) -> tuple[Kind, str]:
    """What the parameter is, and why it cannot be fused as far as its module says."""
    name = type(module).__name__
    leaf = next(module.children(), None) is None
    if param.dim() == 1 and leaf:
        return "vector", ""
    if attribute in getattr(module, "grouped_weights", ()):
        return "experts", ""
    if "forward" in vars(module):
        return "other", f"the forward of this {name} was replaced"
    if attribute == "weight" and is_loss_head(module):
        return ("head", "") if module.bias is None else ("other", "a head that owns its loss, with a bias")
    if attribute == "weight" and isinstance(module, nn.Linear):
        if type(module).forward is not nn.Linear.forward:
            return "other", f"{name} has a forward of its own"
        return "linear", ""
    if attribute == "weight" and isinstance(module, nn.Embedding):
        if type(module).forward is not nn.Embedding.forward:
            return "other", f"{name} has a forward of its own"
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                return "other", f"an embedding with {option}"
        return "embedding", ""
    return "other", f"a plain parameter of {name}, which is no linear, embedding or norm"


def _shared(owners: list[tuple[str, nn.Module, str]]) -> str:
    if len(owners) == 1:
        return ""
    return f"tied: {' and '.join(name for name, _, _ in owners[:3])} are one tensor"


def _reads(readers: Readers, modules: list[nn.Module], param: nn.Parameter) -> str:
    """Why it matters who reads a parameter; empty where each of its modules does so, once."""
    edges = readers.edges[id(param)]
    for module in modules:
        calls = readers.calls[id(module)]
        if calls == 0:
            return "bypassed: read without calling its module" if edges else "not used in the probe forward"
        if calls > 1:
            return f"its module is called {calls} times in a forward"
    if edges == 0:
        return "no gradient reached it in the probe forward"
    if edges != len(modules):
        return f"read {edges} times in a forward"
    return ""


def _unsupported(param: nn.Parameter) -> str:
    if isinstance(param, DTensor):
        return "distributed over ranks"
    if param.dtype not in _DTYPES:
        return f"{str(param.dtype).removeprefix('torch.')} weights have no kernel"
    if not param.is_contiguous():
        return "not contiguous in memory"
    return ""
