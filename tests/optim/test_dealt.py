"""Muon and Scion on shards, matrices dealt to the ranks: equal to one process, counted, repeatable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.distributed_harness import run_distributed
from tests.interpreted import needs_interpreter, run_interpreted
from titanforge.config.sections import Optimizer
from titanforge.optim import DataLinks, build_optimizer
from titanforge.optim.matrix import OrthogonalRule

STEPS = 4
SHAPES = [(10, 12)] * 5 + [(5, 6)] * 3 + [(1, 8)] + [(14, 7)] * 2
"""Four ranks have 3, 3, 3 and 1 rows, or 2, 2, 1 and none, of five matrices, of three, of one."""
FUSED = [(9, 5)] * 2
"""Three matrices each: two ranks have five and four rows, cut within the second one."""
RECIPES: list[dict[str, Any]] = [
    {"name": "Muon"},
    {"name": "Muon", "nesterov": True},
    {"name": "Scion", "momentum": 0.5},
    {"name": "Muon", "state_dtype": "bfloat16"},
    {"name": "Muon", "nesterov": True, "state_dtype": "bfloat16", "master_weights": "float32"},
]


class Attention(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.wqkv = nn.Linear(columns, rows, bias=False)


class Model(nn.Module):
    def __init__(self, many: int = 1, few: bool = False) -> None:
        """many: by which sizes are multiplied. few: matrices, for kernels that are interpreted."""
        super().__init__()
        torch.manual_seed(0)
        shapes = SHAPES[2:5] + SHAPES[8:9] if few else SHAPES
        plain = [nn.Linear(many * n, many * m, bias=False) for m, n in shapes]
        self.layers = nn.ModuleList([*plain, *(Attention(many * m, many * n) for m, n in FUSED)])


def spread(model: nn.Module, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Module:
    """The model with its weights on the mesh, each cut as it comes; nothing is sent."""
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
            setattr(module, name, nn.Parameter(cut))
    return model


def build(model: nn.Module, recipe: dict[str, Any]) -> Any:
    return build_optimizer(model, Optimizer(lr=1e-2, **recipe), dtype_name(model))


def dtype_name(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def set_gradients(model: nn.Module, step: int) -> None:
    """Of the third matrix there is none in the second step, and zeros for the fourth."""
    generator = torch.Generator().manual_seed(step)
    for index, param in enumerate(model.parameters()):
        gradient = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        if (index, step) == (3, 1):
            gradient.zero_()
        if isinstance(param, DTensor):
            gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = None if (index, step) == (2, 1) else gradient


def train(model: nn.Module, optimizer: Any, first: int = 0, last: int = STEPS) -> None:
    for step in range(first, last):
        set_gradients(model, step)
        optimizer.step(torch.ones((), device=next(model.parameters()).device))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def tensors_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Weights and states, as this rank has them."""
    found = dict(model.named_parameters())
    for name, slots in optimizer.state_dict()["state"].items():
        found |= {f"{name} {slot}": tensor for slot, tensor in slots.items()}
    return {name: tensor.detach() for name, tensor in found.items()}


