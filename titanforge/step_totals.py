"""A step's loss, gradient norm and fitness over ranks; and what replicas tell one another of a step that each
takes by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titanforge.agreement import GlobalBatch
from titanforge.sync.policy import REPLICATE_AXIS

if TYPE_CHECKING:
    from titanforge.trainer import Trainer


class StepTotals:
    """Owns the reductions of a step that are no gradients.

    Attributes:
        alone: the step under way is each replica's own until the policy's decision.
        tokens_seen: of the run up to such a step, once it has been logged.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.dims, self.ledger = trainer.dims, trainer.ledger
        self.replica = self.dims.get_mesh("dp_replicate").get_local_rank()
        self.alone = False
        self.tokens_seen = 0
        self._batch = GlobalBatch([], [], False)

    def begin_step(self, batch: GlobalBatch) -> bool:
        """A step on this data starts. Returns whether each replica takes it by itself."""
        self.alone = not self.trainer.sync.syncs_next
        if self.alone:
            self._batch = batch
        return self.alone

    def over_ranks(self, loss: Tensor, grad_norm: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss of the whole global batch; the norm that all ranks share, or, where gradients are each
        replica's own, the root mean square of theirs: not finite on all ranks if it is on one. In a step that
        replicas take by themselves, this one's parts of both: not finite on its ranks if it is on one."""
        name, axis = ("dp_shard_cp", "dp_shard") if self.alone else ("loss", "loss")
        group = self.dims.get_group(name)
        if grad_norm is None or not self.trainer.sync.local_gradients:
            self.ledger.all_reduce(loss, group, axis=axis, purpose="loss")
            return loss, grad_norm
        both = torch.stack([loss, grad_norm.square() / self.dims.degree("loss")])
        self.ledger.all_reduce(both, group, axis=axis, purpose="loss")
        return both[0], both[1].sqrt()

    def begin_log(self, loss: Tensor, grad_norm: Tensor | None) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """What gives both over all replicas, which the update need not wait for; as they are if nobody will
        look at them."""
        trainer = self.trainer
        if not self.alone or not trainer.metrics.due(trainer.step + 1):
            return lambda: (loss, grad_norm)
        batch, square = self._batch, torch.zeros_like(loss) if grad_norm is None else grad_norm.square()
        losses = loss * max(batch.tokens[self.replica], 1)
        counts = torch.tensor(trainer.agreement.told(batch), dtype=torch.float64)
        nonfinite = trainer.finite.told(self.replica, self.dims.dp_replicate)
        told = torch.cat([torch.stack([losses, square]).double(), nonfinite.double(), counts.to(loss.device)])
        group = self.dims.get_group("dp_replicate")
        work = self.ledger.all_reduce(told, group, axis=REPLICATE_AXIS, purpose="loss", async_op=True)

        def end() -> tuple[Tensor, Tensor | None]:
            if work is not None:
                work.wait()
            trainer.finite.heard(told[2 : -counts.numel()].long())
            tokens, *totals = (int(count) for count in told[-counts.numel() :].tolist())
            self.tokens_seen = trainer.agreement.heard(batch, [tokens, *totals])
            mean = told[0] / max(tokens, 1)
            return mean.float(), None if grad_norm is None else told[1].sqrt().float()

        return end

    def share_nonfinite(self) -> None:
        """Let all replicas know of the steps that others have left out."""
        group = self.dims.get_group("dp_replicate")
        reduce = partial(self.ledger.all_reduce, group=group, axis=REPLICATE_AXIS, purpose="nonfinite steps")
        self.trainer.finite.share(self.replica, self.dims.dp_replicate, reduce)

    def sum_over_data(self, count: Tensor) -> None:
        """In place, over all ranks that see other data: how many may not apply a micro-batch."""
        self.ledger.all_reduce(count, self.dims.get_group("loss"), axis="loss", purpose="finite losses")

    def sum_squares(self, square: Tensor, group: ProcessGroup) -> None:
        """In place, over the ranks of a group, each with a part of the gradients."""
        axes = ("tp", "pp", "ep", "dp_shard_mod_ep")
        axis = next((axis for axis in axes if group is self.dims.get_group(axis)), "dp_shard")
        self.ledger.all_reduce(square, group, axis=axis, purpose="grad_norm")
