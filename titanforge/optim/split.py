"""A step cut in two: A, then somebody's decision, then U or a local step in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from titanforge.kernels._triton import runs_triton
from titanforge.optim.entries import Family
from titanforge.optim.local_update import (
    LocalWeight,
    accumulate_states,
    update_weight_alone,
    write_copies,
)
from titanforge.optim.placement import local_tensor
from titanforge.optim.rule import LocalStateRule, StateGlobalRule, UpdateRule


class LocalStep(Protocol):
    """A weight update that stands in for U: see `titanforge.sync.LocalUpdate`."""

    @property
    def kind(self) -> Literal["gradient", "momentum", "orthonormal"]: ...

    @property
    def lr(self) -> float | None: ...


@dataclass(frozen=True)
class ReplicatedTensor:
    """This rank's part of a weight or state that replicas hold copies of.

    name: the weight's. slot: `weight`, or the state's. splits: whether the weight's rule waits between A and
    U. has_mean: False for a state of U alone (a basis), of which replicas share one copy instead.
    tensor: live; a weight's is its fp32 master where there is one. factored: a momentum whose mean U can be
    taken of without averaging it (`replica_factors`).
    """

    name: str
    slot: str
    splits: bool
    has_mean: bool
    tensor: Tensor
    factored: bool = False


def splits(rule: UpdateRule) -> bool:
    """Whether A can be taken before it is known whether U will be: A affine, and U blind to the gradient."""
    return (
        isinstance(rule, LocalStateRule)
        and rule.a_affine
        and not rule.u_reads_gradient
        and not rule.u_statistic_of_gradient
        and "m" in (slot.name for slot in rule.slots)
    )


def accumulate(rule: UpdateRule, items: Sequence[LocalWeight], hyper: Tensor) -> None:
    """A of an elementwise rule that splits; that of other rules is their elementwise pass."""
    assert isinstance(rule, LocalStateRule)
    for item in items:
        accumulate_states(rule, item, hyper[item.hyper_row])


def finish(rule: UpdateRule, items: Sequence[LocalWeight], hyper: Tensor) -> None:
    """U of an elementwise rule that splits."""
    for item in items:
        update_weight_alone(rule, item, hyper[item.hyper_row])
    write_copies(items)


def replicated_tensors(families: Sequence[Family]) -> list[ReplicatedTensor]:
    """Weights and states of all families, in their order.

    Raises ValueError for what has no mean over replicas: states stored as codes, weights that are rounded at
    random.
    """
    found = []
    for family in families:
        waits = splits(family.rule)
        for entry in family.entries:
            item = entry.item()
            if not item.is_plain:
                raise ValueError(
                    "replicas that step locally average weights and states: optimizer.state_dtype must be "
                    '"float32" or "bfloat16", and optimizer.master_weights not "stochastic_rounding" (or set '
                    'sync.policy = "every_step")'
                )
            tensors = {"weight": item.weight}
            tensors |= {state.slot.name: state.local.values for state in entry.states}
            found += [
                ReplicatedTensor(entry.name, slot, waits, True, tensor, entry.factored and slot == "m")
                for slot, tensor in tensors.items()
            ]
            found += [
                ReplicatedTensor(entry.name, slot, waits, False, local_tensor(tensor))
                for slot, tensor in entry.auxiliary.items()
            ]
    return found


def watch_momenta(families: Sequence[Family]) -> tuple[list[str], Tensor]:
    """Have A leave the sums of squares of the momenta that a kernel of it writes, from now on.

    Returns the weights' names, in the order of `replicated_tensors`, and fp32 [names] on the device that each
    A fills: of this rank's part, of the momentum as it is stored. A weight where no kernel does A (on a CPU,
    of an elementwise rule) is not in it.
    """
    watched = []
    for family in families:
        items = [entry.item() for entry in family.entries]
        if not (splits(family.rule) and isinstance(family.rule, StateGlobalRule)):
            continue
        if all(runs_triton(item.weight) and item.is_plain for item in items):
            watched += family.entries
    if not watched:
        return [], torch.zeros(0)
    squares = torch.zeros(len(watched), device=local_tensor(watched[0].param).device)
    for entry, one in zip(watched, squares.unbind(0)):
        entry.watch(one)
    return [entry.name for entry in watched], squares


@torch.no_grad()
def step_along(local: LocalStep, item: LocalWeight, h: Tensor) -> None:
    """W <- W - lr X where the step is applied; X the gradient, with its clip factor, or the momentum.

    h: the hyperparameters of the item's group, with the rate of the local step.
    """
    if local.kind == "gradient":
        if item.gradient is None:
            return
        direction = item.gradient.float() * h[3]
    else:
        direction = item.states[0].values.float()
    moved = item.weight.float() - h[1] * direction
    item.weight.copy_(torch.where(h[0] != 0, moved, item.weight.float()))
    write_copies([item])
