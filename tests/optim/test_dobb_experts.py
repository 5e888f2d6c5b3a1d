"""Dobb on experts, and with second moments of the gradient: against the line-by-line float64 form."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.optim.test_dobb import DECAY, LR, MU, T, options
from titanforge.models.layers.moe import Experts
from titanforge.optim import build_optimizer
from titanforge.optim.dobb.reference import DobbReference
from titanforge.parallelisms import apply_activation_checkpoint, apply_compile

E, N, F = 3, 4, 8


class Layer(nn.Module):
    """Experts with rows dealt by hand, as a block that wrappers know."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(E, N, F, 0.5)
        for weight in self.experts.parameters():
            nn.init.normal_(weight, std=0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.experts(x, ends)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({"0": Layer()})

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.layers["0"](x, ends)


def rows(step: int, index: int = 0) -> tuple[Tensor, Tensor]:
    """The last expert gets its first token on the second refresh, the middle one none there."""
    dealt = {0: (12, 8, 0), T: (10, 0, 10)}.get(step, (8, 6, 6))
    x = torch.randn(20, N, generator=torch.Generator().manual_seed(50 * step + index))
    return x, torch.tensor(dealt).cumsum(0).to(torch.int32)


def train(model: nn.Module, optimizer, first: int, last: int, micro_batches: int = 1) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        optimizer.begin_step(micro_batches)
        for index in range(micro_batches):
            x, ends = rows(step, index)
            loss = model(x, ends).square().sum() / (len(x) * micro_batches)
            optimizer.before_backward(index)
            loss.backward()
        optimizer.step()


class Seen:
    """Inputs and output gradients of the products, and where experts begin and end."""

    def __init__(self, experts: Experts) -> None:
        self.x: dict[str, Tensor] = {}
        self.d: dict[str, Tensor] = {}
        inner = experts.product

        def product(x: Tensor, weight: str, ends: Tensor) -> Tensor:
            y = inner(x, weight, ends)
            self.x[weight], self.ends = x.detach().double(), [0, *ends.tolist()]
            y.register_hook(lambda g: self.d.__setitem__(weight, (g * len(g)).double()))
            return y

        experts.product = product  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("side", ["A", "G"])
def test_each_expert_is_a_matrix_with_blocks_of_its_own(side: str) -> None:
    """One without tokens keeps its statistic; one that gets its first ones late starts with eigenvectors."""
    model = Model()
    experts = model.layers["0"].experts
    optimizer = build_optimizer(model, options(side=side, norm="l2", blocks=2), "float32")
    seen = Seen(experts)  # pyright: ignore
    form = dict(side=side, norm="l2", blocks=2, period=T, mu=MU)  # noqa: C408
    references = {
        name: [DobbReference(tuple(p.shape[1:]), **form) for _ in range(E)]  # pyright: ignore
        for name, p in experts.named_parameters()
    }
    for step in range(2 * T + 1):
        before = {name: p.detach().double() for name, p in experts.named_parameters()}
        train(model, optimizer, step, step + 1)
        states = optimizer.state_dict()["state"]
        for name, p in experts.named_parameters():
            captured = seen.x[name] if side == "A" else seen.d[name]
            for e, reference in enumerate(references[name]):
                own = captured[seen.ends[e] : seen.ends[e + 1]]
                saved = states[f"layers.0.experts.{name}"]
                if reference.t % T == 0 and len(own) == 0:
                    reference.skip_capture()
                expected = reference.step(before[name][e], p.grad[e].double(), own.T, LR, DECAY)
                moved = (expected - before[name][e]).abs().max()
                assert (p[e].detach().double() - expected).abs().max() < 5e-3 * moved, (step, name, e)
                for b, c in enumerate(reference.c):
                    c = torch.zeros(saved["statistic"].shape[-2:]).double() if c is None else c
                    near = 1e-5 * float(c.abs().max())
                    torch.testing.assert_close(saved["statistic"][e, b].double(), c, rtol=0, atol=near)


@pytest.mark.parametrize("side", ["A", "G"])
@pytest.mark.parametrize("wrapped", ["full", "selective", "compiled", "compiled full"])
def test_recomputed_and_compiled_experts_are_captured_once(wrapped: str, side: str) -> None:
    torch._dynamo.reset()  # compiled code of other tests counts against its limit
    ends = []
    for mode in ("none", wrapped):
        model = Model()
        if mode.split()[-1] in ("full", "selective"):
            apply_activation_checkpoint(model, mode.split()[-1], "op")
        if mode.startswith("compiled"):
            apply_compile(model, "aot_eager")
        optimizer = build_optimizer(model, options(capture="all", norm="l2", side=side), "float32")
        train(model, optimizer, 0, T + 1, micro_batches=2)
        ends.append(optimizer.state_dict()["state"]["layers.0.experts.w2"])
    for slot in ("statistic", "basis", "m"):
        torch.testing.assert_close(ends[0][slot], ends[1][slot], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["A", "G"])
def test_second_moments_of_the_gradient_enter_at_every_step(side: str) -> None:
    """Equation 12, of experts and of the three matrices of a fused projection; bases every T steps."""
    torch.manual_seed(0)
    model = nn.Module()
    model.wqkv = nn.Linear(N, 3 * F, bias=False)
    model.w = nn.Parameter(torch.randn(E, F, N))
    optimizer = build_optimizer(model, options(side=side, norm="l2", blocks=2, source="gradient"), "float32")
    form = dict(side=side, norm="l2", blocks=2, period=T, mu=MU, every_step=True)  # noqa: C408
    references = {
        name: [DobbReference((F, N), **form) for _ in range(3)]  # pyright: ignore
        for name, _ in model.named_parameters()
    }
    factor = torch.tensor(0.5)
    for step in range(2 * T + 1):
        generator = torch.Generator().manual_seed(step)
        before = {name: p.detach().double().view(3, F, N).clone() for name, p in model.named_parameters()}
        optimizer.begin_step(1)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step(grad_scale=factor)
        for name, p in model.named_parameters():
            assert p.grad is not None
            gradients = p.grad.double().view(3, F, N) * 0.5
            for i, reference in enumerate(references[name]):
                g = gradients[i]
                rows_of = g.T if side == "A" else g
                # `captured` is averaged over its columns; a Gram matrix is their sum.
                expected = reference.step(before[name][i], g, rows_of * rows_of.shape[1] ** 0.5, LR, DECAY)
                moved = (expected - before[name][i]).abs().max()
                assert (p.detach().double().view(3, F, N)[i] - expected).abs().max() < 5e-3 * moved
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["w"]["statistic"].shape[0] == E
    optimizer.begin_step(1)
    model.w.grad = None
    optimizer.step()
    decayed = 0.95 * saved["state"]["w"]["statistic"]
    torch.testing.assert_close(optimizer.state_dict()["state"]["w"]["statistic"], decayed)
