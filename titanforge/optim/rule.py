"""The contract of an update rule: S <- A(S, G), then (W, S) <- U(W, S).

A rule declares what its state update A and its weight update U read; where a weight's gradient may be
consumed follows from that (FORGE, appendix A) and is never typed in. Rules hold no tensors and no
hyperparameters of a group: both are arguments, so one rule object serves any number of weights.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from titanforge.kernels.references import COMMON_HYPER_NAMES, HYPER_NAMES, REFERENCES
from titanforge.optim.batches import BATCH_BYTES

if TYPE_CHECKING:
    from titanforge.kernels.epilogues import Epilogue
    from titanforge.optim.batches import Batch

State = tuple[Tensor, ...]
"""A weight's states in the order of its rule's slots."""


class Reach(enum.IntEnum):
    """How far an update looks: its own coordinate, its matrix or layer, or the whole model."""

    COORDINATE = 1
    LAYER = 2
    MODEL = 3


SlotShape = Literal["weight", "rows", "columns", "scalar"]


@dataclass(frozen=True)
class StateSlot:
    """One state tensor of a weight.

    shape: `weight`: the weight's own; `rows`: without the last dim; `columns`: without the last dim but one;
        `scalar`: without the last two. Leading dims (experts) are kept: a layer is one matrix.
    nonnegative: never below zero, so a quantised copy spends no bit on the sign and is floored above zero.
    """

    name: str
    shape: SlotShape = "weight"
    nonnegative: bool = False

    def shape_for(self, weight_shape: torch.Size) -> torch.Size:
        if self.shape == "weight":
            return weight_shape
        if self.shape == "rows":
            return weight_shape[:-1]
        if self.shape == "columns":
            return torch.Size(weight_shape[:-2] + weight_shape[-1:])
        return weight_shape[:-2]


@dataclass(frozen=True)
class AuxiliarySlot:
    """A state that A never touches: U reads it and may write it (a basis, a factor, a statistic).

    It does not have the weight's shape and is stored as plain floats.

    follows: (dim of the weight, dim of the state) pairs that are cut into the same shards; along all other
        dims of a sharded weight the state is whole on every rank.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype = torch.float32
    follows: tuple[tuple[int, int], ...] = ()


class UpdateRule(ABC):
    """What a step does to one weight.

    name: as in the configuration, in lower case.
    key: of the configuration that named the rule, for messages.
    slots: states of a matrix; `slots_for` gives those of any weight.
    a_reads, u_reads: reach of A and of U. A reads the gradient, U the state.
    a_affine: A(S, G) = A'(S) + c G with A' and c free of G.
    u_reads_gradient: U also looks at G (Nesterov, Lion): fine in a register tile, impossible once G is folded
        into the state.
    option_names: the group options that have an effect, beside `lr` and `weight_decay`.
    u_writes_state: U changes what A has left (Dion's error feedback).
    u_reads_capture: U reads what was captured in this step's forward or backward, complete only after both.
    u_statistic_of_gradient: and that is a statistic of the whole gradient.
    u_gathers: there is a form of U for weights that are cut along `u_dims` (see `sharded`).
    u_dims: dims of a weight, from its end, that U reads as a whole; along others each part is by itself.
    whole_parts: whether U takes the matrices that a weight is made of one by one; else they may be cut
        anywhere between two rows.
    matrix_only: for matrices of the blocks alone; `[optimizer.scalar]` takes the other weights.
    """

    name: ClassVar[str]
    key: str = "optimizer.name"
    slots: tuple[StateSlot, ...] = ()
    a_reads: ClassVar[Reach] = Reach.COORDINATE
    a_affine: ClassVar[bool] = False
    u_reads: ClassVar[Reach] = Reach.COORDINATE
    u_reads_gradient: bool = False
    u_writes_state: bool = False
    u_reads_capture: ClassVar[bool] = False
    u_statistic_of_gradient: bool = False
    u_gathers: ClassVar[bool] = False
    u_dims: ClassVar[tuple[int, ...]] = (-2, -1)
    whole_parts: bool = True
    hyper_names: tuple[str, ...] = COMMON_HYPER_NAMES
    option_names: ClassVar[tuple[str, ...]] = ()
    matrix_only: ClassVar[bool] = False

    @property
    def regime(self) -> int:
        """1: all in the tile; 2: A in the tile, U after it; 3: one layer deferred; 4: after backward."""
        if self.a_reads is Reach.MODEL:
            return 4
        if self.a_reads is Reach.LAYER:
            return 3
        return 1 if self.u_reads is Reach.COORDINATE else 2

    def slots_for(self, shape: torch.Size) -> tuple[StateSlot, ...]:
        """States of a weight of this shape."""
        return self.slots

    def auxiliary_slots(self, shape: torch.Size, parts: int = 1) -> tuple[AuxiliarySlot, ...]:
        """States beside `slots` of a weight of this shape, [m, n] or a stack [*, m, n].

        parts: matrices of equal height that an [m, n] is made of, one below the other.
        """
        return ()

    def new_auxiliary(self, shape: torch.Size, device: torch.device, seed: int = 0, parts: int = 1) -> State:
        """Their first values: zeros unless the rule says otherwise; the same on every rank."""
        return tuple(
            torch.zeros(slot.shape, dtype=slot.dtype, device=device)
            for slot in self.auxiliary_slots(shape, parts)
        )

    def shard_dim(self, shape: torch.Size) -> int | None:
        """The dim of a weight of this shape that shards are to cut; None: whichever they like."""
        return None

    def check_shards(
        self, name: str, shape: torch.Size, parts: int, dim: int | None, shards: int, same_input: bool = False
    ) -> None:
        """Whether U can be taken of each of `shards` > 1 shards of a weight by itself.

        dim: that they cut; None for an unusual cut. same_input: their ranks work on the same positions
        together (the tensor axis), instead of each on its own. Raises ValueError, naming the key and the way
        out.
        """
        if self.regime > 1:
            raise ValueError(
                f"{self.key} = {self.name!r} reads whole layers, but {name!r} is sharded: set "
                "parallelism.data_parallel_shard_degree = 1 (replicas are fine) or take an elementwise rule, "
                "such as AdamW or Lion"
            )

    def hyperparameters(self, options: Mapping[str, float], step: int) -> list[float]:
        """The hyperparameter vector of applied step number `step` (1-based), computed in float64.

        `apply` and `grad_scale` are 1 and `lr` is the group's peak: whoever launches overwrites them.
        """
        return [1.0, options["lr"], options["weight_decay"], 1.0, *self.own_hyperparameters(options, step)]

    def own_hyperparameters(self, options: Mapping[str, float], step: int) -> tuple[float, ...]:
        """The slots after the common four, in the order of `hyper_names`."""
        return ()

    @abstractmethod
    def update(self, g: Tensor, w: Tensor, state: State, h: Tensor) -> tuple[Tensor, State]:
        """One whole step, out of place and in fp32: returns the new weight and states.

        g, w: [*, m, n] or [n]; h: fp32, in the order of `hyper_names`. Where h[0] is 0 the result is the old
        weight and states, bit for bit. Leading dims are a batch of independent matrices.
        """


