"""The contract of a sync policy: it owns the data-parallel replicate axis and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn
from torch.distributed import ProcessGroup

from titanforge.sync.ledger import CommLedger

REPLICATE_AXIS = "dp_replicate"


class SyncPolicy(ABC):
    """Decides when replicas talk. The trainer calls, in this order:

    attach once; then per step begin_step, per micro-batch before_backward and the backward pass, and
    reduce_gradients before gradients are looked at (clipping, update).

    Gradients are sums everywhere (the loss is divided by the tokens of the whole global batch), so reducing
    means summing, never averaging.
    """

    @abstractmethod
    def attach(self, model: nn.Module, replicate_group: ProcessGroup | None, ledger: CommLedger) -> None:
        """Take charge of a model, after it was sharded and before its first backward.

        replicate_group: the ranks that hold the same shard of the same weights; None for one replica.
        """

    @abstractmethod
    def begin_step(self, num_micro_batches: int) -> None:
        """A step of so many backward passes starts."""

    @abstractmethod
    def before_backward(self, micro_batch_index: int) -> None:
        """The backward pass of this micro-batch (0-based) comes next."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Wait until every `.grad` is the sum over replicas, the same bits on each of them."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the model."""
