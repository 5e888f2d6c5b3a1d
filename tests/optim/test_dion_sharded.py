"""Dion's form for GPUs on shards, its kernels' references and themselves: equal to one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

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
TOLERANCES = {"weight": 3e-5, "m": 1e-4, "q": 4e-4}
"""Planes have factors to 2^-16, of a sketch whose condition multiplies it."""


class Attention(nn.Module):
    head_dim = 4

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.wqkv = nn.Linear(columns, rows, bias=False)


class Model(nn.Module):
    """Several of a shape, not as many as ranks: tall, wide, square; too low for all ranks to have a row; and
    fused projections of tall and of wide matrices, which ranks cut within a matrix.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [(13, 5)] * 3 + [(6, 14)] * 3 + [(8, 8)] * 2 + [(1, 9), (9, 1), (2, 3)]
        linears = [nn.Linear(columns, rows, bias=False) for rows, columns in shapes]
        fused = [Attention(24, 4), Attention(24, 4), Attention(12, 7), Attention(12, 7), Attention(12, 7)]
        self.layers = nn.ModuleList([*linears, *fused]).to(device)


def payload(parts: int) -> int:
    """Scalars of a step: r (m + n) of each matrix."""
    shapes = [
        (module.weight if isinstance(module, nn.Linear) else module.wqkv.weight, module)
        for module in Model().layers
    ]  # pyright: ignore
    total = 0
    for weight, module in shapes:
        many = 1 if isinstance(module, nn.Linear) else parts or weight.shape[0] // 4
        rows, columns = weight.shape[0] // many, weight.shape[1]
        total += many * cross_shard_payload("dion", rows, columns, "output", rank_fraction=0.5)
    return total


def options_of(feedback: bool, per_head: bool, dtype: str) -> Optimizer:
    return Optimizer(
        name="Dion",
        lr=0.1,
        state_dtype=dtype,  # pyright: ignore[reportArgumentType]
        per_head=per_head,
        dion=DionOptions(rank_fraction=0.5, error_feedback=feedback),
    )


def train(model: nn.Module, options: Optimizer, sent: list[int]) -> list[dict[str, Any]]:
    """Some steps, one of them left out, one with momenta that are not finite; the states after each."""
    device = next(model.parameters()).device
    optimizer: Any = build_optimizer(model, options, "float32")
    optimizer.connect(DataLinks(record=lambda purpose, size: sent.append(size)))
    after = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=generator)
            gradient = gradient.to(device)
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


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], what: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        near = TOLERANCES[re.split(r"[./]", name)[-1]]
        if tensor.dtype == torch.bfloat16:
            near = 1e-2  # rounds to either neighbour

        def told(text: str, name: str = name) -> str:
            return f"{name} {what}: {text}"

        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=near, equal_nan=True, msg=told)


def cases() -> list[tuple[int, bool, bool, str, int]]:
    """Cut dim, error feedback, heads apart, dtype of momenta, bytes of a batch."""
    few = 4 * 8 * 8 + 1
    return [
        (0, True, False, "float32", 2 * BATCH_BYTES),
        (1, True, False, "float32", 2 * BATCH_BYTES),
        (0, False, True, "float32", few),
        (1, False, True, "float32", few),
        (0, True, True, "bfloat16", few),
        (1, True, True, "bfloat16", 2 * BATCH_BYTES),
    ]


def on_ranks(rank: int, world_size: int, device: str = "cpu") -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    sharded.runs_triton = lambda tensor: True
    mesh = init_device_mesh(device, (world_size,))
    for axis, feedback, per_head, dtype, most in cases():
        what = (world_size, axis, feedback, per_head, dtype)
        Dion.batch_bytes = most
        model, sent = Model(device), []
        for layer in model.layers:  # FSDP would not cut columns unevenly
            owner: Any = layer if isinstance(layer, nn.Linear) else layer.wqkv
            owner.weight = nn.Parameter(distribute_tensor(owner.weight.detach(), mesh, [Shard(axis)]))
        options = options_of(feedback, per_head, dtype)
        found = train(model, options, sent)
        assert sum(sent) == STEPS * 4 * payload(0 if per_head else 3), what
        expected = train(Model(device), options, [])
        for step in range(STEPS):
            compare(found[step], expected[step], (*what, step))
        for name, tensor in found[LEFT_OUT].items():
            assert torch.equal(tensor, found[LEFT_OUT - 1][name]), (name, what)
        mine = {name: tensor for name, tensor in found[-1].items() if name.endswith("/q")}
        everyones: list[Any] = [None] * world_size
        dist.all_gather_object(everyones, mine)
        for theirs in everyones:
            assert all(torch.equal(theirs[name].nan_to_num(), q.nan_to_num()) for name, q in mine.items())


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_equal_one_process(world_size: int) -> None:
    run_distributed(on_ranks, world_size)


def interpreted() -> None:
    run_distributed(on_ranks, 2)


@needs_interpreter
def test_its_kernels_on_shards() -> None:
    run_interpreted(interpreted)