class LocalStateRule(UpdateRule):
    """A rule whose A reads one coordinate (regimes 1 and 2): it can run in a tile's registers.

    kernel_name: its entry in `kernels.references` and `kernels.epilogues`.
    """

    kernel_name: str

    @property
    def reference(self) -> Callable[..., tuple[Tensor, ...]]:
        """`(g, w, *states, h) -> (w, *states)` in plain torch; for regime 2, w comes back unchanged."""
        return REFERENCES[self.kernel_name]

    @property
    def epilogue(self) -> Epilogue:
        """The same arithmetic for Triton and torch."""
        # Imported here: a machine without Triton still trains through the reference.
        from titanforge.kernels.epilogues import EPILOGUES

        return EPILOGUES[self.kernel_name]

    def _use_kernel(self, kernel_name: str) -> None:
        self.kernel_name = kernel_name
        self.hyper_names = HYPER_NAMES[kernel_name]


class ElementwiseRule(LocalStateRule):
    """Regime 1: A and U both read one coordinate."""

    def update(self, g: Tensor, w: Tensor, state: State, h: Tensor) -> tuple[Tensor, State]:
        new_weight, *new_state = self.reference(g, w, *state, h)
        return new_weight, tuple(new_state)


class StateGlobalRule(LocalStateRule):
    """Regime 2: A reads one coordinate, U a whole matrix of the state A has left.

    batch_bytes: of same-shape matrices, as fp32, that U takes together.
    """

    u_reads = Reach.LAYER
    batch_bytes: ClassVar[int] = BATCH_BYTES

    def state_update(self, g: Tensor, w: Tensor, state: State, h: Tensor) -> State:
        """A, out of place; keeps the old state where h[0] is 0."""
        return self.reference(g, w, *state, h)[1:]

    @abstractmethod
    def weight_update(self, w: Tensor, state: State, h: Tensor, g: Tensor | None = None) -> Tensor:
        """U, out of place; keeps the old weight where h[0] is 0.

        g: the gradient, for rules with `u_reads_gradient`; the others ignore it.
        """

    def whole_update(
        self,
        w: Tensor,
        state: State,
        auxiliary: State,
        h: Tensor,
        g: Tensor | None = None,
        matrix: tuple[int, int] | None = None,
    ) -> tuple[Tensor, State, State]:
        """U with all that it writes: weight, states and auxiliary states, out of place.

        matrix: m, n of the whole matrix where the arguments are parts of it.
        """
        return self.weight_update(w, state, h, g), state, auxiliary

    @property
    def rounds_at_random(self) -> bool:
        """Whether weights may be stored with stochastic rounding: `step_to_round` is there."""
        return False

    def step_to_round(self, batch: Batch) -> tuple[Tensor, float]:
        """(O of weights of one shape, one after the other, contiguous; s): U is w <- w - lr (s O + wd w)."""
        raise NotImplementedError(f"{self.name} rounds to nearest")

    def update_in_place(self, batch: Batch, h: Tensor) -> bool:
        """U of weights of one shape through kernels of the rule's own, on a GPU.

        False, with nothing done: there are none for weights that are stored like these.
        """
        return False

    def step_in_place(self, batch: Batch, h: Tensor, nonfinite: Tensor) -> bool:
        """A and U of weights of one shape in one launch, where `whole_steps`, on a GPU; their gradients are
        complete. nonfinite: as of `update_elementwise`. False, with nothing done: as `update_in_place`.
        """
        return False

    @property
    def whole_steps(self) -> bool:
        """Whether `step_in_place` is worth asking."""
        return False

    def update(self, g: Tensor, w: Tensor, state: State, h: Tensor) -> tuple[Tensor, State]:
        """state: that of A, then the auxiliary ones."""
        count = len(self.slots)
        after = self.state_update(g, w, state[:count], h)
        new_weight, new_state, auxiliary = self.whole_update(w, after, state[count:], h, g)
        return new_weight, (*new_state, *auxiliary)


def select(h: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` where the step is applied, else `old` bit for bit (a product with 0 would keep a NaN)."""
    return torch.where(h[0] != 0, new, old)
