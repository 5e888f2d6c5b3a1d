"""Weights with their states, as an engine goes over them: one entry a parameter, one family a rule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanforge.kernels.codecs import Codec
from titanforge.optim.batches import BatchList
from titanforge.optim.elementwise_pass import ElementwisePass
from titanforge.optim.local_update import LocalWeight
from titanforge.optim.owners import AGAIN
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.placement import address_of, is_cut, local_tensor
from titanforge.optim.replica_factors import pays
from titanforge.optim.rule import UpdateRule
from titanforge.optim.states import (
    MASTER_SLOT,
    Recipe,
    StoredState,
    new_auxiliary,
    new_state,
    refuse_sharded,
    tensor_id,
)

if TYPE_CHECKING:
    from titanforge.optim.sharded import KnownShards


@dataclass
class Entry:
    """One parameter with its states; `master` is the fp32 weight behind a bfloat16 one.

    auxiliary, parts, matrix, factored, squares: as in `LocalWeight`. beside: what else a checkpoint holds.
    """

    name: str
    param: nn.Parameter
    states: list[StoredState]
    master: Tensor | None
    codec: Codec | None
    tensor_id: int
    hyper_row: int
    auxiliary: dict[str, Tensor] = field(default_factory=dict)
    parts: int = 1
    matrix: tuple[int, int] | None = None
    factored: bool = False
    beside: dict[str, Tensor] = field(default_factory=dict)
    squares: Tensor | None = None
    _held: LocalWeight | None = None
    _held_address: int = 0

    @property
    def momentum(self) -> Tensor:
        """A rule's first state, a DTensor if the parameter is one."""
        return self.states[0].values

    def saved(self) -> dict[str, Tensor]:
        tensors = {key: tensor for state in self.states for key, tensor in state.saved().items()}
        tensors |= self.auxiliary | self.beside
        return tensors if self.master is None else {**tensors, MASTER_SLOT: self.master}

    def item(self) -> LocalWeight:
        weight = local_tensor(self.param).detach()
        return LocalWeight(
            weight=weight if self.master is None else local_tensor(self.master),
            gradient=None if self.param.grad is None else local_tensor(self.param.grad),
            states=tuple(state.local for state in self.states),
            copy=None if self.master is None else weight,
            codec=self.codec,
            tensor_id=self.tensor_id,
            hyper_row=self.hyper_row,
            auxiliary=tuple(local_tensor(state) for state in self.auxiliary.values()),
            parts=self.parts,
            matrix=self.matrix,
            factored=self.factored,
            squares=self.squares,
        )

    def current(self) -> LocalWeight:
        """`item`, the same object at every step as long as the weight stays where it is.

        Raises RuntimeError for a weight that moved and has a master, which is of the weight that it was.
        """
        gradient, address = self.param.grad, address_of(self.param)
        if isinstance(gradient, DTensor):
            gradient = local_tensor(gradient)
        held = self._held
        if held is None or address != self._held_address:
            if held is not None and self.master is not None:
                raise RuntimeError(
                    f"the weight {self.name!r} moved (.data was assigned?) {AGAIN}, or call "
                    "refresh_master_weights: its fp32 master is of the former one"
                )
            held = self._held = self.item()
            self._held_address = address
        held.gradient = gradient
        return held

    def watch(self, squares: Tensor) -> None:
        """Have A's kernel fill `squares`, from the next step on."""
        self.squares, self._held = squares, None

    def take_master(self) -> None:
        """Let the fp32 master, if there is one, be of the weight as it is now."""
        if self.master is not None:
            local_tensor(self.master).copy_(local_tensor(self.param))
            self._held = None

    @property
    def moved(self) -> bool:
        """Whether the weight lies elsewhere than in the last step."""
        return self._held is not None and address_of(self.param) != self._held_address


def release(items: Sequence[LocalWeight]) -> None:
    """Let go of the gradients of items that live on to the next step."""
    for item in items:
        item.gradient = None


@dataclass
class Family:
    """The groups of one rule, whose weights are updated together.

    batches, whole_batches: by row, of `update_state_global` and `update_in_one_pass`. sharded: by row and
    whether the weights are fused ones, of `update_sharded`.
    """

    rule: UpdateRule
    groups: list[ParamGroupSpec]
    entries: list[Entry]
    elementwise: ElementwisePass = field(default_factory=ElementwisePass)
    batches: dict[int, BatchList] = field(default_factory=dict)
    whole_batches: dict[int, BatchList] = field(default_factory=dict)
    sharded: dict[tuple[int, bool], KnownShards] = field(default_factory=dict)

    @functools.cached_property
    def numel(self) -> int:
        """Elements of all its weights, over all shards."""
        return sum(group.num_parameters for group in self.groups)


def by_rule(groups: Sequence[ParamGroupSpec]) -> list[list[ParamGroupSpec]]:
    """Groups that share a rule object, in order of first appearance."""
    families: dict[int, list[ParamGroupSpec]] = {}
    for group in groups:
        families.setdefault(id(group.rule), []).append(group)
    return list(families.values())


def new_family(groups: Sequence[ParamGroupSpec], recipe: Recipe) -> Family:
    """The weights of the groups of one rule, with states of zeros.

    Raises ValueError for a weight whose shards the rule cannot update, and for states it cannot store so.
    """
    rule = groups[0].rule
    entries = [
        _new_entry(rule, name, param, group.parts.get(name, 1), row, recipe)
        for row, group in enumerate(groups)
        for name, param in zip(group.names, group.params)
    ]
    return Family(rule, list(groups), entries)


def _new_entry(
    rule: UpdateRule, name: str, param: nn.Parameter, parts: int, row: int, recipe: Recipe
) -> Entry:
    refuse_sharded(rule, name, param, parts)
    entry = Entry(
        name,
        param,
        states=[
            new_state(param, slot, recipe.state_codec_for(rule, slot, param))
            for slot in rule.slots_for(param.shape)
        ],
        master=param.detach().float() if recipe.needs_master(param) else None,
        codec=recipe.weight_codec_for(rule, param),
        tensor_id=tensor_id(name),
        hyper_row=row,
        auxiliary=new_auxiliary(rule, name, param, parts),
        parts=parts,
    )
    if rule.matrix_only:
        entry.matrix = (param.shape[-2] // parts, param.shape[-1])
        entry.factored = not is_cut(param, rule.u_dims) and pays(rule, *entry.matrix)
        entry.parts = parts if rule.whole_parts else 1
    return entry
