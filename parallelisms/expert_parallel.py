"""Expert parallelism: ranks share the experts of each layer, and tokens are sent to those that have theirs.

Every rank routes its own tokens. A small all-to-all tells how many rows go where, an uneven one carries them
to their experts' ranks and another carries the results back: no row is dropped or padded, however uneven the
routing. Weights stay 3-D, [experts, out, in], sharded on dim 0, so checkpoints hold them whole.

Shape letters: E experts of a layer · c ranks that share them · e = E / c experts of a rank · S rows sent by
this rank · R rows that it receives.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titanforge.parallelisms.data_parallel import expert_modules, expert_shard_dim
from titanforge.parallelisms.traffic import Traffic, silent

KEY = "parallelism.expert_parallel_degree"


def check_expert_parallel(
    degree: int, *, n_experts: int, widths: tuple[int, ...], tensor_degree: int = 1, others: int = 1
) -> None:
    """Whether the experts of a model can be shared so.

    widths: output widths of the experts' matrices. others: ranks that hold the same experts, in shares.

    Raises:
        ValueError: naming the key, the value and the way out.
    """
    if degree == 1:
        if n_experts and tensor_degree > 1:
            raise ValueError(
                f"{KEY} = 1: with parallelism.tensor_parallel_degree = {tensor_degree}, experts"
                f" (model.n_experts = {n_experts}) take a multiple of its ranks: use {tensor_degree}."
            )
        return
    if not n_experts:
        raise ValueError(f"{KEY} = {degree}: this model has no experts; set it to 1.")
    if n_experts % degree:
        fitting = ", ".join(str(d) for d in range(1, degree) if n_experts % d == 0)
        raise ValueError(
            f"{KEY} = {degree} does not divide model.n_experts = {n_experts}: use one of {fitting}."
        )
    held = n_experts // degree
    if expert_shard_dim(held, others) == 1 and any(width % others for width in widths):
        raise ValueError(
            f"{KEY} = {degree} leaves {held} of {n_experts} experts to each {others} ranks, which divide"
            f" neither them nor the widths {' and '.join(map(str, widths))} of their matrices: use a larger"
            " degree, or other data-parallel degrees."
        )


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, traffic: Traffic = silent) -> int:
    """Split the experts of ``model``, on meta, over the 1-D ``mesh``; returns how many layers have any.

    Experts are modules that list ``grouped_weights`` [E, out, in], read them through ``matrices(name)``, and
    are called with rows sorted by expert [S, D] and the row after each expert's last, int32 [E].
    """
    exchange = Exchange(mesh.get_group(), traffic)
    layers: list[Any] = expert_modules(model)
    for experts in layers:
        for name in experts.grouped_weights:
            weight = experts.get_parameter(name)
            # Nothing is sent: weights are on meta, or alike on every rank.
            split = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(split, weight.requires_grad))
        experts.__class__ = _sharing_class(type(experts))
        experts.exchange = exchange
    return len(layers)


@functools.cache
def _sharing_class(base: type[nn.Module]) -> type[nn.Module]:
    """Subclass of ``base`` that is called with this rank's rows and works on the rows of its own experts."""

    def matrices(self: Any, weight: str) -> torch.Tensor:
        whole = base.matrices(self, weight)  # pyright: ignore[reportAttributeAccessIssue]
        return whole.to_local() if isinstance(whole, DTensor) else whole

    def forward(self: Any, x_SD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        deal = self.exchange.deal(ends_E)
        y_RD = base.forward(self, self.exchange.send(x_SD, deal), deal.ends_e)
        return self.exchange.give_back(y_RD, deal)

    members = {
        "__module__": base.__module__,
        "exchanges_tokens": True,
        "forward": forward,
        "matrices": matrices,
    }
    return type(base.__name__, (base,), members)


@dataclass
class Deal:
    """Who sends how many rows to whom in one layer and call.

    Attributes:
        send, receive: rows to and from each rank.
        order_R: of the rows as they arrive (by rank, then expert), in the order of experts.
        back_R: its inverse.
        ends_e: int32, the row after the last of each of this rank's experts, in that order.
    """

    send: list[int]
    receive: list[int]
    order_R: torch.Tensor
    back_R: torch.Tensor
    ends_e: torch.Tensor


class Exchange:
    """Rows to the ranks of their experts and back; ranks hold experts in the order of their numbers."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic = silent) -> None:
        self.group, self.traffic = group, traffic

    @torch.no_grad()
    def deal(self, ends_E: torch.Tensor) -> Deal:
        """Tell each rank how many rows it will get for each of its experts; the host waits for the counts."""
        ranks = self.group.size()
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).to(torch.int64)
        incoming_E = torch.empty_like(counts_E)  # [from rank, own expert]
        self.traffic("ep", "token counts", counts_E.nbytes)
        dist.all_to_all_single(incoming_E, counts_E, group=self.group)
        incoming_ce = incoming_E.view(ranks, -1)
        totals = torch.stack((counts_E.view(ranks, -1).sum(1), incoming_ce.sum(1)))
        send, receive = totals.tolist()
        rows = sum(receive)
        own_experts = torch.arange(incoming_ce.shape[1], device=ends_E.device).repeat(ranks)
        order_R = own_experts.repeat_interleave(incoming_E, output_size=rows).argsort(stable=True)
        back_R = torch.empty_like(order_R)
        back_R[order_R] = torch.arange(rows, device=ends_E.device)
        return Deal(send, receive, order_R, back_R, incoming_ce.sum(0).cumsum(0).to(torch.int32))

    def send(self, x_SD: torch.Tensor, deal: Deal) -> torch.Tensor:
        """Rows sorted by expert [S, D] → the rows of this rank's experts, sorted likewise, [R, D]."""
        rows = _ToExperts.apply(x_SD, deal, self)
        assert isinstance(rows, torch.Tensor)
        return rows

    def give_back(self, y_RD: torch.Tensor, deal: Deal) -> torch.Tensor:
        """What the experts made of them → in the place of the rows that were sent, [S, D]."""
        rows = _FromExperts.apply(y_RD, deal, self)
        assert isinstance(rows, torch.Tensor)
        return rows

    def move(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Rows [sum(send), D], by rank → [sum(receive), D]."""
        x = x.contiguous()
        received = x.new_empty(sum(receive), *x.shape[1:])
        self.traffic("ep", "tokens", x.nbytes)
        dist.all_to_all_single(received, x, receive, send, group=self.group)
        return received


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: torch.Tensor, deal: Deal, exchange: Exchange) -> torch.Tensor:
        ctx.deal, ctx.exchange = deal, exchange
        return exchange.move(x_SD, deal.send, deal.receive)[deal.order_R]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        deal = ctx.deal
        return ctx.exchange.move(grad_outputs[0][deal.back_R], deal.receive, deal.send), None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: torch.Tensor, deal: Deal, exchange: Exchange) -> torch.Tensor:
        ctx.deal, ctx.exchange = deal, exchange
        return exchange.move(y_RD[deal.back_R], deal.receive, deal.send)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        deal = ctx.deal
        return ctx.exchange.move(grad_outputs[0], deal.send, deal.receive)[deal.order_R], None, None


def share_routing(
    model: Any,
    context_group: dist.ProcessGroup | None,
    tensor_group: dist.ProcessGroup | None,
    traffic: Traffic = silent,
) -> None:
    """Have the balancing term of ``model`` see whole sequences, of which each rank routes a share.

    Replaces ``model.whole_routing``; ranks of the tensor axis have counted the same labels, those of the
    context axis their own. One sum of 2 E numbers a layer, once a micro-batch and axis. The gradient stays
    each rank's own tokens'.
    """
    groups = [group for group in (context_group, tensor_group) if group is not None]
    ranks = 1
    for group in groups:
        ranks *= group.size()

    def whole_routing(routings: list[Any], counted: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
        load_LE = torch.stack([routing.load_E for routing in routings])
        p_LE = torch.stack([routing.p_E for routing in routings])
        told = torch.cat(
            (load_LE.flatten(), p_LE.detach().flatten() / ranks, counted.to(load_LE.dtype)[None])
        )
        for axis, group in (("cp", context_group), ("tp", tensor_group)):
            if group is not None:
                part = told if axis == "cp" else told[:-1]
                traffic(axis, "routing", part.nbytes)
                dist.all_reduce(part, group=group)
        load_LE, whole_p_LE = told[:-1].view(2, *load_LE.shape)
        whole_p_LE = whole_p_LE + (p_LE - p_LE.detach()) / ranks
        whole = [
            routing._replace(load_E=load_E, p_E=p_E)
            for routing, load_E, p_E in zip(routings, load_LE, whole_p_LE, strict=True)
        ]
        return whole, told[-1]

    if groups and hasattr(model, "whole_routing"):
        model.whole_routing = whole_routing
