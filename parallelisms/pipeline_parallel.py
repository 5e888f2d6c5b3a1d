"""Pipeline parallelism on torch.distributed.pipelining: stages out of a whole model, and running them.

A model is cut from outside: a stage is the model's own class with the modules of other stages taken away
(blocks out of ``layers``; None in the place of ``tok_embeddings``, ``norm``, ``output``). Every parameter
keeps its name, so weights, states and checkpoints are called what they are called in the whole model.

Schedules: GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B (Narayanan et al. 2021), zero bubble
(Qi et al. 2024: interleaved ZB1P, and ZB-V).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from titanforge.parallelisms.pipeline_stages import DEGREE, PipelinePlan
from titanforge.parallelisms.sequence import arguments, pad_call
from titanforge.parallelisms.traffic import Traffic, silent

_ENDS = {"tok_embeddings": ("tok_embeddings", "pos_embeddings"), "norm": ("norm",), "output": ("output",)}


def split_model(model: nn.Module, plan: PipelinePlan, rank: int) -> list[nn.Module]:
    """Leave in ``model`` (on meta) what a rank along the pipeline axis holds; returns its stages, ascending.

    A single stage is ``model`` itself. Several are views of it: modules of its class that share its blocks,
    buffers and arguments, so that what is done to the blocks of ``model`` is done to theirs.

    Raises ValueError for weights outside of the modules that stages are made of.
    """
    dealt = {"layers", *(attribute for attributes in _ENDS.values() for attribute in attributes)}
    for name, _ in model.named_parameters():
        if name.partition(".")[0] not in dealt:
            raise ValueError(
                f"{DEGREE} = {plan.ranks}: {name} belongs to no stage, and each would train a copy: weights"
                f" are in {', '.join(sorted(dealt))}; set the degree to 1, or move it there."
            )
    stages = [plan.stages[stage] for stage in plan.stages_of(rank)]
    _keep(model, [name for stage in stages for name in stage])
    if len(stages) == 1:
        parts = [model]
    else:
        parts = [_view(model) for _ in stages]
        for part, modules in zip(parts, stages, strict=True):
            _keep(part, modules)
    return parts


def _keep(model: nn.Module, modules: Sequence[str]) -> None:
    layers = model.get_submodule("layers")
    kept = {name: block for name, block in layers.named_children() if f"layers.{name}" in modules}
    model.layers = nn.ModuleDict(kept)
    for end, attributes in _ENDS.items():
        for attribute in attributes if end not in modules else ():
            if getattr(model, attribute, None) is not None:
                setattr(model, attribute, None)


def _view(model: nn.Module) -> nn.Module:
    """A module with the same children, whose children and hooks can be changed by themselves."""
    view = copy.copy(model)
    for name, value in vars(model).items():
        if isinstance(value, dict) and name not in ("_buffers", "_parameters"):
            view.__dict__[name] = value.copy()
    return view


def _for_this_stage(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All stages are called alike; what the head is told would have another stage look for its head.

    Labels stay for a stage that has a term of the loss of its own, which it multiplies with ``loss_scale``.
    """
    if module.output is None:
        unwanted = ("logits_at",) if hasattr(module, "loss_scale") else ("labels", "logits_at")
        kwargs = {name: value for name, value in kwargs.items() if name not in unwanted}
    return args, kwargs


def _set_loss_scale(part: Any, scale: float | torch.Tensor) -> None:
    if hasattr(part, "loss_scale"):
        part.loss_scale = scale


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        return grad_outputs[0]


@functools.cache
def _can_start_at_custom_functions() -> bool:
    """Whether backward can start at a function of ours whose output is gone, as that of weights does.

    In torch 2.11 such a function dies with its output. Where it does, the last stage forms both gradients at
    once, as its loss is one: the blocks' nodes belong to torch.
    """
    x = torch.zeros(1, requires_grad=True)
    y = _Identity.apply(x)
    assert isinstance(y, torch.Tensor) and y.grad_fn is not None
    edge = GradientEdge(y.grad_fn, 0)
    y.detach_()
    try:
        torch.autograd.grad([edge], [x], grad_outputs=[torch.ones(1)])
    except RuntimeError:
        return False
    return True