def equals_one_process(mesh: DeviceMesh, placements: Sequence[Placement], recipe: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "master_weights" in recipe else torch.float32
    one, many, again = (Model().to(dtype) for _ in range(3))
    spread(many, mesh, placements)
    spread(again, mesh, placements)
    optimizers = [build(model, recipe) for model in (one, many, again)]
    for model, optimizer in zip((one, many, again), optimizers):
        train(model, optimizer)
    expected, found, twice = (tensors_of(*pair) for pair in zip((one, many, again), optimizers))
    for name, tensor in expected.items():
        full = whole(found[name]).float()
        near = 2**-8 * float(tensor.abs().max()) if tensor.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(full, tensor.float(), rtol=0, atol=near, msg=lambda m, n=name: f"{n} {m}")
        assert torch.equal(*(t.to_local() for t in (found[name], twice[name]))), name
    before = {name: tensor.to_local().clone() for name, tensor in found.items()}
    set_gradients(many, STEPS)
    optimizers[1].prepare_step()
    optimizers[1].apply_step(torch.zeros(()))
    for name, tensor in tensors_of(many, optimizers[1]).items():
        assert torch.equal(tensor.to_local(), before[name]), f"{name} changed in a step that is not applied"


def counts_what_it_sends(mesh: DeviceMesh, dim: int) -> None:
    """A rank's parts of all momenta; and the whole updates of every N-th matrix, in the order of shapes."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    model = spread(Model(), mesh, [Shard(dim)])
    optimizer = build(model, {"name": "Muon"})
    sent: dict[str, int] = defaultdict(int)

    def record(purpose: str, size: int) -> None:
        sent[purpose] += size

    optimizer.connect(DataLinks(ranks, rank, record=record))
    train(model, optimizer, 0, 1)
    assert sent.keys() == {"momenta", "updates"}
    params: list[Any] = list(model.parameters())
    assert sent["momenta"] == 4 * sum(param.to_local().numel() for param in params)
    assert sent["updates"] == 4 * sum(p.numel() for index, p in enumerate(params) if index % ranks == rank)
    told = sum(-(-2 * param.numel() // ranks) for param in params)
    assert optimizer.report() == f"muon sends {told:,} scalars a step between {ranks} shards"
    total = torch.tensor(sum(sent.values()))
    dist.all_reduce(total)
    assert 0 <= told - int(total) / (4 * ranks) < len(params)


def gathers_what_two_axes_cut(mesh: DeviceMesh) -> None:
    one, many = Model(), spread(Model(), mesh, [Shard(0), Shard(1)])
    optimizers = [build(model, {"name": "Muon"}) for model in (one, many)]
    sent: list[str] = []
    optimizers[1].connect(DataLinks(record=lambda purpose, size: sent.append(purpose)))
    for model, optimizer in zip((one, many), optimizers):
        train(model, optimizer)
    assert set(sent) == {"momenta"}
    for expected, found in zip(one.parameters(), many.parameters()):
        torch.testing.assert_close(whole(found), expected, rtol=0, atol=2e-6)


def on_ranks(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for recipe, dim in product(RECIPES, (0, 1)):
        equals_one_process(mesh, [Shard(dim)], recipe)
    counts_what_it_sends(mesh, 0)
    counts_what_it_sends(mesh, 1)
    if world_size == 4:
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        equals_one_process(two, [Replicate(), Shard(0)], RECIPES[0])
        gathers_what_two_axes_cut(two)
    OrthogonalRule.batch_bytes = 1  # many batches, of one matrix an owner, travel side by side
    equals_one_process(mesh, [Shard(0)], RECIPES[1])
    counts_what_it_sends(mesh, 0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_equal_one_process(world_size: int) -> None:
    run_distributed(on_ranks, world_size)


def kernels_equal_one_device(
    rank: int, world_size: int, device: str = "cpu", many: int = 1, recipes: Sequence[dict] = RECIPES[3:]
) -> None:
    """Products in bf16, weights moved by a kernel: as on one device to the rounding of the products, and what
    travels is bf16. A GPU is not waited for.
    """
    mesh = init_device_mesh(device, (world_size,))
    for recipe in recipes:
        dtype = torch.bfloat16 if "master_weights" in recipe else torch.float32
        start, one, split = (Model(many, few=device == "cpu").to(device, dtype) for _ in range(3))
        spread(split, mesh, [Shard(0)])
        optimizers = [build(model, recipe) for model in (one, split)]
        sent: list[tuple[str, int]] = []
        optimizers[1].connect(DataLinks(record=lambda *one, to=sent: to.append(one)))
        for model, optimizer in zip((one, split), optimizers):
            train(model, optimizer, 0, 2)
        local: list[Any] = [param.to_local() for param in split.parameters()]  # pyright: ignore
        assert sum(size for what, size in sent if what == "momenta") == 2 * 2 * sum(p.numel() for p in local)
        if device == "cuda":
            set_gradients(split, 2)
            flag = torch.ones((), device=device)
            torch.cuda.set_sync_debug_mode("error")
            optimizers[1].step(flag)
            torch.cuda.set_sync_debug_mode("default")
            train(one, optimizers[0], 2, 3)
        expected, found = (tensors_of(*pair) for pair in zip((one, split), optimizers))
        for name, before in start.named_parameters():
            key = f"{name} master" if f"{name} master" in expected else name
            moved = (expected[key] - before.detach()).norm()
            assert moved > 0 and (whole(found[key]) - expected[key]).norm() <= 0.03 * moved, (recipe, name)
            assert torch.equal(whole(found[f"{name} m"]), expected[f"{name} m"]), (recipe, name)


def interpreted() -> None:
    run_distributed(kernels_equal_one_device, 2)


@needs_interpreter
def test_interpreted_kernels_on_ranks_equal_one_device() -> None:
    run_interpreted(interpreted)
