"""Dobb: algorithms 1 to 4 against a line-by-line float64 form, capture, resume, and what surrounds it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanforge.config.sections import JobConfig, Optimizer
from titanforge.layout import check_model
from titanforge.optim import build_optimizer
from titanforge.optim.dobb.capture import DobbCapture
from titanforge.optim.dobb.reference import DobbReference
from titanforge.optim.dobb.refresh import eigenbases, orthonormal_stack, refresh_bases
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.matrix_options import DobbOptions
from titanforge.parallelisms import ParallelDims, apply_activation_checkpoint, apply_compile

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


@pytest.mark.parametrize("basis_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("side", ["A", "G"])
def test_resume_within_a_period_is_bit_exact(side: str, basis_dtype: str) -> None:
    chosen = options(side=side, basis_dtype=basis_dtype)
    model = net()
    optimizer = build_optimizer(model, chosen, "float32")
    keys = {name: set(slots) for name, slots in optimizer.state_dict()["state"].items()}
    assert all(slots == {"m", "statistic", "basis", "captured_steps"} for slots in keys.values())
    train(model, optimizer, 0, T + 1)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, T + 1, 3 * T + 1)
    again = net(seed=5)
    resumed = build_optimizer(again, chosen, "float32")
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(again, resumed, T + 1, 3 * T + 1)
    for a, b in zip(model.parameters(), again.parameters()):
        assert torch.equal(a, b)
    for name, slots in optimizer.state_dict()["state"].items():
        for slot, tensor in slots.items():
            assert torch.equal(tensor, resumed.state_dict()["state"][name][slot]), (name, slot)


@pytest.mark.parametrize("capture", ["first", "all"])
def test_micro_batches_that_are_captured(capture: str) -> None:
    model = net()
    optimizer = build_optimizer(model, options(capture=capture, side="A"), "float32")
    train(model, optimizer, 0, 1, micro_batches=3)
    count = 1 if capture == "first" else 3
    x = torch.cat([micro_batch(0, index) for index in range(count)])
    saved = optimizer.state_dict()["state"]["layers.0.w1.weight"]["statistic"]
    torch.testing.assert_close(saved[0], x.T @ x / len(x))


def test_hooks_idle_outside_training_and_between_refreshes() -> None:
    model = net()
    optimizer = build_optimizer(model, options(), "float32")
    train(model, optimizer, 0, 1)
    first = copy.deepcopy(optimizer.state_dict()["state"]["layers.0.w1.weight"])
    train(model, optimizer, 1, T)
    later = optimizer.state_dict()["state"]["layers.0.w1.weight"]
    assert torch.equal(first["statistic"], later["statistic"]) and torch.equal(first["basis"], later["basis"])
    optimizer.begin_step(1)  # a refresh step
    model.eval()
    model(micro_batch(7))
    model.train()
    assert all(float(weight.sums[1]) == 0 for weight in optimizer.capture.weights)  # pyright: ignore


@pytest.mark.parametrize("side", ["A", "G"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_activations_are_captured_once(side: str, mode: str) -> None:
    plain, recomputed = net(), net()
    apply_activation_checkpoint(recomputed, mode, "op")
    ends = []
    for model in (plain, recomputed):
        optimizer = build_optimizer(model, options(side=side), "float32")
        train(model, optimizer, 0, 2 * T)
        ends.append(optimizer.state_dict()["state"]["layers.0.w2.weight"])
    assert torch.equal(ends[0]["statistic"], ends[1]["statistic"])
    for a, b in zip(plain.parameters(), recomputed.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("side", ["A", "G"])
@pytest.mark.parametrize("mode", ["none", "full", "outside"])
def test_compiled_blocks_capture_the_same(mode: str, side: str) -> None:
    """outside: the recomputation around the compiled forward."""
    torch._dynamo.reset()  # compiled code of other tests counts against its limit
    torch.manual_seed(0)
    plain = Net(8, 8)  # of one width: what is captured of both lies in one tensor
    compiled = copy.deepcopy(plain)
    apply_activation_checkpoint(compiled, "none" if mode == "none" else "full", "op")
    apply_compile(compiled, "aot_eager", recompute_outside=mode == "outside")
    ends = []
    for model in (plain, compiled):
        optimizer = build_optimizer(model, options(side=side), "float32")
        train(model, optimizer, 0, T + 1, micro_batches=2)
        ends.append(optimizer.state_dict()["state"])
    for name in ("layers.0.w1.weight", "layers.0.w2.weight"):
        assert bool(ends[0][name]["statistic"].any())
        torch.testing.assert_close(ends[0][name]["statistic"], ends[1][name]["statistic"])
    for a, b in zip(plain.parameters(), compiled.parameters()):
        torch.testing.assert_close(a, b)


def test_a_refused_refresh_keeps_every_bit() -> None:
    model = net()
    optimizer = build_optimizer(model, options(period=1), "float32")
    train(model, optimizer, 0, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    optimizer.begin_step(1)
    loss = model(micro_batch(2) * torch.inf).square().mean()
    optimizer.before_backward(0)
    loss.backward()
    # The path of an accelerator, which does not look at the flag on the host.
    assert isinstance(optimizer, RuleOptimizer)
    optimizer.prepare_step()
    optimizer.apply_step(torch.zeros(()))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[0][name])
    for name, slots in before[1].items():
        for slot in ("m", "statistic", "basis"):
            assert torch.equal(slots[slot], optimizer.state_dict()["state"][name][slot])


def test_failed_factorisations_keep_the_basis_and_are_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 20, generator=generator)
    c = x @ x.mT / 20
    basis = torch.linalg.qr(torch.randn(4, 6, 6, generator=generator)).Q
    c[1, 2, 3] = torch.nan
    c[2] = 0.0  # nothing captured: no direction is better than another
    for qr in ("cholesky", "householder"):
        new, failed = refresh_bases(c, basis, DobbOptions(qr=qr))
        assert torch.equal(new[1], basis[1])
        assert int(failed) == (2 if qr == "cholesky" else 1)
        torch.testing.assert_close(new.mT @ new, torch.eye(6).expand(4, 6, 6), rtol=0, atol=1e-5)
    cold, failed = eigenbases(c, basis, DobbOptions())
    assert int(failed) == 1 and torch.equal(cold[1], basis[1])


@pytest.mark.parametrize("qr", ["cholesky", "householder"])
def test_iterations_keep_the_order_of_the_first_basis(qr: str) -> None:
    """Largest eigenvalue first: from the opposite order they would pass through mixtures."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(2, 32, 32, generator=generator)).Q
    c = (vectors * torch.logspace(0, -1.5, 32)) @ vectors.mT

    def unaligned(basis: Tensor) -> float:
        rotated = basis.mT @ c @ basis
        beside = rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
        return float((beside.square().sum() / rotated.square().sum()).sqrt())

    first, _ = eigenbases(c, torch.eye(32).expand(2, 32, 32), DobbOptions())
    assert (first.mT @ c @ first).diagonal(dim1=1, dim2=2).diff(dim=-1).max() < 0
    off = {}
    for order, basis in (("kept", first), ("opposite", first.flip(-1))):
        basis = basis.to(torch.bfloat16)
        for _ in range(4):
            basis, failed = refresh_bases(c, basis, DobbOptions(qr=qr))
            assert int(failed) == 0
        off[order] = unaligned(basis.float())
    assert off["kept"] < 0.01 and off["opposite"] > 5 * off["kept"], off


