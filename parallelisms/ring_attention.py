"""Ring attention (Liu et al. 2023): keys and values travel around the ranks, queries stay where they are.

Each rank has two of 2c chunks of a sequence, number r from the front and number r from the back, so that a
causal mask leaves every rank the same work. What one visit of keys yields is merged by its log-sum-exp.
Backward sends keys and values around again, with their gradients, and needs the log-sum-exp of whole rows.

Further shape letters: t tokens of a rank · c ranks · G = H / K query heads of a key/value head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from titanforge.parallelisms.named_groups import group_named
from titanforge.parallelisms.traffic import Traffic, silent

QUERY_ROWS = 2048
"""Queries whose scores are held at once where they are formed."""


def ring_attention(
    q_BHtE: torch.Tensor,
    k_BKtE: torch.Tensor,
    v_BKtE: torch.Tensor,
    all_documents_cBt: torch.Tensor | None,
    group_name: str,
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(E)) v over the sequences of all ranks, causal, within documents.

    q: [B, H, t, E]; k, v: [B, K, t, E], of this rank's two chunks. all_documents_cBt: int, every rank's
    document ids; None: one document. group_name: from ``name_group``. Returns [B, H, t, E] in the dtype of q;
    sums are float32 (float64 for float64 inputs).

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
    wide = torch.promote_types(q_BHtE.dtype, torch.float32)
    out = torch.zeros(q_BHtE.shape, dtype=wide, device=q_BHtE.device)
    lse = out.new_full(q_BHtE.shape[:3], float("-inf"))
    ring = Ring(torch.stack((k_BKtE, v_BKtE)), group, traffic)
    for step in range(ranks):
        if step < ranks - 1:
            ring.start()
        source = (rank - step) % ranks
        rows, columns, causal = visible_part(rank, source, q_BHtE.shape[2])
        k, v = ring.held[:, :, :, columns]
        mask = _same_document(all_documents_cBt, rank, source, rows, columns)
        part, part_lse = attention_part(q_BHtE[:, :, rows], k, v, mask, causal)
        # Every query sees itself in the first step, so from then on lse is finite.
        merged = torch.logaddexp(lse[:, :, rows], part_lse)
        kept = torch.exp(lse[:, :, rows] - merged).unsqueeze(-1)
        out[:, :, rows] = out[:, :, rows] * kept + part * torch.exp(part_lse - merged).unsqueeze(-1)
        lse[:, :, rows] = merged
        if step < ranks - 1:
            ring.finish()
    return out.to(q_BHtE.dtype), lse


@_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, group_name: str):
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide)


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
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    ring = Ring(torch.stack((k, v)), group, traffic)
    zeros = torch.zeros(ring.held.shape, dtype=lse.dtype, device=q.device)
    gradients = Ring(zeros, group, traffic)
    for step in range(ranks):
        if step < ranks - 1:
            ring.start()
        source = (rank - step) % ranks
        rows, columns, causal = visible_part(rank, source, q.shape[2])
        part_k, part_v = ring.held[:, :, :, columns]
        grads = attention_part_backward(
            grad_out[:, :, rows],
            q[:, :, rows],
            part_k,
            part_v,
            out[:, :, rows],
            lse[:, :, rows],
            delta[:, :, rows],
            _same_document(documents, rank, source, rows, columns),
            causal,
        )
        if step:
            gradients.finish()
        grad_q[:, :, rows] += grads[0]
        gradients.held[0][:, :, columns] += grads[1]
        gradients.held[1][:, :, columns] += grads[2]
        gradients.start()  # they travel with their keys, and in the last step home
        if step < ranks - 1:
            ring.finish()
    gradients.finish()
    return grad_q.to(q.dtype), gradients.held.to(k.dtype)


@_backward.register_fake
def _(grad_out, q, k, v, out, lse, documents, group_name):  # pyright: ignore[reportMissingParameterType]
    return q.new_empty(q.shape), k.new_empty((2, *k.shape))


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


# ------------------------------------------------------------------ one visit


def attention_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries [B, H, rows, E] to some keys [B, K, columns, E], and its log-sum-exp [B, H, rows].

    Both in float32 (float64). A query that sees none of the keys has an output of 0 and -inf.
    """
    if _flash_takes(q, mask):
        return _flash_part(q, k, v, causal)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(wide).unsqueeze(2), v.to(wide).unsqueeze(2)
    outs, lses = [], []
    for rows in _row_chunks(q.shape[2]):
        scores = _scores(q, k, mask, causal, rows)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
        outs.append((p @ v).flatten(1, 2))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def attention_part_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What these keys add to the gradients of q, k and v, in float32 (float64).

    out, lse: of whole rows, over all keys. delta: Σ grad_out · out of each row.
    """
    if _flash_takes(q, mask):
        return _flash_part_backward(grad_out, q, k, v, out, lse, causal)
    wide = lse.dtype
    K, scale = k.shape[1], q.shape[-1] ** -0.5
    k, v = k.to(wide).unsqueeze(2), v.to(wide).unsqueeze(2)
    grad_q, grad_k, grad_v = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows in _row_chunks(q.shape[2]):
        scores = _scores(q, k, mask, causal, rows)
        p = torch.exp(scores - _grouped(lse[:, :, rows], K).unsqueeze(-1))
        g = _grouped(grad_out[:, :, rows].to(wide), K)
        grad_v += (p.transpose(-1, -2) @ g).sum(2, keepdim=True)
        grad_scores = p * (g @ v.transpose(-1, -2) - _grouped(delta[:, :, rows], K).unsqueeze(-1)) * scale
        grad_q.append((grad_scores @ k).flatten(1, 2))
        q_rows = _grouped(q[:, :, rows].to(wide), K)
        grad_k += (grad_scores.transpose(-1, -2) @ q_rows).sum(2, keepdim=True)
    return torch.cat(grad_q, 2), grad_k.squeeze(2), grad_v.squeeze(2)


def _row_chunks(rows: int) -> list[slice]:
    return [slice(start, min(start + QUERY_ROWS, rows)) for start in range(0, rows, QUERY_ROWS)]


def _grouped(x: torch.Tensor, K: int) -> torch.Tensor:
    """[B, H, ...] → [B, K, G, ...]."""
    return x.unflatten(1, (K, -1))


def _scores(
    q: torch.Tensor, k_BK1cE: torch.Tensor, mask: torch.Tensor | None, causal: bool, rows: slice
) -> torch.Tensor:
    """[B, K, G, rows, columns], -inf where a key is not seen."""
    q_rows = _grouped(q[:, :, rows].to(k_BK1cE.dtype), k_BK1cE.shape[1])
    scores = (q_rows * q.shape[-1] ** -0.5) @ k_BK1cE.transpose(-1, -2)
    if mask is not None:
        scores.masked_fill_(~mask[..., rows, :], float("-inf"))
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + rows.start)
        scores.masked_fill_(later, float("-inf"))
    return scores


# The same two functions by the flash kernels, which take no document mask.


def _flash_takes(q: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return q.is_cuda and mask is None and q.dtype in (torch.bfloat16, torch.float16)


def _flash_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out.float(), lse[:, :, : q.shape[2]].float()


def _flash_part_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    repeats, K = q.shape[1] // k.shape[1], k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset of dropout
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        unused,
        unused,
    )
    return grad_q.float(), _grouped(grad_k.float(), K).sum(2), _grouped(grad_v.float(), K).sum(2)
