"""The engine on a GPU: the multi-tensor kernels against the plain reference, and a captured step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from scripts.bench.matrix_kernels import OMEGA, blocks, exact_refresh
from tests.distributed_harness import run_distributed
from tests.kernels.test_block_basis import check_engine
from tests.optim.test_dealt import RECIPES, kernels_equal_one_device
from tests.optim.test_dion import check_inverse_factors, check_momenta_together
from tests.optim.test_dion_sharded import CASES, on_ranks
from tests.optim.test_dobb import T as DOBB_PERIOD
from tests.optim.test_dobb import micro_batch
from tests.optim.test_dobb import net as dobb_net
from tests.optim.test_dobb import options as dobb_options
from tests.optim.test_dobb_sharded import Run, layouts
from titanforge.config.sections import Optimizer
from titanforge.kernels.cholesky_qr import cholesky_qr_refresh
from titanforge.optim import build_optimizer
from titanforge.optim.dobb.capture import DobbCapture
from titanforge.optim.dobb.refresh import eigenbases, refresh_bases
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.matrix_options import DobbOptions
from titanforge.optim.orthonormal import orthonormal
from titanforge.optim.registry import RULES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(50, 33)
        self.layers = nn.ModuleList([nn.Linear(33, 129) for _ in range(3)])
        self.norm = nn.RMSNorm(33)


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        gradient = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        if param.grad is None:
            param.grad = gradient
        else:
            param.grad.copy_(gradient)  # in place: a captured step reads this storage


def build(model: nn.Module, **options: object) -> RuleOptimizer:
    optimizer = build_optimizer(model, Optimizer(lr=1e-2, **options), "float32")  # pyright: ignore
    assert isinstance(optimizer, RuleOptimizer)
    return optimizer


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("name", sorted(RULES))
def test_equals_the_cpu(name: str, state_dtype: str) -> None:
    slow, fast = Model(), Model().cuda()
    try:
        reference, optimizer = (build(m, name=name, state_dtype=state_dtype) for m in (slow, fast))
    except ValueError as error:
        assert "optimizer.state_dtype" in str(error)  # a rule of regime 3
        return
    start = [p.detach().clone() for p in slow.parameters()]
    for step in range(6):
        for model, each in ((slow, reference), (fast, optimizer)):
            set_gradients(model, step)
            each.step(torch.tensor(1.0, device=next(model.parameters()).device), None)
    # Muon and Scion iterate in bfloat16 there; a last bit decides a code of 8 bits, or a sign.
    loose = name in ("muon", "scion") or state_dtype in ("int8", "fp8")
    for a, b, s in zip(slow.parameters(), fast.parameters(), start):
        assert (a - b.cpu()).norm() <= (0.05 if loose else 2e-3) * (a - s).norm()


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "nadam", "dion"])
def test_a_captured_step_replays(name: str) -> None:
    """The same as eager steps, with the rate, the flag and the bias corrections moving on."""
    eager, captured = Model().cuda(), Model().cuda()
    first, second = build(eager, name=name), build(captured, name=name)
    flag = torch.ones((), device="cuda")

    def eager_step(model: nn.Module, optimizer: RuleOptimizer, step: int) -> None:
        set_gradients(model, step)
        flag.fill_(float(step != 4))
        optimizer.set_lr(1.0 / (1 + step))
        optimizer.step(flag)

    for step in range(2):
        eager_step(eager, first, step)
        eager_step(captured, second, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        second.apply_step(flag)
    for step in range(2, 7):
        eager_step(eager, first, step)
        set_gradients(captured, step)
        second.set_lr(1.0 / (1 + step))
        second.prepare_step()
        graph.replay()
    assert int(first.step_count) == int(second.step_count) == 6
    assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), captured.parameters()))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["muon", "dion", "rmnp"])
def test_the_momentum_update_leaves_its_squares_in_a_graph_too(name: str, state_dtype: str) -> None:
    """What `rmmc` decides by: as of a pass over the momenta, the same bits eager and replayed."""
    models = eager, captured = Model().cuda(), Model().cuda()
    optimizers = first, second = [build(model, name=name, state_dtype=state_dtype) for model in models]
    ours, theirs = (dict(zip(*optimizer.watch_momenta())) for optimizer in optimizers)
    assert sorted(ours) == sorted(theirs) == [f"layers.{index}.weight" for index in range(3)]
    flag, graph = torch.ones((), device="cuda"), torch.cuda.CUDAGraph()
    for step in range(6):
        flag.fill_(float(step != 4))
        for model in models:
            set_gradients(model, step)
        first.accumulate_step(flag, None, whole=False)
        if step < 2:
            second.accumulate_step(flag, None, whole=False)
        else:
            second.prepare_step()
            if step == 2:
                with torch.cuda.graph(graph):
                    second.apply_accumulation(flag, None, whole=False)
            graph.replay()
        for item in first.replicated_tensors():
            if item.slot == "m" and item.splits:
                expected = torch._foreach_norm([item.tensor], 2.0, dtype=torch.float32)[0].square()
                torch.testing.assert_close(ours[item.name], expected, rtol=1e-5, atol=0)
                assert torch.equal(ours[item.name], theirs[item.name]), (item.name, step)
        for optimizer in optimizers:
            optimizer.finish_step()
    assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), captured.parameters()))


@pytest.mark.parametrize("matrices", [1, 3, 20])
@pytest.mark.parametrize("rank", [8, 100, 600])
def test_orthonormal_columns_in_a_graph(rank: int, matrices: int) -> None:
    """cuSOLVER's and cuBLAS's part of Dion: replays see new values, and need nothing that is gone by then."""
    drawn = [torch.randn(matrices, 700, rank, device="cuda") for _ in range(5)]
    expected = [orthonormal(x) for x in drawn]
    held = drawn[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = orthonormal(held)
    for x, exact in zip(drawn, expected):
        held.copy_(x)
        torch.cuda.empty_cache()
        rubbish = [torch.full((2**18,), torch.nan, device="cuda") for _ in range(64)]
        pinned = [torch.full((2**10,), -1, dtype=torch.int64).pin_memory() for _ in range(64)]
        torch.linalg.cholesky_ex(torch.eye(rank, device="cuda").double().expand(matrices, -1, -1))
        graph.replay()
        torch.cuda.synchronize()
        del rubbish, pinned
        assert torch.equal(found, exact)


def test_small_factors_inverted_in_one_launch_equal_the_library() -> None:
    check_inverse_factors("cuda")


def test_momenta_of_dion_in_one_memory_move_as_apart() -> None:
    check_momenta_together("cuda")


@pytest.mark.parametrize("width", [48, 600])
def test_householder_bases_are_those_of_a_cpu_but_for_signs(width: int) -> None:
    x = torch.randn(4, width, 3 * width) * torch.logspace(0, -1, width)[:, None]
    c = x @ x.mT / (3 * width)
    options = DobbOptions(qr="householder", basis_dtype="float32")
    basis, _ = eigenbases(c + 0.01 * c.roll(1, 0), torch.zeros_like(c), options)
    expected, _ = refresh_bases(c, basis.float(), options)
    found, failed = refresh_bases(c.cuda(), basis.float().cuda(), options)
    assert int(failed) == 0
    aligned = (found.cpu() * expected).sum(-2).abs()
    torch.testing.assert_close(aligned, torch.ones_like(aligned), rtol=0, atol=1e-3)
    torch.testing.assert_close(
        found.mT @ found, torch.eye(width, device="cuda").expand(4, -1, -1), rtol=0, atol=1e-5
    )


def check_cholesky_bases(width: int, dtype: torch.dtype, device: str = "cuda") -> None:
    """Against float64: off by no more than a few roundings to bf16; fp32 bases by a part of one."""
    c, u = blocks(2, width, device)
    u = u.to(dtype)
    c[0, 0, 0] = torch.nan
    fresh, failed = cholesky_qr_refresh(c, u, OMEGA)
    assert failed.tolist() == [True, False] and fresh.dtype == dtype
    assert torch.equal(fresh[0], u[0])
    mine, exact = fresh[1].double(), exact_refresh(c[1:], u[1:])[0]
    rounded = exact.bfloat16().double()
    eye = torch.eye(width, dtype=torch.float64, device=device)
    error, least = (float((one - exact).abs().max()) for one in (mine, rounded))
    off, least_off = (float((one.mT @ one - eye).abs().max()) for one in (mine, rounded))
    half = dtype == torch.bfloat16
    assert error <= (4 if half else 0.25) * least, (error, least)
    assert off <= (4 * least_off if half else 2e-4), (off, least_off)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("width", [16, 100, 400, 768, 4096])
def test_cholesky_bases_are_those_of_float64(width: int, dtype: torch.dtype) -> None:
    check_cholesky_bases(width, dtype)


@pytest.mark.parametrize("name", ["adamw", "dion"])
def test_a_step_does_not_wait_for_the_device(name: str) -> None:
    model = Model().cuda()
    optimizer = build(model, name=name)
    flag = torch.ones((), device="cuda")
    set_gradients(model, 0)
    optimizer.step(flag, flag)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 4):
            optimizer.set_lr(1.0 / step)
            optimizer.step(flag, flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_refused_step_keeps_every_bit(implementation: str) -> None:
    for options in ({}, {"implementation": implementation}):
        model = Model().cuda()
        optimizer = build_optimizer(model, Optimizer(**options), "float32")  # pyright: ignore
        set_gradients(model, 0)
        optimizer.step(torch.ones((), device="cuda"))
        before = copy.deepcopy(model.state_dict())
        for param in model.parameters():
            param.grad = torch.full_like(param, torch.nan)
        optimizer.step(torch.zeros((), device="cuda"))
        assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))


def test_a_step_of_dobb_in_one_launch_equals_two() -> None:
    check_engine("cuda", ((300, 400), (300, 400), (200, 1600), (130, 2400)))


def dobb_on_gpus(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank)
    Run.device = "cuda"
    # Products of planes are off by more than a CPU's, and differ with the last bits of what they are of: now
    # and then an element of a basis is the next bf16, 2^-8 of its part of a move away.
    layouts(rank, world_size, "", splits=((2, 1), (1, 2)), near=4e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_dobb_on_two_gpus_equals_one() -> None:
    """Reductions and refreshes on streams of their own, beside backward."""
    run_distributed(dobb_on_gpus, 2, backend="nccl")


def muon_on_gpus(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank)
    kernels_equal_one_device(rank, world_size, "cuda", 24, RECIPES)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_muon_on_two_gpus_equals_one() -> None:
    """Matrices dealt over NCCL; Scion, Nesterov and fp32 masters too."""
    run_distributed(muon_on_gpus, 2, backend="nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("times", [1, 8])
def test_dion_on_two_gpus_equals_one(times: int) -> None:
    """Matrices dealt to owners, two batches under way: against the form for whole weights."""
    run_distributed(on_ranks, 2, CASES, "cuda", times, backend="nccl")


def test_a_late_refresh_beside_backward_reads_what_was_captured() -> None:
    """Its stream comes late and backward allocates meanwhile: nobody is given the memory of the sums."""
    ends = []
    for overlap in (True, False):
        model = dobb_net().cuda()
        optimizer = build_optimizer(model, dobb_options(overlap_refresh=overlap), "float32")
        assert isinstance(optimizer, RuleOptimizer)
        capture = optimizer.capture
        assert isinstance(capture, DobbCapture)
        prepare = capture._prepare

        def late(prepare: Callable[[], None] = prepare) -> None:
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            prepare()

        capture._prepare = late  # pyright: ignore[reportAttributeAccessIssue]
        for step in range(2 * DOBB_PERIOD + 1):
            optimizer.zero_grad()
            optimizer.begin_step(1)
            loss = model(micro_batch(step).cuda()).square().mean()
            optimizer.before_backward(0)
            sizes = [1, 64, 144, 4 * 144] if overlap else []  # of counts and of blocks
            rubbish = [torch.full((size,), torch.nan, device="cuda") for size in sizes for _ in range(256)]
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            del rubbish
        ends.append((model.state_dict(), optimizer.state_dict()["state"]))
    (weights, states), (their_weights, their_states) = ends
    assert all(torch.equal(tensor, their_weights[name]) for name, tensor in weights.items())
    for name, slots in states.items():
        assert all(torch.equal(tensor, their_states[name][slot]) for slot, tensor in slots.items()), name
