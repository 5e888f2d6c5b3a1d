"""Lagged clipping: the factor of a step comes from the norms of the steps before it.

Exact clipping needs every gradient before any update. Here the epilogues sum the squares of their tiles, so
the exact norm of a step is known at its end, and no pass is spent on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

DECAY = 0.9
"""What a step keeps of the held norm: after a spike the factor recovers within some twenty steps."""
_EPS = 1e-6


class LaggedClip:
    """factor_t = min(1, max_norm / r_(t-1)) with the held norm r_t = max(norm_t, DECAY r_(t-1)).

    Before the first step r is 0 and the factor 1. A step that was not applied, or whose norm is not finite,
    leaves r as it is.

    held: r as an fp32 scalar on the device; it belongs in a checkpoint.
    """

    def __init__(self, max_norm: float, device: torch.device) -> None:
        self.max_norm = max_norm
        self.held = torch.zeros((), device=device)

    def factor(self) -> Tensor | None:
        """The factor on every gradient of the coming step, on the device; None without clipping."""
        if self.max_norm <= 0:
            return None
        return (self.max_norm / (self.held + _EPS)).clamp(max=1.0)

    def update(self, norm: Tensor, apply_flag: Tensor) -> None:
        """The step is done: take its norm in."""
        seen = torch.maximum(norm, DECAY * self.held)
        keep = (apply_flag == 0) | ~torch.isfinite(norm)
        self.held.copy_(torch.where(keep, self.held, seen))
