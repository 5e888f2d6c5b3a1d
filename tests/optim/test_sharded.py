"""The engine on FSDP2 shards: uneven, empty, quantised; saved by two ranks, read by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.distributed_harness import run_distributed
from titanforge.config.sections import DionOptions, Optimizer
from titanforge.optim import DataLinks, build_optimizer
from titanforge.optim.accounting import cross_shard_payload

RECIPES = [
    ("AdamW", "float32", "none", "native"),
    ("Lion", "bfloat16", "none", "native"),
    ("AdamW", "int8", "none", "native"),
    ("AdamW", "float32", "none", "fused"),
    ("SGD", "float32", "none", "fused"),
    ("Muon", "float32", "none", "native"),
    ("RMNP", "float32", "none", "native"),
    ("Dion", "float32", "none", "native"),
]

MATRIX_RULES = ("Muon", "RMNP", "Dion")
CASES = [(recipe, 0) for recipe in RECIPES] + [(r, 1) for r in RECIPES if r[0] in MATRIX_RULES]
"""With the axis along which matrices are cut."""


class Attention(nn.Module):
    """Three matrices of three rows: two ranks have five and four, cut within a matrix."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.wqkv = nn.Linear(2, 3 * rows, bias=False)


class Stack(nn.Module):
    """Three experts: two ranks have two and one."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(experts, 4, 6))


class Model(nn.Module):
    """Three rows leave shards of two and one; one row and one number leave an empty shard."""

    def __init__(self, rows: int = 3, few: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        linears = [nn.Linear(70, rows, bias=False), nn.Linear(6, few)]
        self.layers = nn.ModuleList([*linears, Attention(rows), Stack(rows)])


def options_of(recipe: tuple[str, str, str, str]) -> Optimizer:
    name, state_dtype, master, implementation = recipe
    return Optimizer(
        name=name,
        lr=1e-2,
        state_dtype=state_dtype,  # pyright: ignore[reportArgumentType]
        master_weights=master,  # pyright: ignore[reportArgumentType]
        implementation=implementation,  # pyright: ignore[reportArgumentType]
        nesterov=name == "RMNP",
        dion=DionOptions(rank_fraction=0.5),
    )


def payload(name: str, axis: int) -> int:
    """Scalars that a step exchanges; of the experts, which lie whole on a rank, none."""
    if name not in MATRIX_RULES:
        return 0
    matrices = [(3, 70), (1, 6), (3, 2), (3, 2), (3, 2)]
    cut = "output" if axis == 0 else "input"
    return sum(cross_shard_payload(name.lower(), m, n, cut, rank_fraction=0.5) for m, n in matrices)


def cut_like(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that all have, without a word between them."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = tensor[tuple(slice(first, first + size) for first, size in zip(offset, shape))].clone()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=tensor.stride()
    )


def train(model: nn.Module, recipe: tuple[str, str, str, str], gathered: list[int] | None = None) -> dict:
    """Three steps; `gathered` receives the bytes of each exchange."""
    optimizer = build_optimizer(model, options_of(recipe), "float32")
    record = ([] if gathered is None else gathered).append
    optimizer.connect(DataLinks(record=lambda purpose, size: record(size)))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                gradient = cut_like(gradient, param)
            param.grad = gradient
        if step == 0:  # zero, and below none at all
            model.layers[0].weight.grad.zero_()  # pyright: ignore
        if step == 1:
            model.layers[2].wqkv.weight.grad = None  # pyright: ignore
        optimizer.step(torch.tensor(1.0))
    return optimizer.state_dict()


def sharded(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for index, (recipe, axis) in enumerate(CASES):
        model = Model()
        for module in (*model.layers, model):
            fully_shard(
                module, mesh=mesh, shard_placement_fn=lambda p, at=axis: Shard(at) if p.dim() == 2 else None
            )
        assert axis or {p.to_local().numel() for p in model.layers[1].parameters()} == (
            {6, 1} if rank == 0 else {0}
        )  # pyright: ignore
        gathered: list[int] = []
        state = train(model, recipe, gathered)
        # Of the two all-to-alls of matrices that are dealt, two ranks hand over as much as to one gather.
        sent = torch.tensor(sum(gathered))
        dist.all_reduce(sent)
        assert int(sent) == world_size * 3 * 4 * payload(recipe[0], axis), (recipe, axis)
        keys = [None, None]
        dist.all_gather_object(keys, sorted((n, s) for n, slots in state["state"].items() for s in slots))
        assert keys[0] == keys[1]
        dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=f"{folder}/{index}")
    for name in MATRIX_RULES:
        experts = Stack(3)
        fully_shard(experts, mesh=mesh, shard_placement_fn=lambda p: Shard(1))
        optimizer = build_optimizer(
            experts, Optimizer(name=name, dion=DionOptions(rank_fraction=0.5)), "float32"
        )
        sizes: list[int] = []
        optimizer.connect(DataLinks(world_size, rank, record=lambda purpose, size, to=sizes: to.append(size)))
        optimizer.step()
        told = f"{name.lower()} sends {sum(sizes) // 4} scalars a step between 2 shards"
        assert optimizer.report() == told and bool(sum(sizes)) == (name != "RMNP"), (told, optimizer.report())
    from tests.optim.test_dobb_sharded import layouts

    layouts(rank, world_size, folder, ((1, 2), (2, 1)))
    layer = nn.Linear(8, 8)
    fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match=r"blocks along another axis of 'weight', 8 x 8, than shards cut"):
        build_optimizer(layer, Optimizer(name="Dobb"), "float32")
    for name in ("Adafactor", "LAMB"):
        with pytest.raises(ValueError, match=r"is sharded: set parallelism\.data_parallel_shard_degree = 1"):
            build_optimizer(layer, Optimizer(name=name), "float32")
    with pytest.raises(ValueError, match=r'state_dtype = "fp8" has one scale per weight'):
        build_optimizer(layer, Optimizer(state_dtype="fp8"), "float32")


def test_two_ranks_equal_one_and_their_checkpoint_loads_in_one(tmp_path: Path) -> None:
    run_distributed(sharded, 2, str(tmp_path))
    for index, (recipe, _) in enumerate(CASES):
        expected = Model()
        expected_state = train(expected, recipe)
        model = Model()
        optimizer = build_optimizer(model, options_of(recipe), "float32")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=str(tmp_path / str(index)))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert int(optimizer.step_count) == 3
        for a, b in zip(expected.parameters(), model.parameters()):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        for name, slots in expected_state["state"].items():
            for slot, tensor in slots.items():
                loaded = optimizer.state_dict()["state"][name][slot]
                # Codes of int8 may differ by one where the last bit of the input does.
                near = 1 if tensor.dtype in (torch.int8, torch.uint8) else 1e-6
                torch.testing.assert_close(loaded.float(), tensor.float(), rtol=1e-5, atol=near)