@pytest.mark.parametrize("decades", [3, 8])
def test_the_householder_form_for_gpus_has_its_columns_but_for_signs(decades: int) -> None:
    """Of (C + eps I) U as it is met: eigenvalues far apart, U near the eigenvectors, in bf16 storage."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(5, 48, 48, generator=generator, dtype=torch.float64)).Q
    c = (vectors * torch.logspace(0, -decades, 48, dtype=torch.float64)) @ vectors.mT
    u = vectors.to(torch.bfloat16).float()
    y = c.float() @ u + 1e-6 * u
    exact = torch.linalg.qr(y.double()).Q
    found = orthonormal_stack(y, most=2 * 8 * 48 * 48).double()
    torch.testing.assert_close(found.mT @ found, torch.eye(48).double().expand(5, 48, 48), rtol=0, atol=2e-6)
    torch.testing.assert_close(
        found * torch.sign((found * exact).sum(-2, keepdim=True)), exact, rtol=0, atol=1e-4
    )


def test_cholesky_converges_to_eigenvectors() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(2, 8, 8, generator=generator)).Q
    c = vectors @ torch.diag(2.0 ** -torch.arange(8.0)) @ vectors.mT
    basis = torch.eye(8).expand(2, 8, 8).clone()
    for _ in range(400):
        basis, failed = refresh_bases(c, basis, DobbOptions(relative_shift=1e-2))
        assert int(failed) == 0
    rotated = basis.mT @ c @ basis
    assert (rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))).abs().max() < 1e-4


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


def test_a_distributed_checkpoint_within_a_period_goes_on_bit_exact(tmp_path) -> None:
    model = net()
    optimizer = build_optimizer(model, options(), "float32")
    train(model, optimizer, 0, T + 1)
    dcp.save(  # pyright: ignore[reportPrivateImportUsage]
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path
    )
    train(model, optimizer, T + 1, 3 * T)
    again = net(seed=5)
    resumed = build_optimizer(again, options(), "float32")
    state = {"model": again.state_dict(), "optimizer": resumed.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)  # pyright: ignore[reportPrivateImportUsage]
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    train(again, resumed, T + 1, 3 * T)
    for a, b in zip(model.parameters(), again.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("capture", ["first", "all"])
def test_a_refresh_during_backward_has_the_same_bits(capture: str) -> None:
    ends, early = [], []
    for overlap in (True, False):
        model = net()
        chosen = options(capture=capture, overlap_refresh=overlap)
        optimizer = build_optimizer(model, chosen, "float32")
        train(model, optimizer, 0, 2 * T + 1, micro_batches=2)
        ends.append((model.state_dict(), optimizer.state_dict()["state"]))
        assert isinstance(optimizer, RuleOptimizer) and optimizer.capture is not None
        # What had been refreshed when the optimizer call began: nothing at the cold start.
        optimizer.capture.steps.fill_(T)
        optimizer.capture.loaded()
        optimizer.begin_step(2)
        for index in range(2):
            model(micro_batch(50, index)).sum().backward()
            optimizer.before_backward(index)
        assert isinstance(optimizer.capture, DobbCapture)
        early.append(bool(optimizer.capture._prepared))
    assert early == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0].values(), ends[1][0].values()))
    for name, slots in ends[0][1].items():
        assert all(torch.equal(tensor, ends[1][1][name][slot]) for slot, tensor in slots.items()), name


class Operators(TorchDispatchMode):
    """How many operators there were that are not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [one.alias_info for one in func._schema.returns]
        self.count += not (returned and all(alias and not alias.is_write for alias in returned))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("side", ["A", "G"])
