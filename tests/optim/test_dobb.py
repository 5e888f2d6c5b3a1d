"""Dobb: algorithms 1 to 4 against a line-by-line float64 form, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titanforge.config.sections import JobConfig, Optimizer
from titanforge.layout import check_model
from titanforge.optim import build_optimizer
from titanforge.optim.dobb.reference import DobbReference
from titanforge.parallelisms import ParallelDims

LR, DECAY, MU, T = 1e-2, 0.1, 0.9, 3


class Net(nn.Module):
    """Two linears with a nonlinearity between, as blocks that wrappers know."""

    def __init__(self, n: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Block(n, hidden)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, n: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(n, hidden, bias=False)
        self.w2 = nn.Linear(hidden, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.tanh(self.w1(x)))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def options(**dobb: object) -> Optimizer:
    made = Optimizer(name="Dobb", lr=LR, weight_decay=DECAY, momentum=MU)
    for key, value in {"period": T, "basis_dtype": "float32", **dobb}.items():
        setattr(made.dobb, key, value)
    return made


def micro_batch(step: int, index: int = 0, tokens: int = 40) -> Tensor:
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(100 * step + index))


def train(model: Net, optimizer, first: int, last: int, micro_batches: int = 1) -> None:
    """The loop of the trainer, with a sum of squares over the positions of the step for a loss."""
    for step in range(first, last):
        optimizer.zero_grad()
        optimizer.begin_step(micro_batches)
        for index in range(micro_batches):
            x = micro_batch(step, index)
            loss = model(x).square().sum() / (len(x) * micro_batches)
            optimizer.before_backward(index)
            loss.backward()
        optimizer.step()


class Seen:
    """Inputs and output gradients of every linear in a step, taken by hooks of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.x: dict[str, Tensor] = {}
        self.d: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._hook(f"{name}.weight"))

    def _hook(self, name: str):
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            self.x[name] = inputs[0].detach().double().T
            positions = len(inputs[0])
            output.register_hook(lambda g: self.d.__setitem__(name, (g * positions).double().T))

        return hook


