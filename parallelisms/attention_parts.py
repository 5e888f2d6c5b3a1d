"""Attention of some queries to some keys, with what merging such parts takes: their log-sum-exp.

By cuDNN's kernels where PyTorch says that they can run, by flash attention's where they cannot (deterministic
algorithms, heads of more than 128 elements), both without a document mask; else scores are formed.

PyTorch keeps cuDNN's plans by the sizes and strides of q, k and v alone, and would run one on an output, its
gradient or a log-sum-exp that lies in memory otherwise than where the plan was made, with wrong results. So
these lie like q, and the log-sum-exp is contiguous.

Further shape letters: r queries · s keys · G = H / K query heads of a key/value head.
"""

from __future__ import annotations

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

QUERY_ROWS = 2048
"""Queries whose scores are held at once where they are formed, and whose outputs are merged at once."""

CUDNN_HEAD_DIM = 128
"""Greatest that cuDNN's backward takes in every release, which PyTorch is not asked for without gradients."""


def attention_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries [B, H, r, E] to some keys [B, K, s, E], and its log-sum-exp [B, H, r].

    mask: bool [B, 1, 1, r, s]. The output is in the dtype of q from a kernel, else in float32 (float64), in
    which the log-sum-exp always is. A query that sees none of the keys has an output of 0 and -inf.
    """
    kernel = choose_kernel(q, k, v, mask, causal)
    if kernel == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        return out, lse.view(q.shape[:3])
    if kernel == "flash":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse[:, :, : q.shape[2]]
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
    mask: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What these keys add to the gradients of q, k and v, in the dtype that ``attention_part`` gives.

    out, lse: of whole rows, over all keys; grad_out and out with the strides of q.
    """
    kernel = choose_kernel(q, k, v, mask, causal)
    if kernel is not None:
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset of dropout
        sizes = (q.shape[2], k.shape[2], 0.0, causal)
        lse = lse.contiguous()
        if kernel == "cudnn":
            given = (grad_out, q, k, v, out, lse.unsqueeze(-1), unused, unused, None, None, None, *sizes)
            return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*given)
        given = (grad_out, q, k, v, out, lse, None, None, *sizes, unused, unused)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given)
    wide = lse.dtype
    K, scale = k.shape[1], q.shape[-1] ** -0.5
    k, v = k.to(wide).unsqueeze(2), v.to(wide).unsqueeze(2)
    grad_q, grad_k, grad_v = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows in _row_chunks(q.shape[2]):
        scores = _scores(q, k, mask, causal, rows)
        p = torch.exp(scores - _grouped(lse[:, :, rows], K).unsqueeze(-1))
        g = _grouped(grad_out[:, :, rows].to(wide), K)
        grad_v += (p.transpose(-1, -2) @ g).sum(2, keepdim=True)
        delta = (g * _grouped(out[:, :, rows].to(wide), K)).sum(-1, keepdim=True)
        grad_scores = p * (g @ v.transpose(-1, -2) - delta) * scale
        grad_q.append((grad_scores @ k).flatten(1, 2))
        q_rows = _grouped(q[:, :, rows].to(wide), K)
        grad_k += (grad_scores.transpose(-1, -2) @ q_rows).sum(2, keepdim=True)
    return torch.cat(grad_q, 2), grad_k.squeeze(2), grad_v.squeeze(2)


def merge_part(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Make out [B, H, r, E] and its finite lse [B, H, r] those over the keys of a further part as well.

    In place, computed in the dtype of lse, some rows at a time: intermediate results of all rows would be
    passes over several times the output's bytes, and as much memory.
    """
    for rows in _row_chunks(out.shape[2]):
        merged, old = out[:, :, rows], lse[:, :, rows]
        weight = torch.sigmoid(part_lse[:, :, rows] - old).unsqueeze(-1)
        merged.copy_(torch.lerp(merged.to(lse.dtype), part[:, :, rows].to(lse.dtype), weight))
    lse.copy_(torch.logaddexp(lse, part_lse))


def choose_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> str | None:
    """ "cudnn", "flash", or None: form the scores."""
    if not q.is_cuda or mask is not None or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    params = SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    cudnn = q.shape[-1] <= CUDNN_HEAD_DIM and can_use_cudnn_attention(params)
    return "cudnn" if cudnn else "flash"


# ------------------------------------------------------------------ formed scores


def _row_chunks(rows: int) -> list[slice]:
    return [slice(start, min(start + QUERY_ROWS, rows)) for start in range(0, rows, QUERY_ROWS)]


def _grouped(x: torch.Tensor, K: int) -> torch.Tensor:
    """[B, H, ...] → [B, K, G, ...]."""
    return x.unflatten(1, (K, -1))


def _scores(
    q: torch.Tensor, k_BK1sE: torch.Tensor, mask: torch.Tensor | None, causal: bool, rows: slice
) -> torch.Tensor:
    """[B, K, G, rows, s], -inf where a key is not seen."""
    q_rows = _grouped(q[:, :, rows].to(k_BK1sE.dtype), k_BK1sE.shape[1])
    scores = (q_rows * q.shape[-1] ** -0.5) @ k_BK1sE.transpose(-1, -2)
    if mask is not None:
        scores.masked_fill_(~mask[..., rows, :], float("-inf"))
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + rows.start)
        scores.masked_fill_(later, float("-inf"))
    return scores
