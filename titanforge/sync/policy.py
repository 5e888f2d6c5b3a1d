"""The contract of a sync policy: it owns the data-parallel replicate axis and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titanforge.sync.ledger import CommLedger

REPLICATE_AXIS = "dp_replicate"
WORLD_AXIS = "world"
"""All ranks of all replicas."""

LocalUpdateKind = Literal["gradient", "momentum", "orthonormal"]


@dataclass(frozen=True)
class Replication:
    """How the model that this rank holds a part of exists several times.

    replicas: the ranks that hold the same part. shards: the ranks that one replica's weights are split over,
    along whatever axes; None: one rank. world: all ranks that the decision is for; default: `replicas`.
    """

    replicas: ProcessGroup
    shards: ProcessGroup | None = None
    world: ProcessGroup | None = None


@dataclass(frozen=True)
class LocalUpdate:
    """What a rule that waits for the decision does to its weights on a step without communication.

    kind: `gradient`: W <- W - lr G; `momentum`: W <- W - lr M; `orthonormal`: the rule's own U.
    lr: peak rate, which the schedule multiplies; None: the rate of the weight's group.
    """

    kind: LocalUpdateKind = "orthonormal"
    lr: float | None = None


class Replicated(Protocol):
    """One tensor that replicas are to agree on: this rank's part of a weight or of an optimizer state."""

    @property
    def name(self) -> str:
        """The weight's name."""
        ...

    @property
    def slot(self) -> str:
        """`weight`, or the state's name."""
        ...

    @property
    def splits(self) -> bool:
        """Whether the weight's rule waits for the decision between A and U."""
        ...

    @property
    def has_mean(self) -> bool:
        """False for a state that replicas share one copy of at a sync (a basis)."""
        ...

    @property
    def factored(self) -> bool:
        """Whether U can be taken of the mean over replicas without averaging this momentum."""
        ...

    @property
    def tensor(self) -> Tensor: ...


Mean = Callable[[Sequence[Tensor]], None]
"""Overwrites tensors with their mean over replicas."""


class StepOptimizer(Protocol):
    """An optimizer that takes whole steps."""

    def step(self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None) -> None: ...


class SplitOptimizer(StepOptimizer, Protocol):
    """An optimizer whose step can be cut in two, with the decision to communicate in between.

    Not every one that has these methods can be (one that updates in backward cannot): `splits_steps` says.
    """

    @property
    def splits_steps(self) -> bool: ...

    def accumulate_step(
        self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None, whole: bool = True
    ) -> None:
        """A where the rule splits. Where it does not, the whole step if `whole`; else `finish_step` takes it,
        and the scale goes into the gradients here."""
        ...

    def finish_step(self, local: LocalUpdate | None = None, mean: Mean | None = None) -> None:
        """U of the rules that split, or a local step in its place; with `mean`, of the mean of the factored
        momenta, which only their factors are averaged for."""
        ...

    @property
    def finishes_if(self) -> bool:
        """Whether `finish_step_if` may be called."""
        ...

    def finish_step_if(self, condition: Tensor, local: LocalUpdate) -> None:
        """`finish_step(local)` where the scalar `condition` is not 0 on the device; the host does not wait to
        know. Where it is 0 weights, states, gradients and the step count keep their bits, and `finish_step`
        takes the step."""
        ...

    def replicated_tensors(self) -> Sequence[Replicated]:
        """Weights (or their fp32 masters) and states in one order on every rank."""
        ...

    def watch_momenta(self) -> tuple[Sequence[str], Tensor]:
        """Names of weights, in the order of `replicated_tensors`, and fp32 [names], which `accumulate_step`
        fills from now on: the sums of squares of the momenta that it leaves on this rank. None of a momentum
        that would be read again for it."""
        ...

    @property
    def step_count(self) -> Tensor:
        """Steps applied so far: an int64 scalar on the device."""
        ...

    def set_step_count(self, count: int) -> None:
        """Go on from so many applied steps, also between the halves of a step."""
        ...

    def write_weights(self) -> None:
        """The weights behind fp32 masters, after the masters were changed."""
        ...


class SyncPolicy(ABC):
    """Decides when replicas talk. The trainer calls, in this order:

    attach once; then per step begin_step, per micro-batch before_backward and the backward pass,
    reduce_gradients before gradients are looked at (clipping), and step for the update. synchronize makes
    replicas coherent between steps, for a checkpoint, an evaluation, an export.

    The loss is divided by `gradient_divisor`, so that reducing gradients means summing, never averaging.
    """

    local_gradients = False
    """Whether gradients, and so their norm, stay each replica's own."""

    alarm = False
    """Whether the decision of the last step told all ranks that one of them needs attention, or left its
    update out. Equal on all ranks."""

    @property
    def encodes(self) -> bool:
        """Whether there is anything that this rank sends by `sync.exchange_dtype`; True of one replica."""
        return True

    @property
    def syncs_next(self) -> bool:
        """Whether it is known before the coming step that it synchronises: then all replicas can agree on it
        beforehand, else each of them takes it by itself until the decision. Equal on all ranks."""
        return True

    @property
    def apart(self) -> bool:
        """Whether the last step was each replica's own. Equal on all ranks."""
        return False

    @abstractmethod
    def attach(
        self,
        model: nn.Module,
        replication: Replication | None,
        ledger: CommLedger,
        optimizer: Any = None,
    ) -> None:
        """Take charge of a model, after it was sharded and before its first backward.

        replication: None for one replica.
        optimizer: of the model, for policies that look at its state (`SplitOptimizer`).
        """

    def gradient_divisor(self, tokens_by_replica: Sequence[int]) -> int:
        """What this rank divides its sum of token losses by: target tokens, at least 1."""
        return max(sum(tokens_by_replica), 1)

    @abstractmethod
    def begin_step(
        self, num_micro_batches: int, tokens_by_replica: Sequence[int] = (), agreed: bool = True
    ) -> None:
        """A step of so many backward passes starts; each replica trains on so many target tokens in it.

        agreed: whether replicas have agreed on these numbers, and will on whether the step is applied. Else
            only the own number counts, and the flag of `step` is each replica's own.
        """

    @abstractmethod
    def before_backward(self, micro_batch_index: int) -> None:
        """The backward pass of this micro-batch (0-based) comes next."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Wait until every `.grad` is what this replica's update reads: with `local_gradients` its own, else
        the sum over replicas, the same bits on each of them."""

    def step(
        self,
        optimizer: Any,
        apply_flag: Tensor | None,
        grad_scale: Tensor | None,
        attention: bool = False,
    ) -> None:
        """Update weights and states; the first arguments as of `RuleOptimizer.step`.

        attention: this rank has something that all must hear of; `alarm` is what they heard, where the policy
            has them talk in this step.
        """
        optimizer.step(apply_flag=apply_flag, grad_scale=grad_scale)

    def synchronize(self, reason: str) -> None:  # noqa: B027
        """Make replicas coherent, between steps and on all ranks; does nothing where they are.

        reason: what asks for it, such as `checkpoint`, for the log.
        """

    def take_events(self) -> list[dict[str, Any]]:
        """What happened since the last call, for the log; numbers, text, or scalar tensors to be read."""
        return []

    def metrics(self) -> dict[str, Any]:
        """Figures for a log line, by metric name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Plain values that a resumed run needs, equal on all ranks right after `synchronize`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take over a saved state, after the optimizer's; an empty one of another policy starts anew."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the model."""
