"""Second moments of the gradient itself, without hooks (Dobb, appendix F.3, equation 12): an ablation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from titanforge.optim.dobb.capture import BasisKeeper
from titanforge.optim.dobb.reduction import Captured
from titanforge.optim.dobb.rule import Dobb
from titanforge.optim.dobb.stacks import Stack
from titanforge.optim.placement import local_tensor


class GramKeeper(BasisKeeper):
    """C <- beta_C C + G^T G (side A) or G G^T (side G) in blocks, at every step; bases every T steps.

    G is the whole mini-batch's gradient, clipped. Its blocks lie on the rank that updates them: nothing is
    sent. A weight made of several matrices has statistics of each. A missing gradient counts as zero.
    """

    reads_gradients = True

    def __init__(
        self,
        rule: Dobb,
        weights: Sequence[Captured],
        stacks: Sequence[Stack],
        gradients_of: Sequence[tuple[nn.Parameter, int]],
    ) -> None:
        """gradients_of: of each weight, and the number of matrices in it on this rank that have statistics
        of their own.
        """
        super().__init__(rule, weights, stacks)
        self._gradients_of = list(gradients_of)

    @torch.no_grad()
    def refresh(self, applies: Tensor, grad_scale: Tensor | None) -> None:
        for weight, (param, matrices) in zip(self.weights, self._gradients_of):
            old = weight.statistic
            if old.numel() == 0:
                continue
            new = self.options.decay * old.float()
            if param.grad is not None:
                gram = self._blocks_of(local_tensor(param.grad), matrices, weight.width)
                new = new + (gram if grad_scale is None else gram * grad_scale.square())
            sound = torch.isfinite(new).all(dim=(-2, -1), keepdim=True) & (applies != 0)
            old.copy_(torch.where(sound, new.to(old.dtype), old))
        if self._refreshing:
            self._refreshing = False
            self._read_cold()
            fresh = []
            for stack in self.stacks:
                seen = (stack.statistic != 0).any(dim=-1).any(dim=-1)
                fresh.append(self.find_bases(stack, stack.statistic, seen))
            self.commit(fresh, applies)

    def _blocks_of(self, gradient: Tensor, matrices: int, width: int) -> Tensor:
        """Gram matrices [b, w, w] of this rank's blocks, fp32."""
        g = gradient.float()
        if self.options.side == "A":
            # Matrices one below the other in dim -2, or experts in dim 0; blocks along dim -1.
            g = g.reshape(matrices, -1, g.shape[-1] // width, width)  # [k, m, B, w]
            g = g.permute(0, 2, 3, 1)  # [k, B, w, m]
        else:
            g = g.reshape(-1, width, g.shape[-1])  # [b, w, n]
        return (g @ g.mT).reshape(-1, width, width)
