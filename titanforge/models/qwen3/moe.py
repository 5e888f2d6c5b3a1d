"""Qwen3 with experts: the dense model whose feed-forward layers are layers of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from titanforge.models.layers.attention import AttentionMask
from titanforge.models.layers.loss import IGNORE_INDEX
from titanforge.models.layers.moe import MoE, Routing
from titanforge.models.layers.norm import RMSNorm
from titanforge.models.layers.rope import Rotation
from titanforge.models.qwen3.args import Qwen3Args
from titanforge.models.qwen3.model import Qwen3, build_attention, depth_std


class ExpertBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + experts(norm(x))``; also returns how the tokens were dealt."""

    def __init__(self, args: Qwen3Args, layer_id: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = build_attention(args, layer_id)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = MoE(
            args.dim,
            args.hidden_dim,
            args.n_experts,
            args.n_experts_per_token,
            depth_std(layer_id),
            args.normalize_top_k,
            with_bias=args.moe_balancing == "bias",
        )

    def forward(
        self, x_BTD: torch.Tensor, rotation: Rotation, mask: AttentionMask
    ) -> tuple[torch.Tensor, Routing]:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation, mask)
        y_BTD, routing = self.feed_forward(self.ffn_norm(x_BTD))
        return x_BTD + y_BTD, routing


class AddGradient(torch.autograd.Function):
    """x as it is; its backward also starts that of ``scale * term``, a scalar."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, term: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        ctx.scale = torch.as_tensor(scale, dtype=term.dtype, device=term.device).clone()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad_outputs[0], ctx.scale, None


class Qwen3Moe(Qwen3):
    """The whole model. Its loss is the tokens' alone; the balancing term acts on the gradient.

    The load is gathered here and not in the layers: a block that is recomputed in backward would count twice.

    Attributes:
        load: float32 [layers, E + 1], a buffer that no checkpoint holds: rows sent to each expert since the
            last step, over all micro-batches, and the imbalance times rows sent.
        last_load: the same of the last step, over all ranks.
        loss_scale: where the head is elsewhere, what the sum of losses is multiplied with before backward:
            the term must act on the gradient here too. None: labels are for a head.
    """

    block_class = ExpertBlock
    load: torch.Tensor
    last_load: torch.Tensor
    loss_scale: float | torch.Tensor | None = None

    def __init__(self, args: Qwen3Args) -> None:
        super().__init__(args)
        for name in ("load", "last_load"):
            zeros = torch.zeros(args.n_layers, args.n_experts + 1, dtype=torch.float32)
            self.register_buffer(name, zeros, persistent=False)

    def reset_buffers(self) -> None:
        """Nothing was sent yet."""
        if not self.load.is_meta:
            self.load.zero_()
            self.last_load.zero_()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_at: int | None = None,
    ) -> torch.Tensor:
        """As ``Decoder.forward``."""
        x_BTD, rotation, mask = self._enter(tokens, positions, document_ids)
        routings: list[Routing] = []
        for block in self.layers.values():
            x_BTD, routing = block(x_BTD, rotation, mask)
            routings.append(routing)
        elsewhere = self.output is None and self.loss_scale is not None
        result = self._leave(x_BTD, None if elsewhere else labels, logits_at)
        if labels is None or not (self.training and torch.is_grad_enabled() and routings):
            return result
        whole, counted = self.whole_routing(routings, (labels != IGNORE_INDEX).sum())
        imbalance_L = torch.stack([routing.imbalance for routing in whole])
        self._count(routings, imbalance_L)
        coefficient = self.args.moe_auxiliary_loss_coefficient
        if self.args.moe_balancing == "auxiliary_loss" and coefficient:
            # Per counted token, as the loss is: whoever divides that sum divides this one too.
            term = coefficient * counted * imbalance_L.sum() / self.args.n_layers
            # The value stays the tokens' loss, or what a stage hands on.
            result = (
                AddGradient.apply(result, term, self.loss_scale)
                if elsewhere
                else result + (term - term.detach())
            )
        return result

    def whole_routing(
        self, routings: list[Routing], counted: torch.Tensor
    ) -> tuple[list[Routing], torch.Tensor]:
        """How whole sequences were dealt, and how many of their labels count: here all of them were seen.

        May be replaced where a call works on a part of each sequence.
        """
        return routings, counted

    @torch.no_grad()
    def _count(self, routings: list[Routing], imbalance_L: torch.Tensor) -> None:
        for layer, routing, imbalance in zip(self.layers, routings, imbalance_L, strict=True):
            load_E = routing.load_E
            self.load[int(layer)] += torch.cat((load_E, (imbalance * load_E.sum())[None]))

    def step_statistics(self) -> torch.Tensor | None:
        return self.load

    @torch.no_grad()
    def end_step(self, apply_flag: torch.Tensor) -> None:
        if self.args.moe_balancing == "bias":
            rate = self.args.moe_bias_update_rate * apply_flag
            for layer, block in self.layers.items():
                block.feed_forward.router.balance(self.load[int(layer), :-1], rate)  # pyright: ignore
        self.last_load.copy_(self.load)
        self.load.zero_()

    def metrics(self) -> dict[str, torch.Tensor]:
        """Of the busiest and the idlest expert of any layer the load relative to the mean; mean imbalance."""
        load_LE = self.last_load[:, :-1]  # also of layers that are elsewhere
        sent_L = load_LE.sum(1).clamp(min=1)
        relative_LE = load_LE * load_LE.shape[1] / sent_L[:, None]
        return {
            "router/max_load": relative_LE.max(),
            "router/min_load": relative_LE.min(),
            "router/imbalance": (self.last_load[:, -1] / sent_L).mean(),
        }

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        if self.load.dtype != torch.float32:  # a model.to(bfloat16), which could not count to 257
            self.load, self.last_load = self.load.float(), self.last_load.float()
        return self
