"""The device's side of a training step: forward, backward and update, as they are or as one CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titanforge.captured import CapturedStep, CudaGraph, StaticBatches
from titanforge.data import Batch
from titanforge.parallelisms import clip_factor, set_is_last_micro_batch

if TYPE_CHECKING:
    from titanforge.trainer import Trainer

LossAndNorm = tuple[Tensor, Tensor | None]


class DeviceStep:
    """Owns what the device reads of the host in a step: tensors, since a captured step would keep numbers as
    they were.

    Attributes:
        captured: the step as one CUDA graph; None without `compile.cuda_graph`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        device = trainer.device
        self._divisor = torch.ones((), dtype=torch.float32, device=device)
        self._valid_tokens = torch.ones((), dtype=torch.float32, device=device)
        self._step_number = torch.zeros((), dtype=torch.int64, device=device)
        self._static = StaticBatches(device)
        self.captured = self._build_captured() if trainer.config.compile.cuda_graph else None

    def _build_captured(self) -> CapturedStep[LossAndNorm]:
        """`_compute` as one CUDA graph, on micro-batches in memory that stays where it is."""
        trainer = self.trainer
        graph = CudaGraph(trainer.device)
        trainer.metrics.watch_graph(graph)
        return CapturedStep(
            lambda: self._compute(self._static.batches),
            graph,
            ready=lambda: trainer.optimizer.capturable,
            usual=lambda: trainer.optimizer.usual_step,
            before_capture=trainer.optimizer.zero_grad,
            around_capture=trainer.metrics.pause,
        )

    def __call__(self, batches: list[Batch], divisor: float, valid_tokens: int) -> LossAndNorm:
        """Train on this rank's micro-batches. Returns the loss and the gradient's norm; of a step that
        replicas take by themselves and that is not logged, this one's part of them.

        divisor: of the sum of token losses that gradients are of (`SyncPolicy.gradient_divisor`).
        valid_tokens: that the loss is the mean over.
        """
        trainer = self.trainer
        self._divisor.fill_(divisor)
        self._valid_tokens.fill_(valid_tokens)
        self._step_number.fill_(trainer.step + 1)
        if self.captured is None:
            trainer.optimizer.begin_step(trainer.micro_batches)
            return self._compute(batches)
        trainer.optimizer.begin_captured_step(trainer.micro_batches)
        self._static.fill(batches)
        return self.captured()

    def _compute(self, batches: list[Batch]) -> LossAndNorm:
        trainer, totals, optimizer = self.trainer, self.trainer.totals, self.trainer.optimizer
        optimizer.zero_grad()
        accumulate = self._accumulate if trainer.pipeline is None else self._accumulate_in_stages
        loss = accumulate(batches)
        trainer.sync.reduce_gradients()
        grad_norm, scale = optimizer.clip(self._clip_factor)
        loss, grad_norm = totals.over_ranks(loss, grad_norm)
        if not totals.alone:
            totals.share_nonfinite()
        apply_flag = trainer.finite.check(loss, grad_norm, self._step_number, totals.alone)
        if not batches:
            apply_flag = torch.zeros_like(apply_flag)
        logged = totals.begin_log(loss, grad_norm)
        if self.captured is None:
            trainer.sync.step(optimizer, apply_flag, scale, trainer.agreement.attention)
        else:  # its host side is done
            optimizer.apply_step(apply_flag, scale)
        if (statistics := trainer.model.step_statistics()) is not None:
            # Ranks along tp have routed their own tokens too; replicas count together where they stepped so.
            data = ("dp_shard_cp", "dp_shard") if trainer.sync.apart else ("loss", "loss")
            for name, axis in (data, ("tp", "tp")):
                group = trainer.dims.get_group(name)
                trainer.ledger.all_reduce(statistics, group, axis=axis, purpose="model statistics")
            trainer.model.end_step(apply_flag)
        return logged()

    def _accumulate(self, batches: list[Batch]) -> Tensor:
        """Forward and backward of each micro-batch; returns this rank's part of the loss."""
        trainer = self.trainer
        loss = torch.zeros((), dtype=torch.float32, device=trainer.device)
        for index, batch in enumerate(batches):
            set_is_last_micro_batch(trainer.model, index == len(batches) - 1)
            trainer.sync.before_backward(index)
            batch = batch.to(trainer.device)
            loss_sum = trainer.model(batch.tokens, batch.positions, trainer.documents(batch), batch.labels)
            # The gradient of every rank is its share of the mean over the whole global batch (over the
            # replica's part of it if replicas step by themselves), so sums over ranks and micro-batches
            # need no further division, however the padding is spread.
            share = loss_sum / self._divisor
            # Fused weights change during backward, so it must be known by now whether they may.
            trainer.optimizer.before_backward(index, trainer.finite.may_apply(share.detach()))
            share.backward()
            loss += loss_sum.detach() / self._valid_tokens
        return loss

    def _accumulate_in_stages(self, batches: list[Batch]) -> Tensor:
        """The same on this rank's pipeline stages, whose schedule cuts each batch into micro-batches.

        Replicas sum gradients after the last batch, not during it: backward ends stage by stage.
        """
        trainer = self.trainer
        assert trainer.pipeline is not None
        loss = torch.zeros((), dtype=torch.float32, device=trainer.device)
        for batch in batches:
            batch = batch.to(trainer.device)
            loss += trainer.pipeline.forward_backward(
                batch.tokens, batch.positions, trainer.documents(batch), batch.labels, self._divisor
            )
        return loss / self._valid_tokens

    def _clip_factor(self) -> tuple[Tensor, Tensor]:
        """The norm of the gradients in `.grad`, and the factor that the optimizer has yet to apply."""
        trainer = self.trainer
        stages = trainer.dims.get_group("pp")
        return clip_factor(
            trainer.model.parameters(),
            trainer.config.training.max_norm,
            groups=[] if stages is None else [stages],
            all_reduce=trainer.totals.sum_squares,
        )
