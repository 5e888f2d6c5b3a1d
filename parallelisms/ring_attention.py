"""Ring attention (Liu et al. 2023): keys and values travel around the ranks, queries stay where they are.

Each rank has two of 2c chunks of a sequence, number r from the front and number r from the back, so that a
causal mask leaves every rank the same work. What one visit of keys yields is merged by its log-sum-exp.
Backward sends keys and values around again, with their gradients, and needs the log-sum-exp of whole rows.
Keys and values are sent as they are, with fewer heads than queries have, while attention to those held runs.

Further shape letters: t tokens of a rank · c ranks · G = H / K query heads of a key/value head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from titanforge.parallelisms.attention_parts import attention_part, attention_part_backward, merge_part
from titanforge.parallelisms.named_groups import group_named
from titanforge.parallelisms.traffic import Traffic, silent


def ring_attention(
    q_BHtE: torch.Tensor,
    k_BKtE: torch.Tensor,
    v_BKtE: torch.Tensor,
    all_documents_cBt: torch.Tensor | None,
    group_name: str,
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(E)) v over the sequences of all ranks, causal, within documents.

    q: [B, H, t, E]; k, v: [B, K, t, E], of this rank's two chunks. all_documents_cBt: int, every rank's
    document ids; None: one document. group_name: from ``name_group``. Returns [B, H, t, E] in the dtype of q,
    a token's heads side by side in memory; sums are float32 (float64 for float64 inputs).

    One operator to the compiler: what it sends stays in its place among the collectives of a step.
    """
    return _forward(q_BHtE, k_BKtE, v_BKtE, all_documents_cBt, group_name)[0]