@pytest.mark.parametrize("side", ["A", "G"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(
    ("blocks", "qr", "iterations", "nesterov"),
    [
        (1, "cholesky", 1, False),
        (2, "cholesky", 2, True),
        (4, "householder", 1, False),
        (2, "cholesky", 0, False),
    ],
)
def test_equals_the_paper(
    side: str, norm: str, blocks: int, qr: str, iterations: int, nesterov: bool
) -> None:
    """Given the same gradients, inputs and output gradients, over three refreshes."""
    model = net()
    chosen = options(side=side, norm=norm, blocks=blocks, qr=qr, iterations=iterations)
    chosen.nesterov = nesterov
    optimizer = build_optimizer(model, chosen, "float32")
    seen = Seen(model)
    form = dict(side=side, norm=norm, blocks=blocks, period=T, mu=MU, qr=qr, iterations=iterations)  # noqa: C408
    references = {
        name: DobbReference(tuple(p.shape), nesterov=nesterov, **form)  # pyright: ignore
        for name, p in model.named_parameters()
    }
    for step in range(2 * T + 1):
        before = {name: p.detach().double() for name, p in model.named_parameters()}
        train(model, optimizer, step, step + 1)
        for name, p in model.named_parameters():
            assert p.grad is not None
            reference = references[name]
            captured = seen.x[name] if side == "A" else seen.d[name]
            expected = reference.step(before[name], p.grad.double(), captured, LR, DECAY)
            # A sign of a coefficient near zero may fall either way in fp32: such entries are rare.
            error = (p.detach().double() - expected).abs()
            moved = (expected - before[name]).abs().max()
            assert error.max() < (1e-3 if norm == "l2" else 0.5) * moved, (step, name)
            assert error.mean() < (1e-4 if norm == "l2" else 1e-2) * moved, (step, name)
            saved = optimizer.state_dict()["state"][name]
            for b, (c, u) in enumerate(zip(reference.c, reference.u)):
                assert c is not None and u is not None
                scale = float(c.abs().max())
                torch.testing.assert_close(saved["statistic"][b].double(), c, rtol=0, atol=1e-5 * scale)
                ours = saved["basis"][b].double()
                torch.testing.assert_close(ours.T @ ours, torch.eye(len(c)).double(), rtol=0, atol=1e-5)
                # Columns up to their sign, which no update depends on.
                torch.testing.assert_close((ours.T @ u).diagonal().abs().mean(), torch.tensor(1.0).double(),
                                           rtol=0, atol=1e-3)  # fmt: skip


class FusedAttention(nn.Module):
    """As much of an attention as tells that `wqkv` is three matrices, and of how many rows a head is."""

    head_dim = 4

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wqkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wqkv(x))


@pytest.mark.parametrize("parts", [3, 6])
@pytest.mark.parametrize("side", ["A", "G"])
def test_fused_projection_is_three_matrices_or_heads(side: str, parts: int) -> None:
    """Each with its own blocks of the output axis (G); one set of blocks of their common input (A)."""
    model = FusedAttention()
    chosen = options(side=side, norm="l2", blocks=2)
    chosen.per_head = parts == 6
    optimizer = build_optimizer(model, chosen, "float32")
    seen = Seen(model)
    form = dict(side=side, norm="l2", blocks=2, period=T, mu=MU)  # noqa: C408
    references = [DobbReference((24 // parts, 8), **form) for _ in range(parts)]  # pyright: ignore
    basis = optimizer.state_dict()["state"]["wqkv.weight"]["basis"]
    width = 12 // parts
    assert basis.shape == ((1, 2, 4, 4) if side == "A" else (2 * parts, width, width))
    for step in range(T + 1):
        before = model.wqkv.weight.detach().double().chunk(parts)
        train(model, optimizer, step, step + 1)  # pyright: ignore[reportArgumentType]
        gradient = model.wqkv.weight.grad
        assert gradient is not None
        captured = [seen.x["wqkv.weight"]] * parts if side == "A" else seen.d["wqkv.weight"].chunk(parts)
        for i, (w, g) in enumerate(zip(before, gradient.double().chunk(parts))):
            expected = references[i].step(w, g, captured[i], LR, DECAY)
            ours = model.wqkv.weight.detach().double().chunk(parts)[i]
            assert (ours - expected).abs().max() < 2e-3 * (expected - w).abs().max()


def test_one_block_for_each_input_is_sign_momentum() -> None:
    model, plain = net(), net()
    optimizer = build_optimizer(model, options(block_width=1), "float32")
    momenta = [torch.zeros_like(p) for p in plain.parameters()]
    for step in range(4):
        train(model, optimizer, step, step + 1)
        for p, q, m in zip(model.parameters(), plain.parameters(), momenta):
            m.mul_(MU).add_(p.grad)  # pyright: ignore
            o = torch.sign(m) / math.sqrt(m.shape[0])
            q.data.mul_(1 - LR * DECAY).sub_(LR * 0.2 * math.sqrt(max(m.shape)) * o)
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("gradient", ["zero", "missing"])
def test_without_a_gradient_momentum_goes_on_and_nothing_makes_no_step(norm: str, gradient: str) -> None:
    """From the start: no step but the decay. Later: as a gradient of zeros has it in the paper."""
    model = net()
    optimizer = build_optimizer(model, options(norm=norm, blocks=2), "float32")
    seen = Seen(model)
    weight: Any = model.get_parameter("layers.0.w1.weight")
    reference = DobbReference((12, 8), norm=norm, blocks=2, period=T, mu=MU)
    for step in range(T + 2):
        before = weight.detach().double().clone()
        optimizer.begin_step(1)
        optimizer.zero_grad()
        loss = model(micro_batch(step)).square().mean()
        optimizer.before_backward(0)
        loss.backward()
        without = step in (0, T, T + 1)  # steps of a refresh among them
        if without:
            weight.grad = None if gradient == "missing" else torch.zeros_like(weight)
        g = torch.zeros_like(before) if without else weight.grad.double()
        optimizer.step()
        expected = reference.step(before, g, seen.x["layers.0.w1.weight"], LR, DECAY)
        torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=1e-5)
        if step == 0:
            torch.testing.assert_close(weight.detach().double(), (1 - LR * DECAY) * before)


def test_statistics_stored_in_bfloat16_are_those_of_float32_rounded() -> None:
    """Refreshes compute in float32 whatever the storage (appendix F.8)."""
    model = net()
    chosen = options(statistics_dtype="bfloat16", basis_dtype="bfloat16")
    optimizer = build_optimizer(model, chosen, "float32")
    seen = Seen(model)
    previous = torch.zeros(8, 8)
    for step in range(T + 1):
        train(model, optimizer, step, step + 1)
        if step % T == 0:
            x = seen.x["layers.0.w1.weight"].float()
            expected = (0.95 * previous + x @ x.T / x.shape[1]).bfloat16()
            saved = optimizer.state_dict()["state"]["layers.0.w1.weight"]
            assert saved["statistic"].dtype == saved["basis"].dtype == torch.bfloat16
            torch.testing.assert_close(saved["statistic"][0], expected, rtol=2**-7, atol=1e-4)
            previous = saved["statistic"][0].float()
            u = saved["basis"][0].float()
            torch.testing.assert_close(u.T @ u, torch.eye(8), rtol=0, atol=0.02)


def test_blocks_that_lie_in_no_shard_are_refused_before_there_is_a_process() -> None:
    config = JobConfig()
    config.model.name, config.model.flavor = "gpt2", "debugmodel"
    config.optimizer.name = "Dobb"
    with pytest.raises(ValueError, match=r"optimizer\.dobb\.blocks = 1: .* take a multiple of 2, or fewer"):
        check_model(config, ParallelDims(dp_shard=2, world_size=2))
    config.optimizer.dobb.block_width = 64
    check_model(config, ParallelDims(dp_shard=2, world_size=2))
    with pytest.raises(ValueError, match=r"block_width = 64: .* take a divisor of \d+, or fewer shards"):
        check_model(config, ParallelDims(dp_shard=16, world_size=16))
    with pytest.raises(ValueError, match=r"data_parallel_shard_degree: .* 3 shards do not divide axis 1"):
        check_model(config, ParallelDims(dp_shard=3, world_size=3))
    config.optimizer.dobb.side = "G"
    with pytest.raises(ValueError, match=r"take a divisor of 96"):
        check_model(config, ParallelDims(dp_shard=8, world_size=8))


def test_blocks_that_do_not_divide_and_unread_weights_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"optimizer\.dobb\.blocks = 5 does not divide the input axis.*12 x 8"
    ):
        build_optimizer(net(), options(blocks=5), "float32")
    with pytest.raises(ValueError, match=r"optimizer\.dobb\.block_width = 16 .*take a divisor of 8"):
        build_optimizer(net(), options(block_width=16), "float32")
    model = nn.Module()
    model.experts = nn.ParameterDict({"w1": nn.Parameter(torch.randn(2, 4, 4))})
    with pytest.raises(ValueError, match=r"belongs to neither"):
        build_optimizer(model, options(), "float32")
