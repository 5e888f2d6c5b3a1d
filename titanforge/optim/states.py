"""Optimizer states as tensors: made complete at construction, saved and loaded by parameter name.

A state is saved under its slot's name; one stored with scales (int8, fp8) has them under `<slot>_scale`, and
the fp32 copy of a bfloat16 weight is `master`. Codes and scales are saved as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanforge.kernels.codecs import (
    CODECS,
    Codec,
    Encoded,
    allocate,
    fp8_advance,
    fp8_calibrate,
    meta_shape,
    state_codec,
)
from titanforge.optim.placement import (
    axis_name,
    cut_like,
    cuts,
    distributed_like,
    is_cut,
    is_sharded,
    local_tensor,
    sharded_dim,
)
from titanforge.optim.rule import LocalStateRule, StateGlobalRule, StateSlot, UpdateRule

MASTER_SLOT = "master"
"""fp32 copy of a bfloat16 weight."""
STATE_DTYPES = ("float32", "bfloat16", "int8", "fp8")
MASTER_WEIGHTS = ("none", "float32", "stochastic_rounding")

# What a slot holds, for the codec: the root of a square is stored, a magnitude as it is.
_SLOT_KINDS = {"m": "signed", "v": "square", "u": "magnitude"}


@dataclass(frozen=True)
class StoredState:
    """One state of one parameter, in storage; `values` and `scale` are DTensors if the parameter is one."""

    slot: StateSlot
    codec: Codec
    values: Tensor
    scale: Tensor | None

    @property
    def local(self) -> Encoded:
        """This rank's part, as kernels take it."""
        if self.scale is None:
            return Encoded(local_tensor(self.values), self.codec)
        scale = local_tensor(self.scale)
        if self.codec.kind == "block":
            scale = scale.view(-1, scale.shape[-1])
        return Encoded(local_tensor(self.values), self.codec, scale)

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        if self.scale is None:
            return {self.slot.name: self.values}
        return {self.slot.name: self.values, f"{self.slot.name}_scale": self.scale}


@dataclass(frozen=True)
class Recipe:
    """How states and weights are stored: `optimizer.state_dtype` and `optimizer.master_weights`.

    `stochastic_rounding` holds for bfloat16 weights, and for states that have such a form (bfloat16, int8).
    """

    state_dtype: str = "float32"
    master_weights: str = "none"

    def __post_init__(self) -> None:
        for key, value, valid in (
            ("state_dtype", self.state_dtype, STATE_DTYPES),
            ("master_weights", self.master_weights, MASTER_WEIGHTS),
        ):
            if value not in valid:
                raise ValueError(f"optimizer.{key} = {value!r} is unknown; valid: {', '.join(valid)}")

    @property
    def stochastic(self) -> bool:
        """Whether anything is rounded at random."""
        return self.master_weights == "stochastic_rounding"

    def state_codec_for(self, rule: UpdateRule, slot: StateSlot, param: Tensor) -> Codec:
        """Storage of one state. Vectors and statistics stay float32 under int8 and fp8: they are few, and
        blocks along a sharded vector would depend on the layout.
        """
        if slot.shape != "weight" or self.state_dtype == "float32":
            return CODECS["fp32"]
        stochastic = self.stochastic and self.state_dtype != "fp8"
        if self.state_dtype in ("int8", "fp8") and rule.u_gathers and is_cut(param, rule.u_dims):
            raise ValueError(
                f"optimizer.state_dtype = {self.state_dtype!r}: {rule.name} gathers the momentum of sharded "
                "weights: use float32 or bfloat16"
            )
        if rule.u_writes_state and self.state_dtype in ("int8", "fp8"):
            raise ValueError(
                f"optimizer.state_dtype = {self.state_dtype!r}: the weight update of {rule.name} writes the "
                "momentum too (error feedback): use float32 or bfloat16, or set "
                "optimizer.dion.error_feedback = false"
            )
        if self.state_dtype in ("int8", "fp8"):
            if not isinstance(rule, LocalStateRule):
                raise ValueError(
                    f"optimizer.state_dtype = {self.state_dtype!r} is for rules whose state update is "
                    f"elementwise, not for {rule.name}: use float32 or bfloat16"
                )
            if param.dim() < 2:
                return CODECS["fp32"]
        elif not isinstance(rule, LocalStateRule):
            stochastic = False
        return state_codec(self.state_dtype, _SLOT_KINDS[slot.name], stochastic=stochastic)

    def weight_codec_for(self, rule: UpdateRule, param: Tensor) -> Codec | None:
        """Storage of the weight where it is not simply its dtype: None."""
        if not self.stochastic or param.dtype != torch.bfloat16:
            return None
        if rule.u_gathers and is_sharded(param):
            raise ValueError(
                f'optimizer.master_weights = "stochastic_rounding": {rule.name} sends the updates of sharded '
                'weights: use "float32"'
            )
        if rule.regime > 1 and not (isinstance(rule, StateGlobalRule) and rule.rounds_at_random):
            raise ValueError(
                'optimizer.master_weights = "stochastic_rounding" is for elementwise rules, and for Muon and '
                f'Scion without Nesterov, not for {rule.name}: use "float32"'
            )
        return CODECS["bf16_sr"]

    def needs_master(self, param: Tensor) -> bool:
        """Whether the weight has an fp32 copy."""
        return self.master_weights == "float32" and param.dtype != torch.float32


