"""From weights under Dobb to what keeps their bases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanforge.optim.dobb.capture import BasisKeeper, DobbCapture
from titanforge.optim.dobb.gram import GramKeeper
from titanforge.optim.dobb.hooks import Reader
from titanforge.optim.dobb.reduction import Captured
from titanforge.optim.dobb.rule import Dobb
from titanforge.optim.dobb.stacks import stacked
from titanforge.optim.entries import Entry
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.placement import from_parts, is_anothers, local_tensor, sharded_dim


def build_capture(
    groups: Sequence[ParamGroupSpec], readers: Mapping[str, Reader], entries: Sequence[Entry]
) -> BasisKeeper | None:
    """What keeps the bases of an optimizer's weights under Dobb, or None without such (or without hooks).

    readers: from `find_readers`. entries: of all weights, with auxiliary states `statistic` and `basis`.
    Views of what holds those of many weights take the states' places: nobody may hold the former ones.
    """
    rules = {name: group.rule for group in groups for name in group.names if isinstance(group.rule, Dobb)}
    if not rules:
        return None
    rule = next(iter(rules.values()))
    under = {entry.name: entry for entry in entries if entry.name in rules}
    of_gradient = rule.dobb.source == "gradient"
    if not of_gradient and not readers:
        return None
    nobody = Reader(nn.Module(), "")
    weights = [_captured(entry, nobody if of_gradient else readers[name]) for name, entry in under.items()]
    stacks = stacked(weights, lambda weight: _move(under[weight.name], weight))
    if of_gradient:
        owners = [(entry.param, _matrices(entry)) for entry in under.values()]
        return GramKeeper(rule, weights, stacks, owners)
    return DobbCapture(rule, weights, stacks)


def _captured(entry: Entry, reader: Reader) -> Captured:
    statistic, basis = (entry.auxiliary[slot] for slot in ("statistic", "basis"))
    blocks = basis.numel() // basis.shape[-1] ** 2
    groups = basis.shape[0] if entry.param.dim() > 2 else 1
    chunk = blocks
    if isinstance(basis, DTensor):
        cut = {axis: sharded_dim(placement) for axis, placement in enumerate(basis.placements)}
        # Each rank captures its own columns, or experts: the others' blocks are none of its business.
        for axis in [axis for axis, dim in cut.items() if dim is not None and is_anothers(basis, axis)]:
            blocks //= basis.device_mesh.size(axis)
            groups = max(1, groups // basis.device_mesh.size(axis))
            del cut[axis]
        chunk = blocks
        for axis, dim in cut.items():
            if dim is not None:
                length = basis.shape[dim] * blocks // (basis.numel() // basis.shape[-1] ** 2)
                here = -(-length // basis.device_mesh.size(axis))
                chunk = here * blocks // length
    return Captured(
        entry.name,
        reader,
        _flat(statistic),
        _flat(basis),
        blocks,
        chunk,
        groups,
        experts=entry.param.dim() > 2,
    )


def _move(entry: Entry, weight: Captured) -> None:
    for slot, blocks in (("statistic", weight.statistic), ("basis", weight.basis)):
        state = entry.auxiliary[slot]
        local = blocks.view(local_tensor(state).shape)
        if isinstance(state, DTensor):
            local = from_parts(local, state.device_mesh, state.placements, state.shape)
        entry.auxiliary[slot] = local


def _flat(state: Tensor) -> Tensor:
    local = local_tensor(state)
    return local.view(local.shape[:-2].numel(), *local.shape[-2:])  # none at all on some ranks


def _matrices(entry: Entry) -> int:
    basis = local_tensor(entry.auxiliary["basis"])
    return basis.shape[0] if basis.dim() > 3 else 1
