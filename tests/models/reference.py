"""A plain Llama 3 in float64, written from the papers and from nothing of ours, to compare with.

Loops over sequences, heads and pairs of coordinates; takes the weights as a dict of the model's names.
"""

from __future__ import annotations

import math

import torch


def reference_hidden(
    weights: dict[str, torch.Tensor],
    tokens: torch.Tensor,
    *,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    eps: float,
    theta: float,
) -> torch.Tensor:
    """Final hidden states of one document: int64 [T] → [T, D]."""
    x = weights["tok_embeddings.weight"][tokens]
    for i in range(n_layers):
        w = {key.removeprefix(f"layers.{i}."): value for key, value in weights.items()}
        h = rms_norm(x, w["attention_norm.weight"], eps)
        q, k, v = (h @ w[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
        width = q.shape[1] // n_heads
        heads = []
        for head in range(n_heads):
            shared = head * n_kv_heads // n_heads
            q_h = rotate(q[:, head * width : (head + 1) * width], theta)
            k_h = rotate(k[:, shared * width : (shared + 1) * width], theta)
            scores = q_h @ k_h.T / math.sqrt(width)
            future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
            p = scores.masked_fill(future, -math.inf).softmax(dim=-1)
            heads.append(p @ v[:, shared * width : (shared + 1) * width])
        x = x + torch.cat(heads, dim=1) @ w["attention.wo.weight"].T
        h = rms_norm(x, w["ffn_norm.weight"], eps)
        gate = h @ w["feed_forward.w1.weight"].T
        up = h @ w["feed_forward.w3.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w["feed_forward.w2.weight"].T
    return rms_norm(x, weights["norm.weight"], eps)


def reference_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of -log p(label) over labels other than -100."""
    total = hidden.new_zeros(())
    for h, label in zip(hidden, labels.tolist(), strict=True):
        if label != -100:
            logits = head @ h
            total = total + torch.logsumexp(logits, 0) - logits[label]
    return total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate coordinates (i, i + E/2) of position t by t·theta^(-2i/E), as complex numbers; [T, E]."""
    half = x.shape[1] // 2
    angle = torch.arange(len(x))[:, None] * theta ** (
        -2 * torch.arange(half, dtype=torch.float64) / (2 * half)
    )
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=1)