def tensor_id(name: str) -> int:
    """Sets the random bits of one parameter apart from another's; the same on every rank and in every run."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def new_state(param: nn.Parameter, slot: StateSlot, codec: Codec) -> StoredState:
    """A state of zeros; of the weight's shape, it is distributed like the parameter.

    Statistics (rows, columns, scalars) are plain tensors, since their rules take no sharded weight.
    """
    if slot.shape != "weight":
        values = torch.zeros(slot.shape_for(param.shape), dtype=torch.float32, device=param.device)
        return StoredState(slot, codec, values, None)
    local = local_tensor(param.detach())
    part = allocate(codec, local.shape, local.device)
    values = distributed_like(param, part.values, param.shape)
    if part.meta is None:
        return StoredState(slot, codec, values, None)
    if codec.kind == "tensor":
        if is_sharded(param):
            raise ValueError(
                'optimizer.state_dtype = "fp8" has one scale per weight, and the weights are sharded: set '
                'parallelism.data_parallel_shard_degree = 1, or take "int8"'
            )
        return StoredState(slot, codec, values, part.meta)
    # Block scales have the weight's own leading dims, so that they are sharded along with it.
    full_shape = meta_shape(codec, param.shape)
    assert full_shape is not None
    leading = param.shape[:-1] if param.dim() <= 3 else param.shape[:1]
    local_leading = local.shape[:-1] if local.dim() <= 3 else local.shape[:1]
    if isinstance(param, DTensor) and any(
        (dim := sharded_dim(placement)) is not None and dim >= len(leading) for placement in param.placements
    ):
        raise ValueError(
            'optimizer.state_dtype = "int8" has blocks along the input axis, along which a weight is '
            'sharded: take "bfloat16"'
        )
    scale = part.meta.view(*local_leading, full_shape[1])
    return StoredState(slot, codec, values, distributed_like(param, scale, (*leading, full_shape[1])))


def new_auxiliary(rule: UpdateRule, name: str, param: nn.Parameter, parts: int) -> dict[str, Tensor]:
    """States that only U knows, by slot name; drawn from the parameter's name where they are drawn at all.

    Of a sharded parameter they are cut along the dims that follow it, and whole on every rank along others.
    """
    tensors = rule.new_auxiliary(param.shape, param.device, tensor_id(name), parts)
    slots = rule.auxiliary_slots(param.shape, parts)
    return {slot.name: cut_like(param, tensor, slot) for slot, tensor in zip(slots, tensors)}


class Fp8Scales:
    """The scales of all fp8 states as rows of one tensor, so that one launch moves them all on.

    Takes the place of the states' own scale tensors, in `entries` (lists of states, changed in place).
    calibrated: whether the scales of the first store were chosen; until then a pass must look at magnitudes.
    """

    def __init__(self, entries: Sequence[list[StoredState]]) -> None:
        found = [
            (states, index)
            for states in entries
            for index, state in enumerate(states)
            if state.codec.kind == "tensor"
        ]
        self.calibrated = not found
        self._meta: Tensor | None = None
        if not found:
            return
        metas = [states[index].scale for states, index in found]
        rows = torch.stack([meta for meta in metas if meta is not None])
        # Each row begins at 16 bytes, as tensors of their own do: kernels are compiled for that.
        width = rows.shape[1]
        self._meta = rows.new_zeros(len(rows), -width // 4 * -4)[:, :width].copy_(rows)
        levels = [states[index].codec.levels for states, index in found]
        self._levels = torch.tensor(levels, device=self._meta.device)
        for row, (states, index) in enumerate(found):
            states[index] = replace(states[index], scale=self._meta[row])

    def calibrate(self) -> None:
        """Choose the scales of the first store from the magnitudes that a pass has noted."""
        if self._meta is not None:
            fp8_calibrate(self._meta, self._levels)
        self.calibrated = True

    def advance(self, apply_flag: Tensor) -> None:
        """After a step: choose the scales of the next store, on the device."""
        if self._meta is not None:
            fp8_advance(self._meta, self._levels, apply_flag)


def refuse_sharded(rule: UpdateRule, name: str, param: nn.Parameter, parts: int) -> None:
    """Raises ValueError where a weight's shards cannot be updated by the rule."""
    if not isinstance(param, DTensor) or rule.u_gathers or rule.regime == 1:
        return
    for axis, placement in enumerate(param.placements):
        if not placement.is_replicate() and param.device_mesh.size(axis) > 1:
            dim = sharded_dim(placement)
            same_input = axis_name(param, axis) == "tp"  # its ranks work on the same positions together
            rule.check_shards(name, param.shape, parts, dim, cuts(param, dim), same_input)


