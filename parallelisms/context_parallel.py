"""Context parallelism: ranks share each sequence, and attention alone looks across.

- ``ulysses`` (Jacobs et al. 2023): an all-to-all turns shares of the sequence into shares of the heads and
  another turns them back; in between every rank sees whole sequences, with the attention of one process.
- ``ring``: see ``ring_attention``; keys and values stay in shares as well, and heads set no limit.

Everything else of a model works on tokens one by one, so it needs nothing but their positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanforge.parallelisms.named_groups import group_named, name_group
from titanforge.parallelisms.ring_attention import ring_attention
from titanforge.parallelisms.sequence import arguments
from titanforge.parallelisms.traffic import Traffic, silent

KEY = "parallelism.context_parallel_degree"
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


def check_context_parallel(degree: int, method: str, *, n_heads: int, tensor_degree: int = 1) -> None:
    """Whether a model of so many heads, shared by ``tensor_degree`` ranks already, can be split.

    Raises:
        ValueError: naming the key, the value and the way out.
    """
    heads = n_heads // tensor_degree
    if method == "ulysses" and heads % degree:
        raise ValueError(
            f"{KEY} = {degree} does not divide the {heads} query heads of a rank (model.n_heads = {n_heads}"
            f" / tensor_parallel_degree = {tensor_degree}): use a divisor, or "
            'parallelism.context_parallel_method = "ring", which any number fits.'
        )


def sequence_pieces(degree: int, method: str) -> int:
    """What the length of a sequence must be a multiple of."""
    return 2 * degree if method == "ring" else degree


def apply_context_parallel(
    model: nn.Module, mesh: DeviceMesh, method: str, traffic: Traffic = silent
) -> None:
    """Have ``model`` called with whole sequences on every rank of the 1-D ``mesh``, and work on a share.

    With labels a call returns the sum of the losses of this rank's tokens; with ``logits_at`` the logits, on
    every rank. Whole sequences must be multiples of ``sequence_pieces``.

    Raises ValueError for a block whose attention would not look across the ranks.
    """
    for name, block in model.get_submodule("layers").named_children():
        if not hasattr(getattr(block, "attention", None), "attend"):
            raise ValueError(
                f"{KEY} = {mesh.size()}: layers.{name} has no attention that calls its `attend`, as those of"
                " titanforge.models.layers do, and a token would see those of its own rank alone: give it"
                " one, or set the degree to 1."
            )
    group, shares = mesh.get_group(), Shares(mesh, method == "ring", traffic)
    if method == "ring":
        model.build_mask = shares.documents  # pyright: ignore
    for block in model.get_submodule("layers").children():
        attention: Any = block.get_submodule("attention")
        if method == "ring":
            attention.attend = ring_attend(group, traffic)
        else:
            attention.attend = ulysses_attend(attention.attend, group, traffic)
    model.register_forward_pre_hook(shares.take, prepend=True, with_kwargs=True)
    model.register_forward_hook(shares.give)


class Shares:
    """Which tokens of a sequence are this rank's: one run of them, or one from each end."""

    def __init__(self, mesh: DeviceMesh, balanced: bool, traffic: Traffic = silent) -> None:
        self.group, self.ranks, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.balanced, self.traffic = balanced, traffic
        self._owner: int | None = None

    def chunks(self, rank: int) -> tuple[int, ...]:
        """A rank's chunks, of ``ranks`` or twice as many."""
        return (rank, 2 * self.ranks - 1 - rank) if self.balanced else (rank,)

    def of(self, x_BT: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's share of [B, T]."""
        pieces = x_BT.chunk(self.ranks * len(self.chunks(0)), dim=1)
        return torch.cat([pieces[chunk] for chunk in self.chunks(rank)], dim=1)

    def documents(self, document_ids_BT: torch.Tensor | None) -> torch.Tensor | None:
        """Every rank's share of the document ids, [ranks, B, t]."""
        if document_ids_BT is None:
            return None
        return torch.stack([self.of(document_ids_BT, rank) for rank in range(self.ranks)])

    def take(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a call: this rank's tokens with their positions, and everyone's document ids."""
        call = arguments(*args, **kwargs)
        if call["positions"] is None:
            B, T = call["tokens"].shape
            call["positions"] = torch.arange(T, device=call["tokens"].device).expand(B, T)
        T = call["positions"].shape[1]
        # A later pipeline stage is given hidden states, which are this rank's already.
        whole = ("tokens", "positions", "labels") if call["tokens"].dim() == 2 else ("positions", "labels")
        for name in whole:
            if call[name] is not None:
                call[name] = self.of(call[name], self.rank)
        self._owner = None
        if call["logits_at"] is not None:
            chunk, within = divmod(call["logits_at"] % T, T // (self.ranks * len(self.chunks(0))))
            self._owner = next(rank for rank in range(self.ranks) if chunk in self.chunks(rank))
            call["logits_at"] = within + self.chunks(self._owner).index(chunk) * (T // self.ranks // 2)
        return (), call

    def give(self, model: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        """After a call for logits: those of the rank that has the token."""
        if self._owner is None:
            return None
        logits = output.detach().contiguous()
        self.traffic("cp", "logits", logits.nbytes)
        dist.broadcast(logits, group=self.group, group_src=self._owner)
        return logits


def ring_attend(group: dist.ProcessGroup, traffic: Traffic = silent) -> Attend:
    """Attention of this rank's queries to all keys; mask: ``Shares.documents``."""

    name = name_group(group, traffic)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return ring_attention(q, k, v, mask, name)

    return attend


def ulysses_attend(whole: Attend, group: dist.ProcessGroup, traffic: Traffic = silent) -> Attend:
    """``whole`` on all tokens and this rank's share of the heads; one all-to-all there, one back."""
    ranks, name = group.size(), name_group(group, traffic)

    def attend(q_BHtE: torch.Tensor, k_BKtE: torch.Tensor, v_BKtE: torch.Tensor, mask: Any) -> torch.Tensor:
        k_BKtE, v_BKtE = (spread_heads(x, q_BHtE.shape[1], ranks) for x in (k_BKtE, v_BKtE))
        by_rank = [x.unflatten(1, (ranks, -1)) for x in (q_BHtE, k_BKtE, v_BKtE)]
        sizes = [x.shape[2] for x in by_rank]
        exchanged = exchange(torch.cat(by_rank, 2).transpose(0, 1), name)  # [c, B, heads, t, E]
        q, k, v = exchanged.permute(1, 2, 0, 3, 4).flatten(2, 3).split(sizes, dim=1)
        out_BhTE = whole(q, k, v, mask)
        shares = out_BhTE.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)
        returned = exchange(shares, name)  # [c, B, heads of that rank, t, E]
        return returned.transpose(0, 1).flatten(1, 2)

    return attend


def spread_heads(x_BKtE: torch.Tensor, n_heads: int, ranks: int) -> torch.Tensor:
    """Key/value heads as often as ranks need them: fewer heads than ranks are sent to several."""
    K = x_BKtE.shape[1]
    if K % ranks == 0:
        return x_BKtE
    # Each rank's query heads all read one key/value head if ranks are a multiple; else one copy a query head.
    return x_BKtE.repeat_interleave((ranks if ranks % K == 0 else n_heads) // K, dim=1)


@torch.library.custom_op("titanforge::exchange_heads", mutates_args=())
def exchange(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Slice i of dim 0 goes to rank i; what comes from rank i is slice i. Its own inverse, and gradient.

    One operator to the compiler. group_name: from ``name_group``.
    """
    group, traffic = group_named(group_name)
    x = x.contiguous()
    received = torch.empty_like(x)
    traffic("cp", "heads", x.nbytes)
    dist.all_to_all_single(received, x, group=group)
    return received


@exchange.register_fake
def _(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def _note_group(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group_name = inputs[1]


def _send_back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return exchange(grad, ctx.group_name), None


exchange.register_autograd(_send_back, setup_context=_note_group)