class _Stage(PipelineStage):
    """Sends nothing to its own rank, which gloo cannot: torch 2.11 warms up both sides of every boundary."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.peer != dist.get_rank()]


class Pipeline:
    """This rank's stages: a training call by the schedule, and any other call stage after stage.

    Both take whole sequences on every rank, the same on all ranks of the axis.

    Args:
        parts: from ``split_model``, made parallel along the other axes and given memory.
        group, rank: of the pipeline axis.
        seq_len: tokens of a training sequence.
        shares: ranks that share a sequence between blocks (context x tensor), and so the hidden states.
        multiple: what sequences of other calls are padded to a multiple of.
        dtype: of hidden states.
        traffic: is told of each tensor that this rank sends.

    Attributes:
        args: the model's.
        has_last: whether this rank has the head, and so the losses.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        plan: PipelinePlan,
        group: dist.ProcessGroup,
        rank: int,
        device: torch.device,
        *,
        batch_size: int,
        seq_len: int,
        shares: int,
        multiple: int,
        dtype: torch.dtype,
        traffic: Traffic = silent,
    ) -> None:
        self.parts, self.plan, self.group, self.device = list(parts), plan, group, device
        for part in parts:  # before the hooks that are there: the context axis acts on logits_at
            part.register_forward_pre_hook(_for_this_stage, prepend=True, with_kwargs=True)
            _set_loss_scale(part, 1.0)
        self.args: Any = parts[0].args
        self.stages = plan.stages_of(rank)
        self.has_last = len(plan.stages) - 1 in self.stages
        self.traffic = traffic
        self._rank, self._shares, self._multiple, self._dtype = rank, shares, multiple, dtype
        self._microbatch = batch_size // plan.microbatches
        self._sums: list[torch.Tensor] = []
        self._divisor: float | torch.Tensor = 1
        self._schedule = self._build_schedule(seq_len)

    def _build_schedule(self, seq_len: int) -> Any:
        # Shapes are stated: found out by a trial, they would cost a forward with every side effect it has.
        hidden = torch.empty(
            self._hidden_shape(self._microbatch, seq_len),
            dtype=self._dtype,
            device="meta",
            requires_grad=True,
        )
        tokens = torch.empty((self._microbatch, seq_len), dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        count = len(self.plan.stages)
        whole_backward = None
        if self.plan.kind.splits_backward and not _can_start_at_custom_functions():
            whole_backward = lambda: lambda: None  # noqa: E731  # both at once, and nothing left for later
        stages = [
            _Stage(
                part,
                stage,
                count,
                self.device,
                input_args=tokens if stage == 0 else hidden,
                output_args=loss if stage == count - 1 else hidden,
                group=self.group,
                dw_builder=whole_backward if stage == count - 1 else None,
            )
            for stage, part in zip(self.stages, self.parts, strict=True)
        ]
        schedule = get_schedule_class(self.plan.kind.name)
        several = issubclass(schedule, PipelineScheduleMulti)
        assert several == self.plan.kind.several
        # Losses are sums over tokens, divided by the step's tokens: nothing is left to be averaged.
        return schedule(
            stages if several else stages[0],  # pyright: ignore[reportArgumentType]
            n_microbatches=self.plan.microbatches,
            loss_fn=self._share_of_loss,
            scale_grads=False,
        )

    def _hidden_shape(self, sequences: int, seq_len: int) -> tuple[int, int, int]:
        return sequences, seq_len // self._shares, self.args.dim

    def _share_of_loss(self, loss_sum: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._sums.append(loss_sum.detach())
        return loss_sum / self._divisor

    def forward_backward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        document_ids: torch.Tensor | None,
        labels: torch.Tensor,
        divisor: float | torch.Tensor,
    ) -> torch.Tensor:
        """Accumulate the gradients of ``loss_sum / divisor`` over all micro-batches; int64 [B, T] each.

        Returns the float32 sum of the token losses on ranks with the last stage, 0 elsewhere.
        """
        self._sums, self._divisor = [], divisor
        for part in self.parts:
            _set_loss_scale(part, 1 / divisor)
        call = {"positions": positions, "document_ids": document_ids, "labels": labels}
        call = {name: value for name, value in call.items() if value is not None}
        shape = self._hidden_shape(self._microbatch, tokens.shape[1])
        size = torch.Size(shape).numel() * self._dtype.itemsize
        for _ in range(self.plan.transfers(self._rank) * self.plan.microbatches):  # before any can fail
            self.traffic("pp", "hidden states and gradients", size)
        self._schedule.step(
            *((tokens,) if 0 in self.stages else ()),
            target=labels if self.has_last else None,
            return_outputs=False,
            **call,
        )
        if not self.has_last:
            return torch.zeros((), dtype=torch.float32, device=self.device)
        return torch.stack(self._sums).sum()

    @torch.no_grad()
    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_at: int | None = None,
    ) -> torch.Tensor:
        """The whole model's call without gradients, for evaluation and samples; collective over the axis.

        Returns the sum of the token losses where ``has_last`` and 0 elsewhere, if ``labels`` is given; else
        the float32 logits [B, V] of one place, on every rank.
        """
        call = pad_call(arguments(tokens, positions, document_ids, labels, logits_at), self._multiple)
        sequences, T = call["tokens"].shape
        if call["positions"] is None:  # a later stage could not tell how long the sequences are
            call["positions"] = torch.arange(T, device=tokens.device).expand(sequences, T)
        # Where a rank has one stage, the ranks work on one micro-batch each; with several stages on a rank
        # the sends of two would cross.
        size = sequences if len(self.stages) > 1 or sequences % self._microbatch else self._microbatch
        pieces = [
            {n: v.split(size)[i] if isinstance(v, torch.Tensor) else v for n, v in call.items()}
            for i in range(sequences // size)
        ]
        outputs: list[torch.Tensor] = []
        pending: list[Any] = []
        for stage, part in zip(self.stages, self.parts, strict=True):
            outputs = self._run_stage(stage, part, pieces, outputs, pending)
        for work, _ in pending:
            work.wait()
        if labels is not None:
            return torch.stack(outputs).sum() if self.has_last else torch.zeros((), device=self.device)
        assert logits_at is not None, "hidden states are not gathered from the last stage"
        logits = torch.empty((sequences, self.args.vocab_size), dtype=torch.float32, device=self.device)
        if self.has_last:
            logits.copy_(torch.cat(outputs))
        self.traffic("pp", "logits", logits.nbytes)
        dist.broadcast(logits, group=self.group, group_src=self.plan.rank_of(len(self.plan.stages) - 1))
        return logits

    def _run_stage(
        self,
        stage: int,
        part: nn.Module,
        pieces: Sequence[dict[str, Any]],
        before: list[torch.Tensor],
        pending: list[Any],
    ) -> list[torch.Tensor]:
        """Outputs of one stage for each piece; what goes to another rank is on its way when this returns.

        before: outputs of this rank's stage before, which are the input if that one is the neighbour.
        """
        outputs = []
        source = self.plan.rank_of(stage - 1) if stage > 0 else self._rank
        last = stage == len(self.plan.stages) - 1
        target = self._rank if last else self.plan.rank_of(stage + 1)
        for index, piece in enumerate(pieces):
            sequences, T = piece["tokens"].shape
            if stage > 0:
                hidden = torch.empty(0)
                if source == self._rank:
                    hidden = before[index]
                else:
                    shape = self._hidden_shape(sequences, T)
                    hidden = torch.empty(shape, dtype=self._dtype, device=self.device)
                    dist.recv(hidden, group=self.group, group_src=source)
                piece = {**piece, "tokens": hidden}
            output = part(**piece)
            outputs.append(output)
            if target != self._rank:
                output = output.contiguous()
                pending.append((dist.isend(output, group=self.group, group_dst=target), output))
                self.traffic("pp", "evaluation", output.nbytes)
        return outputs

    def train(self) -> None:
        """As ``nn.Module.train``."""
        for part in self.parts:
            part.train()

    def eval(self) -> None:
        """As ``nn.Module.eval``."""
        for part in self.parts:
            part.eval()
