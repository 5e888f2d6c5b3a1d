"""Dion's form for GPUs on shards, its kernels' references and themselves: equal to one process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.distributed_harness import run_distributed
from tests.interpreted import needs_interpreter, run_interpreted
from tests.optim.test_sharded import cut_like
from titanforge.config.sections import DionOptions, Optimizer
from titanforge.optim import DataLinks, build_optimizer, sharded
from titanforge.optim.accounting import cross_shard_payload
from titanforge.optim.batches import BATCH_BYTES
from titanforge.optim.dion import Dion

STEPS = 5
LEFT_OUT, WITH_NAN = 2, 3
TOLERANCES = {
    "float32": {"weight": 5e-5, "m": 1e-4, "q": 4e-4, "master": 2e-3},
    "bfloat16": {"weight": 2e-3, "m": 4e-2, "q": 4e-3, "master": 2e-3},
}
"""By the dtype of momenta. Planes have factors to 2^-16, of a sketch whose condition multiplies it. A
momentum in bf16 rounds to either neighbour, and goes on from there.
"""
BF16_WEIGHT = 4e-3


class Attention(nn.Module):
    head_dim = 4

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.wqkv = nn.Linear(columns, rows, bias=False)


class Model(nn.Module):
    """Several of a shape, not as many as ranks: tall, wide, square; too low for all ranks to have a row; and
    fused projections of tall and of wide matrices, which ranks cut within a matrix.
    """

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [(13, 5)] * 3 + [(6, 14)] * 3 + [(8, 8)] * 2 + [(1, 9), (9, 1), (2, 3)]
        linears = [nn.Linear(times * columns, times * rows, bias=False) for rows, columns in shapes]
        fused = [Attention(times * rows, times * columns) for rows, columns in [(24, 4)] * 2 + [(12, 7)] * 3]
        self.layers = nn.ModuleList([*linears, *fused])


def payload(model: nn.Module, parts: int) -> int:
    """Scalars of a step: r (m + n) of each matrix. parts: of a fused projection; 0: as many as heads."""
    total = 0
    for layer in model.layers:  # pyright: ignore
        of: Any = layer
        alone = isinstance(layer, nn.Linear)
        weight = of.weight if alone else of.wqkv.weight
        many = 1 if alone else parts or weight.shape[0] // Attention.head_dim
        rows, columns = weight.shape[0] // many, weight.shape[1]
        total += many * cross_shard_payload("dion", rows, columns, "output", rank_fraction=0.5)
    return total


@dataclass(frozen=True)
class Case:
    """dim: that is cut. dtype: of momenta. weights: their dtype. most: bytes of a batch. placements: on which
    mesh, where another than one axis that cuts `dim`.
    """

    dim: int = 0
    feedback: bool = True
    per_head: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    weights: Literal["float32", "bfloat16"] = "float32"
    master: Literal["none", "float32"] = "none"
    most: int = 2 * BATCH_BYTES
    mesh: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()

    def model(self, device: str, times: int) -> Model:
        """times: of all sizes."""
        return Model(times).to(device, getattr(torch, self.weights))

    def options(self) -> Optimizer:
        return Optimizer(
            name="Dion",
            lr=0.1,
            state_dtype=self.dtype,
            master_weights=self.master,
            per_head=self.per_head,
            dion=DionOptions(rank_fraction=0.5, error_feedback=self.feedback),
        )


FEW = 4 * 8 * 8 + 1
"""Bytes that make batches of a few matrices, or of one."""
CASES = [
    Case(),
    Case(dim=1),
    Case(feedback=False, per_head=True, most=FEW),
    Case(dim=1, feedback=False, per_head=True, most=FEW),
    Case(dtype="bfloat16", per_head=True, most=FEW),
    Case(dim=1, dtype="bfloat16"),
    Case(dtype="bfloat16", weights="bfloat16"),
    Case(dim=1, dtype="bfloat16", weights="bfloat16", master="float32"),
]
# Not of momenta in bf16: the interpreter cuts bits off where a GPU, and what is no kernel, rounds to nearest.
INTERPRETED = [Case(per_head=True, most=FEW), Case(dim=1, weights="bfloat16", master="float32")]
MESHES = [
    Case(mesh=(2, 2), placements=(Replicate(), Shard(0))),
    Case(dim=1, per_head=True, mesh=(2, 2), placements=(Replicate(), Shard(1))),
    Case(mesh=(4, 1), placements=(Shard(0), Shard(0))),
    Case(mesh=(2, 2), placements=(Shard(0), Shard(1))),  # is left to the plain form
]


def train(case: Case, model: nn.Module, sent: list[int]) -> list[dict[str, Any]]:
    """Some steps, one of them left out, one with momenta that are not finite; the states after each."""
    device = next(model.parameters()).device
    optimizer: Any = build_optimizer(model, case.options(), case.weights)
    optimizer.connect(DataLinks(record=lambda purpose, size: sent.append(size)))
    after = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=generator)
            gradient = gradient.to(device, param.dtype)
            param.grad = cut_like(gradient, param) if isinstance(param, DTensor) else gradient
        if step == WITH_NAN:
            for name in ("layers.1.weight", "layers.4.weight"):
                spoil(optimizer.state_dict()["state"][name]["m"])
        optimizer.prepare_step()
        optimizer.apply_step(torch.tensor(float(step != LEFT_OUT), device=device))
        tensors = {name: param.detach() for name, param in model.named_parameters()}
        for name, slots in optimizer.state_dict()["state"].items():
            tensors |= {f"{name}/{slot}": tensor for slot, tensor in slots.items()}
        after.append({name: _whole(tensor) for name, tensor in tensors.items()})
    return after


def spoil(momentum: Tensor) -> None:
    """Its first element is no number any more."""
    whole = _whole(momentum).to(momentum.device)
    whole[0, 0] = torch.nan
    if isinstance(momentum, DTensor):
        momentum, whole = momentum.to_local(), cut_like(whole, momentum).to_local()
    momentum.copy_(whole)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().cpu()


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], case: Case, step: int) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        kind = re.split(r"[./]", name)[-1]
        near = (
            BF16_WEIGHT
            if tensor.dtype == torch.bfloat16 and kind == "weight"
            else TOLERANCES[case.dtype][kind]
        )

        def told(text: str, name: str = name) -> str:
            return f"{name} {case}, step {step}: {text}"

        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=near, equal_nan=True, msg=told)


def moved_too_far(found: dict[str, Tensor], expected: dict[str, Tensor], model: nn.Module) -> float:
    """By what part of their way all weights of `model` have moved too far along it, or, negative, too little.

    Weights in bf16 end at either neighbour, which hides in each of them a step of a few percent too much;
    along the way of all of them these errors cancel.
    """
    apart = way = 0.0
    for name, start in model.named_parameters():
        moved = expected[name].double() - start.detach().double().cpu()
        apart += float(((found[name].double() - expected[name].double()) * moved).sum())
        way += float(moved.square().sum())
    return apart / way


def cut(model: Model, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """By hand: FSDP would not cut columns unevenly."""
    for layer in model.layers:
        owner: Any = layer if isinstance(layer, nn.Linear) else layer.wqkv
        owner.weight = nn.Parameter(distribute_tensor(owner.weight.detach(), mesh, placements))


def on_ranks(rank: int, world_size: int, cases: Sequence[Case], device: str = "cpu", times: int = 1) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    sharded.runs_triton = lambda tensor: True
    for case in cases:
        Dion.batch_bytes = case.most
        mesh = init_device_mesh(device, case.mesh or (world_size,))
        placements = case.placements or (Shard(case.dim),)
        model, sent = case.model(device, times), []
        cut(model, mesh, placements)
        found = train(case, model, sent)
        assert sum(sent) == STEPS * 4 * payload(model, 0 if case.per_head else 3), case
        expected = train(case, case.model(device, times), [])
        for step in range(STEPS):
            compare(found[step], expected[step], case, step)
        start = case.model(device, times)  # before momenta that are not finite
        assert abs(moved_too_far(found[LEFT_OUT], expected[LEFT_OUT], start)) <= 4e-3, case
        for name, tensor in found[LEFT_OUT].items():
            assert torch.equal(tensor, found[LEFT_OUT - 1][name]), (name, case)
        mine = {name: tensor for name, tensor in found[-1].items() if name.endswith("/q")}
        everyones: list[Any] = [None] * world_size
        dist.all_gather_object(everyones, mine)
        for theirs in everyones:
            assert all(torch.equal(theirs[name].nan_to_num(), q.nan_to_num()) for name, q in mine.items())


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_equal_one_process(world_size: int) -> None:
    run_distributed(on_ranks, world_size, CASES + (MESHES if world_size == 4 else []))


def interpreted() -> None:
    run_distributed(on_ranks, 2, INTERPRETED)


@needs_interpreter
def test_its_kernels_on_shards() -> None:
    run_interpreted(interpreted)


def saves_and_loads(rank: int, world_size: int, folder: str) -> list[dict[str, Tensor]]:
    """Momenta that are views of one memory: as saved, and as another run on shards loads them."""
    del rank
    case, momenta = CASES[6], []
    for run in range(2):
        model = case.model("cpu", 1)
        cut(model, init_device_mesh("cpu", (world_size,)), [Shard(0)])
        optimizer: Any = build_optimizer(model, case.options(), case.weights)
        states = optimizer.state_dict()
        if run == 0:
            for index, param in enumerate(model.parameters()):
                drawn = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
                param.grad = cut_like(drawn.to(param.dtype), param)  # pyright: ignore
            optimizer.step()
            dcp.save(states, checkpoint_id=folder)  # pyright: ignore
        else:
            dcp.load(states, checkpoint_id=folder)  # pyright: ignore
            optimizer.load_state_dict(states)
        found = optimizer.state_dict()["state"]
        momenta.append({name: _whole(slots["m"]) for name, slots in found.items()})
    return momenta


def test_momenta_in_one_memory_are_saved_and_loaded(tmp_path: Path) -> None:
    (saved, loaded), _ = run_distributed(saves_and_loads, 2, str(tmp_path))
    case = CASES[6]
    optimizer: Any = build_optimizer(case.model("cpu", 1), case.options(), case.weights)
    states = optimizer.state_dict()
    dcp.load(states, checkpoint_id=str(tmp_path))  # pyright: ignore
    optimizer.load_state_dict(states)
    for name, slots in optimizer.state_dict()["state"].items():
        assert bool(saved[name].any()) and torch.equal(loaded[name], saved[name])
        assert torch.equal(slots["m"], saved[name])
