"""Linears of one module that read the same input."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn


class Projecting(nn.Module):
    """A module some of whose linears are applied to one input, group by group.

    ``projections``: attribute names of the linears of each group, in the order in which they are applied.
    Forward calls `project`, which may be replaced by one product for a whole group. ``normalised_head``:
    width of the heads that outputs are normalised by, each on its own: their gradients are then formed in
    memory head by head, for whoever lays them side by side; None: they are not.
    """

    projections: ClassVar[tuple[tuple[str, ...], ...]] = ()
    normalised_head: int | None = None

    def project(self, x: torch.Tensor, names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        """x [..., K] through each linear of a group: outputs [..., N], N of each linear's own."""
        return tuple(getattr(self, name)(x) for name in names)
