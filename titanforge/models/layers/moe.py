"""A feed-forward layer of experts: each token is sent to k of E, none is ever dropped.

Further shape letters: E experts (here, not a head's width) · k experts of a token · S = N·k rows sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from titanforge.models.layers.grouped import grouped_linear
from titanforge.models.layers.init_spec import InitSpec, Normal


class Routing(NamedTuple):
    """What a layer tells of one batch.

    load_E: float32, tokens sent to each expert; no gradient.
    p_E: float32, each expert's mean probability over the tokens, with its gradient.
    """

    load_E: torch.Tensor
    p_E: torch.Tensor

    @property
    def imbalance(self) -> torch.Tensor:
        """Float32 scalar, E Σ f p over the experts, f being an expert's share of what was sent.

        1 when all are alike, E when one takes everything (Fedus et al. 2021, "Switch Transformers", eq. 4).
        """
        return self.load_E.shape[0] * (self.load_E / self.load_E.sum() * self.p_E).sum()


class Experts(nn.Module):
    """E SwiGLUs as three 3-D weights [E, out, in]: ``w1`` gate, ``w3`` up, ``w2`` down."""

    grouped_weights = ("w1", "w2", "w3")
    """Read by ``product`` alone, which may be replaced."""

    def __init__(self, n_experts: int, dim: int, hidden_dim: int, depth_std: float) -> None:
        """``depth_std``: initial standard deviation of the matrices that are scaled by depth."""
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.depth_std = depth_std

    def forward(self, x_SD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert, and the row after each expert's last → [S, D]."""
        gate_SF = self.product(x_SD, "w1", ends_E)
        up_SF = self.product(x_SD, "w3", ends_E)
        return self.product(F.silu(gate_SF) * up_SF, "w2", ends_E)

    def product(self, x: torch.Tensor, weight: str, ends_E: torch.Tensor) -> torch.Tensor:
        """``grouped_linear`` with the weight of that name."""
        return grouped_linear(x, self.matrices(weight), ends_E)

    def matrices(self, weight: str) -> torch.Tensor:
        """The weight of that name, of the experts that are here."""
        return getattr(self, weight)

    def init_spec(self) -> dict[str, InitSpec]:
        return {"w1": Normal(0.02), "w2": Normal(self.depth_std), "w3": Normal(self.depth_std)}


class Router(nn.Linear):
    """Logits of the experts. ``bias_E`` is no bias of the linear: it sways the choice, not the weights.

    It is a float32 buffer, kept by checkpoints, that ``balance`` moves after each step and no gradient does
    (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts").
    """

    expert_bias: torch.Tensor | None

    def __init__(self, dim: int, n_experts: int, with_bias: bool) -> None:
        super().__init__(dim, n_experts, bias=False)
        zeros = torch.zeros(n_experts, dtype=torch.float32) if with_bias else None
        self.register_buffer("expert_bias", zeros)

    def reset_buffers(self) -> None:
        """No expert is favoured at the start."""
        if self.expert_bias is not None and not self.expert_bias.is_meta:
            self.expert_bias.zero_()

    @torch.no_grad()
    def balance(self, load_E: torch.Tensor, rate: float | torch.Tensor) -> None:
        """Favour the experts that had less than their share of ``load_E``, by ``rate`` each (eq. 5 there)."""
        if self.expert_bias is not None:
            self.expert_bias.add_(torch.sign(load_E.mean() - load_E) * rate)

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            # A model.to(bfloat16) would round away the small steps: keep the move, undo the rounding.
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def init_spec(self) -> dict[str, InitSpec]:
        return {"weight": Normal(0.02)}


class MoE(nn.Module):
    """``Σ over the k chosen experts of p · expert(x)``; p: softmax over all experts, then over the chosen."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        n_experts: int,
        n_experts_per_token: int,
        depth_std: float,
        normalize_top_k: bool = True,
        with_bias: bool = False,
    ) -> None:
        """``normalize_top_k``: divide the chosen probabilities by their sum. with_bias: see ``Router``."""
        super().__init__()
        self.n_experts_per_token = n_experts_per_token
        self.normalize_top_k = normalize_top_k
        self.router = Router(dim, n_experts, with_bias)
        self.experts = Experts(n_experts, dim, hidden_dim, depth_std)

    def forward(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        weight_Nk, chosen_Nk, routing = self.route(x_ND)
        order_S = chosen_Nk.view(-1).argsort(stable=True)
        back_S = torch.empty_like(order_S).scatter_(
            0, order_S, torch.arange(order_S.shape[0], device=order_S.device)
        )
        ends_E = routing.load_E.cumsum(0).to(torch.int32)
        x_SD = SendRows.apply(x_ND, order_S, back_S, self.n_experts_per_token)
        y_SD = ReturnRows.apply(self.experts(x_SD, ends_E), order_S, back_S)
        assert isinstance(y_SD, torch.Tensor)
        y_NkD = y_SD.view(x_ND.shape[0], -1, x_ND.shape[1])
        y_ND = (weight_Nk.to(y_NkD.dtype).unsqueeze(1) @ y_NkD).squeeze(1)
        return y_ND.view_as(x_BTD), routing

    def route(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """Weights (float32) and numbers of each token's experts [N, k], and how the batch was dealt."""
        p_NE = torch.softmax(self.router(x_ND), dim=-1, dtype=torch.float32)
        bias_E = self.router.expert_bias
        score_NE = p_NE if bias_E is None else p_NE.detach() + bias_E
        chosen_Nk = score_NE.topk(self.n_experts_per_token, dim=-1).indices
        weight_Nk = p_NE.gather(1, chosen_Nk)
        if self.normalize_top_k:
            weight_Nk = weight_Nk / weight_Nk.sum(-1, keepdim=True)
        sent = chosen_Nk.view(-1)
        # float32 counts exactly up to 2²⁴ rows, more than a micro-batch sends.
        load_E = torch.zeros_like(p_NE[0].detach()).scatter_add_(
            0, sent, torch.ones_like(sent, dtype=torch.float32)
        )
        return weight_Nk, chosen_Nk, Routing(load_E, p_NE.mean(0))


class SendRows(torch.autograd.Function):
    """Row n of x to each of its k places → [S, D]. Backward sums a token's k rows in a fixed order.

    Indexing would do, but its gradient is a scatter whose order of additions changes from run to run.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, order_S: torch.Tensor, back_S: torch.Tensor, k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(back_S)
        ctx.k = k
        return x_ND[order_S // k]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back_S,) = ctx.saved_tensors
        grad_SD = grad_outputs[0][back_S]
        return grad_SD.view(-1, ctx.k, grad_SD.shape[1]).sum(1), None, None, None


class ReturnRows(torch.autograd.Function):
    """Rows back in the order in which their tokens came; backward sends them out again."""

    @staticmethod
    def forward(ctx: Any, y_SD: torch.Tensor, order_S: torch.Tensor, back_S: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order_S)
        return y_SD[back_S]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order_S,) = ctx.saved_tensors
        return grad_outputs[0][order_S], None, None
