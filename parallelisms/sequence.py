"""What reaches a model whose sequences are split over ranks: padded to a length that all ranks can share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

IGNORE_INDEX = -100


def pad_sequences(model: nn.Module, multiple: int) -> None:
    """Lengthen the sequences of each call of ``model`` to a multiple of ``multiple`` tokens.

    For samples, whose prompts have any length; training sequences fit as they are. Padding stands at the end,
    which causal attention hides, in a document of its own and without labels. Hidden states returned without
    ``logits_at`` or ``labels`` are of the padded length.
    """

    def pad(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (), pad_call(arguments(*args, **kwargs), multiple)

    model.register_forward_pre_hook(pad, prepend=True, with_kwargs=True)


def pad_call(call: dict[str, Any], multiple: int) -> dict[str, Any]:
    """A model's call by names with its sequences padded; see ``pad_sequences``."""
    T = call["tokens"].shape[1]
    missing = -T % multiple
    if not missing:
        return call
    call = dict(call)
    for name, fill in (("tokens", 0), ("positions", 0), ("document_ids", -1), ("labels", IGNORE_INDEX)):
        if call[name] is not None:
            call[name] = nn.functional.pad(call[name], (0, missing), value=fill)
    if call["logits_at"] is not None:
        call["logits_at"] %= T  # counted from the end, it would mean padding
    if call["positions"] is None:
        places = torch.arange(T + missing, device=call["tokens"].device)
        call["positions"] = places.clamp(max=T - 1).expand(call["tokens"].shape)
    return call


def arguments(
    tokens: torch.Tensor,
    positions: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    logits_at: int | None = None,
) -> dict[str, Any]:
    """A model's call by names."""
    return {
        "tokens": tokens,
        "positions": positions,
        "document_ids": document_ids,
        "labels": labels,
        "logits_at": logits_at,
    }