def check_rules(rules: Sequence[UpdateRule], saved: Collection[str]) -> None:
    """Raises ValueError, with the keys to set back, for states that other rules wrote.

    rules: of this run. saved: names of those that wrote the states.
    """
    ours, theirs = {rule.name for rule in rules}, set(saved)
    if ours == theirs:
        return
    new = ours - theirs or ours
    keys = " and ".join(sorted({rule.key for rule in rules if rule.name in new}))
    raise ValueError(
        f"the checkpoint was written with optimizer rule {sorted(theirs)}, this run uses {sorted(ours)}: set "
        f'{keys} back, or leave the states out with checkpoint.exclude_from_loading = ["optimizer"]'
    )


def load_states(
    own: Mapping[str, Mapping[str, Tensor]], loaded: Mapping[str, Any], rule_of: Mapping[str, UpdateRule]
) -> None:
    """Copy loaded states into our own, in place.

    own, loaded: {parameter: {slot: tensor}}; a loaded tensor may be our own (read in place).
    rule_of: rule by parameter, for messages.
    Raises ValueError for a parameter or slot missing or unknown, and for another shape or placement; nothing
    is written then.
    """
    if missing := sorted(own.keys() - loaded.keys()):
        raise ValueError(f"optimizer state: nothing for {_some(missing)}; the checkpoint is of another model")
    if unknown := sorted(loaded.keys() - own.keys()):
        raise ValueError(f"optimizer state: the model has no trainable parameter {_some(unknown)}")
    pairs = []
    for name, slots in own.items():
        theirs = loaded[name]
        if slots.keys() != theirs.keys():
            rule = rule_of[name]
            raise ValueError(
                f"optimizer state of {name!r}: {rule.name} needs {sorted(slots) or 'nothing'}, the "
                f"checkpoint has {sorted(theirs) or 'nothing'}; it was written with another {rule.key}, "
                "optimizer.momentum, optimizer.state_dtype or optimizer.master_weights"
            )
        for slot, tensor in slots.items():
            source = theirs[slot]
            if source.shape != tensor.shape:
                raise ValueError(
                    f"optimizer state {slot!r} of {name!r} has shape {tuple(source.shape)} in the "
                    f"checkpoint, {tuple(tensor.shape)} here"
                )
            if source.dtype != tensor.dtype and not _wide(source) & _wide(tensor):
                raise ValueError(
                    f"optimizer state {slot!r} of {name!r} is stored as {source.dtype} in the checkpoint, as "
                    f"{tensor.dtype} here: set optimizer.state_dtype back"
                )
            if isinstance(source, DTensor) != isinstance(tensor, DTensor) or (
                isinstance(source, DTensor)
                and isinstance(tensor, DTensor)
                and (source.placements != tensor.placements or source.device_mesh != tensor.device_mesh)
            ):
                raise ValueError(
                    f"optimizer state {slot!r} of {name!r} is placed differently than the parameter: load it "
                    "with torch.distributed.checkpoint, which reshards"
                )
            pairs.append((local_tensor(tensor), local_tensor(source)))
    for target, source in pairs:
        if target.data_ptr() != source.data_ptr() or target.numel() == 0:
            target.copy_(source)


def _wide(tensor: Tensor) -> bool:
    """Whether the values stand for themselves, without a scale."""
    return tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