@torch.library.custom_op(
    "titanforge::ring_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? documents, str group_name) -> (Tensor, Tensor)",
)
def _forward(
    q_BHtE: torch.Tensor,
    k_BKtE: torch.Tensor,
    v_BKtE: torch.Tensor,
    all_documents_cBt: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Also the log-sum-exp of whole rows [B, H, t], which backward reads."""
    group, traffic = group_named(group_name)
    rank, ranks = group.rank(), group.size()
    q_BHtE = _token_by_token(q_BHtE)
    ring = Ring(torch.stack((k_BKtE, v_BKtE)), group, traffic)
    out, lse = q_BHtE, q_BHtE  # of the first visit, which is of every query to its own rank's keys
    for step in range(ranks):
        if step < ranks - 1:
            ring.start()
        source = (rank - step) % ranks
        rows, columns, causal = visible_part(rank, source, q_BHtE.shape[2])
        k, v = ring.held[:, :, :, columns]
        mask = _same_document(all_documents_cBt, rank, source, rows, columns)
        part, part_lse = attention_part(q_BHtE[:, :, rows], k, v, mask, causal)
        if step:
            merge_part(out[:, :, rows], lse[:, :, rows], part, part_lse)
        else:
            out, lse = part.to(_sum_dtype(part, ranks)), part_lse
        if step < ranks - 1:
            ring.finish()
    return _token_by_token(out.to(q_BHtE.dtype)), lse


@_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, group_name: str):
    wide = torch.promote_types(q.dtype, torch.float32)
    return _token_by_token(q.new_empty(q.shape)), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.custom_op(
    "titanforge::ring_attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? documents,"
        " str group_name) -> (Tensor, Tensor)"
    ),
)
def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    documents: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of q, and of k and v [2, B, K, t, E]."""
    group, traffic = group_named(group_name)
    rank, ranks = group.rank(), group.size()
    # As cuDNN's plans take them for granted: see attention_parts.
    grad_out, q, out = (_token_by_token(x) for x in (grad_out, q, out))
    ring = Ring(torch.stack((k, v)), group, traffic)
    gradients, grad_q = ring, q  # of the first visit
    for step in range(ranks):
        if step < ranks - 1:
            ring.start()
        source = (rank - step) % ranks
        rows, columns, causal = visible_part(rank, source, q.shape[2])
        part_k, part_v = ring.held[:, :, :, columns]
        part_q, *part_kv = attention_part_backward(
            grad_out[:, :, rows],
            q[:, :, rows],
            part_k,
            part_v,
            out[:, :, rows],
            lse[:, :, rows],
            _same_document(documents, rank, source, rows, columns),
            causal,
        )
        if step:
            grad_q[:, :, rows] += part_q
            del part_q
            gradients.finish()
            for held, part in zip(gradients.held, part_kv, strict=True):
                held[:, :, columns] += part
        else:
            grad_q = part_q.to(_sum_dtype(part_q, ranks))
            gradients = Ring(torch.stack(part_kv).to(grad_q.dtype), group, traffic)
        gradients.start()  # they travel with their keys, and in the last step home
        if step < ranks - 1:
            ring.finish()
    gradients.finish()
    return _token_by_token(grad_q.to(q.dtype)), gradients.held.to(k.dtype)


@_backward.register_fake
def _(grad_out, q, k, v, out, lse, documents, group_name):  # pyright: ignore[reportMissingParameterType]
    return _token_by_token(q.new_empty(q.shape)), k.new_empty((2, *k.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, documents, ctx.group_name = inputs
    ctx.save_for_backward(q, k, v, *output, documents)


def _differentiate(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    grad_q, grad_kv = _backward(grad_out, *ctx.saved_tensors, ctx.group_name)
    return grad_q, grad_kv[0], grad_kv[1], None, None


_forward.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.titanforge.ring_attention)
def _operations(q_shape: Any, k_shape: Any, v_shape: Any, documents: Any, group_name: str, **_: Any) -> int:
    """2 · 2 · E for each pair of a query and a key that it sees. A compiler that is to choose what it
    computes twice asks for it."""
    B, H, t, E = q_shape
    return 4 * B * H * E * t * t * group_named(group_name)[0].size() // 2


def _sum_dtype(part: torch.Tensor, ranks: int) -> torch.dtype:
    """What parts are added up in. A sum of two is rounded once, whatever it is stored in."""
    return part.dtype if ranks <= 2 else torch.promote_types(part.dtype, torch.float32)


def _token_by_token(x_BHtE: torch.Tensor) -> torch.Tensor:
    """The same tensor with a token's heads side by side in memory, as projections leave and take them."""
    return x_BHtE.transpose(1, 2).contiguous().transpose(1, 2)


class Ring:
    """A tensor that each rank hands to the next, while it may still be read."""

    def __init__(self, held: torch.Tensor, group: dist.ProcessGroup, traffic: Traffic = silent) -> None:
        self.held, self._traffic = held, traffic
        ranks = dist.get_process_group_ranks(group)
        me = group.rank()
        self._group = group
        self._to, self._from = ranks[(me + 1) % len(ranks)], ranks[me - 1]
        self._coming: torch.Tensor | None = None
        self._work: list[dist.Work] = []

    def start(self) -> None:
        """Send what is held, which must not be written until ``finish``."""
        self._coming = torch.empty_like(self.held)
        self._traffic("cp", "keys and values", self.held.nbytes)
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.held, self._to, self._group),
                dist.P2POp(dist.irecv, self._coming, self._from, self._group),
            ]
        )

    def finish(self) -> None:
        """Hold what the rank before has sent."""
        assert self._coming is not None
        for work in self._work:
            work.wait()
        self.held, self._coming = self._coming, None


def visible_part(rank: int, source: int, t: int) -> tuple[slice, slice, bool]:
    """Which of a rank's queries see which of another's keys, and whether causally among themselves.

    Of ranks before, the front chunk alone is early enough; of ranks behind, both chunks, for the back one.
    """
    if source == rank:
        return slice(0, t), slice(0, t), True
    if source < rank:
        return slice(0, t), slice(0, t // 2), False
    return slice(t // 2, t), slice(0, t), False


def _same_document(
    documents_cBt: torch.Tensor | None, rank: int, source: int, rows: slice, columns: slice
) -> torch.Tensor | None:
    """bool [B, 1, 1, queries, keys]."""
    if documents_cBt is None:
        return None
    queries, keys = documents_cBt[rank][:, rows], documents_cBt[source][:, columns]
    return (queries[:, :, None] == keys[:, None, :])[:, None, None]
