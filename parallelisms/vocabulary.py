"""Embedding, head and loss with the vocabulary split over tensor-parallel ranks (Shoeybi et al. 2019, §3).

No rank ever holds a logit of another's rows: the cross-entropy takes one maximum and two sums over ranks, per
token. Ranks hold rows as ``torch.chunk`` deals them, so any vocabulary of at least as many rows works.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titanforge.parallelisms.sequence_collectives import Sharers, scatter_sequence
from titanforge.parallelisms.traffic import Traffic, silent


@dataclass
class VocabularySplit:
    """This rank's rows ``start … end-1`` of a weight [V, D] that is sharded over ``mesh`` (1-D)."""

    mesh: DeviceMesh
    vocab_size: int
    traffic: Traffic = field(default=silent, compare=False)

    def __post_init__(self) -> None:
        rows = -(-self.vocab_size // self.mesh.size())
        self.start = min(self.vocab_size, rows * self.mesh.get_local_rank())
        self.end = min(self.vocab_size, self.start + rows)

    @property
    def degree(self) -> int:
        """Ranks that share the vocabulary."""
        return self.mesh.size()

    def local(self, weight_VD: torch.Tensor) -> torch.Tensor:
        """The rows of this rank; their gradient is complete as it comes."""
        return weight_VD.to_local() if isinstance(weight_VD, DTensor) else weight_VD

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """[..., V / ranks] → [..., V] on every rank; for sampling."""
        shape = (*logits.shape[:-1], self.vocab_size)
        whole = torch.empty(shape, device="meta")
        return DTensor.from_local(
            logits.contiguous(),
            self.mesh,
            [Shard(logits.dim() - 1)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        ).full_tensor()

    def loss(
        self, logits_CV: torch.Tensor, target_C1: torch.Tensor, ignored_C1: torch.Tensor, wide: torch.dtype
    ) -> torch.Tensor:
        """Sum of the losses of a chunk of tokens, the same on every rank; logits [C, V / ranks]."""
        return self._parts(logits_CV, target_C1, ignored_C1, wide)[0]

    def loss_and_gradient(
        self, logits_CV: torch.Tensor, target_C1: torch.Tensor, ignored_C1: torch.Tensor, wide: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Also its gradient by this rank's logits, in their dtype; rows of ignored tokens as they come."""
        loss, exp_CV, sum_C1, place_C1, inside_C1, log_p_C1 = self._parts(
            logits_CV, target_C1, ignored_C1, wide
        )
        grad_CV = exp_CV.div_(sum_C1).to(logits_CV.dtype)
        # expm1 keeps the gradient of a confident token, which p - 1 would round away.
        own_C1 = torch.where(inside_C1, torch.expm1(log_p_C1).to(grad_CV.dtype), grad_CV.gather(1, place_C1))
        return loss, grad_CV.scatter_(1, place_C1, own_C1)

    def _parts(
        self, logits_CV: torch.Tensor, target_C1: torch.Tensor, ignored_C1: torch.Tensor, wide: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        group = self.mesh.get_group()
        greatest_C1 = logits_CV.amax(dim=-1, keepdim=True).to(wide)
        self.traffic("tp", "loss", greatest_C1.nbytes)
        dist.all_reduce(greatest_C1, dist.ReduceOp.MAX, group=group)
        shifted_CV = logits_CV.to(wide) - greatest_C1
        inside_C1 = (target_C1 >= self.start) & (target_C1 < self.end)
        place_C1 = (target_C1 - self.start).clamp(0, self.end - self.start - 1)
        target_logit_C1 = shifted_CV.gather(1, place_C1).masked_fill(~inside_C1, 0.0)
        exp_CV = shifted_CV.exp_()
        sums_C2 = torch.cat((exp_CV.sum(dim=-1, keepdim=True), target_logit_C1), dim=1)
        self.traffic("tp", "loss", sums_C2.nbytes)
        dist.all_reduce(sums_C2, group=group)
        sum_C1, target_logit_C1 = sums_C2.split(1, dim=1)
        log_p_C1 = target_logit_C1 - sum_C1.log()
        loss = -log_p_C1.masked_fill(ignored_C1, 0.0).sum()
        return loss, exp_CV, sum_C1, place_C1, inside_C1, log_p_C1


def split_embedding(module: nn.Module, split: VocabularySplit) -> None:
    """Give an embedding whose weight is sharded by rows a forward int64 [B, T] → [B, T / ranks, D].

    Each rank looks up the rows that it has, and the sum over ranks is scattered over the sequence.
    """
    mesh = split.mesh
    sharers = Sharers(mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name)

    def forward(tokens_BT: torch.Tensor) -> torch.Tensor:
        elsewhere = (tokens_BT < split.start) | (tokens_BT >= split.end)
        rows = F.embedding(
            (tokens_BT - split.start).masked_fill(elsewhere, 0),
            split.local(module.weight),  # pyright: ignore[reportArgumentType]
        ).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return scatter_sequence(rows, sharers)

    module.forward = forward