def test_a_refresh_is_as_many_operators_for_many_weights_as_for_two(side: str) -> None:
    """States and sums lie as the refresh reads them; states are views of what it writes."""
    counts = []
    for layers in (1, 4):
        model = net()
        model.layers.update({str(index): Block(8, 12) for index in range(1, layers)})
        optimizer = build_optimizer(model, options(side=side, overlap_refresh=False), "float32")
        train(model, optimizer, 0, T)
        assert isinstance(optimizer, RuleOptimizer) and optimizer.capture is not None
        optimizer.begin_step(1)
        loss = model(micro_batch(T)).square().mean()
        optimizer.before_backward(0)
        loss.backward()
        with torch.no_grad(), Operators() as operators:
            optimizer.capture.refresh(torch.ones(()), None)
        counts.append(operators.count - (2 * layers if side == "G" else 0))  # each weight's positions
        assert len(optimizer.capture.stacks) == 2
        for stack in optimizer.capture.stacks:
            states = [optimizer.state_dict()["state"][weight.name] for weight in stack.weights]
            assert len(states) == layers
            for slot, whole in (("statistic", stack.statistic), ("basis", stack.basis)):
                assert torch.equal(torch.cat([state[slot] for state in states]), whole)
                whole.zero_()
                assert not any(state[slot].any() for state in states)
    assert counts[0] == counts[1] < 150, counts
