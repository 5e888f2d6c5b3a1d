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
from titanforge.optim.entries import Entry
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.placement import is_anothers, local_tensor, sharded_dim


def build_capture(
    groups: Sequence[ParamGroupSpec], readers: Mapping[str, Reader], entries: Sequence[Entry]
) -> BasisKeeper | None:
    """What keeps the bases of an optimizer's weights under Dobb, or None without such (or without hooks).

    readers: from `find_readers`. entries: of all weights, with auxiliary states `statistic` and `basis`.
    """
    rules = {name: group.rule for group in groups for name in group.names if isinstance(group.rule, Dobb)}
    if not rules:
        return None
    rule = next(iter(rules.values()))
    under = [entry for entry in entries if entry.name in rules]
    if rule.dobb.source == "gradient":
        nobody = Reader(nn.Module(), "")
        weights = [_captured(entry, nobody) for entry in under]
        return GramKeeper(rule, weights, [(entry.param, _matrices(entry)) for entry in under])
    if not readers:
        return None
    return DobbCapture(rule, [_captured(entry, readers[entry.name]) for entry in under])


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


def _flat(state: Tensor) -> Tensor:
    local = local_tensor(state)
    return local.view(local.shape[:-2].numel(), *local.shape[-2:])  # none at all on some ranks


def _matrices(entry: Entry) -> int:
    basis = local_tensor(entry.auxiliary["basis"])
    return basis.shape[0] if basis.dim() > 3 else 1
