"""Sampling from a model, without a key/value cache: each new token is a forward pass over the window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    *,
    eos_id: int | None = None,
    run_to_end: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> torch.Tensor:
    """Continue ``tokens`` (int64 [1, T], T ≥ 1, on the model's device) → [1, T + new].

    temperature: divides the logits; 0 takes the likeliest token. top_k: draw among the k likeliest; None:
    all. generator: source of randomness; draws happen on its device. eos_id: stop after this token, which is
    kept. run_to_end: still call the model ``max_new_tokens`` times. For a model sharded over ranks, all of
    which must
        call it equally often, whatever each has drawn.
    stop: is asked before each token, and ends the text there; on several ranks the same answer on all.

    A text longer than the model's ``args.max_seq_len`` is seen through a window of its last tokens. The
    window has one length for the whole call (padding at its end is invisible to causal attention): one shape
    to compile.

    Raises ValueError for an empty prompt, a negative temperature or a top_k below 1.
    """
    if tokens.dim() != 2 or tokens.shape[0] != 1 or tokens.shape[1] < 1:
        raise ValueError(f"generate continues one prompt, int64 [1, T ≥ 1]; got shape {list(tokens.shape)}")
    if temperature < 0:
        raise ValueError(f"temperature = {temperature}: must be 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k = {top_k}: must be at least 1")
    prompt = tokens.shape[1]
    text = torch.cat((tokens, tokens.new_zeros(1, max_new_tokens)), dim=1)
    window = min(text.shape[1], model.args.max_seq_len)  # pyright: ignore
    end = None
    for length in range(prompt, prompt + max_new_tokens):
        if stop():
            return text[:, :length]
        first = max(0, length - window)
        logits_V = model(text[:, first : first + window], logits_at=length - first - 1)[0]
        text[0, length] = _draw(logits_V.float(), temperature, top_k, generator)
        if end is None and eos_id is not None and text[0, length].item() == eos_id:
            end = length + 1
            if not run_to_end:
                break
    return text[:, :end]


def _draw(
    logits_V: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> torch.Tensor:
    """One token id, int64 scalar."""
    if temperature == 0:
        return logits_V.argmax()
    logits_V = logits_V / temperature
    if top_k is not None and top_k < logits_V.numel():
        kept, ids = logits_V.topk(top_k)
        logits_V = torch.full_like(logits_V, float("-inf")).scatter_(0, ids, kept)
    probabilities_V = logits_V.softmax(dim=-1)
    if generator is not None:
        probabilities_V = probabilities_V.to(generator.device)
    return torch.multinomial(probabilities_V, 1, generator=generator)[0].to(logits_V.device)
