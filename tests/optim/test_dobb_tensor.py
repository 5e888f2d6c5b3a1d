"""Dobb on weights that the tensor axis cuts: equal to one process, and silent along that axis."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from tests.distributed_harness import run_distributed
from tests.optim.test_dobb import DECAY, LR, options
from tests.optim.test_dobb_sharded import whole
from tests.parallelisms.test_tensor_parallel import batch, build, fill
from titanforge.optim import DataLinks, build_groups, build_optimizer, shard_dims
from titanforge.parallelisms import apply_fsdp, apply_tensor_parallel, complete_gradients, pad_sequences
from titanforge.sync.ledger import CommLedger

TAU, BLOCKS = 0.2, 4


def _train(kind: str, mesh: DeviceMesh | None, sharded: bool) -> list[dict[str, torch.Tensor]]:
    """Weights and states by name before and after each of two steps, both of which refresh.

    sharded: the batch is dealt to the dp axis of the mesh, by FSDP; else each of its ranks trains it whole.
    """
    chosen, model = options(blocks=BLOCKS, period=1), build(kind)
    shards, links, ledger = 1, DataLinks(), CommLedger()
    if mesh is not None:
        apply_tensor_parallel(model, mesh["tp"])
        pad_sequences(model, 2)
        if sharded:
            shards = mesh["dp"].size()
            cut = shard_dims(build_groups(model, chosen), shards)
            apply_fsdp(model, mesh["dp"], torch.float32, shard_dim=lambda p: cut.get(id(p)))
            scatter = partial(
                ledger.reduce_scatter, group=mesh["dp"].get_group(), axis="dp", purpose="second moments"
            )
            links = DataLinks(shards, mesh["dp"].get_local_rank(), 1, scatter)
    fill(model)
    if mesh is not None and not sharded:
        complete_gradients(model)
    optimizer = build_optimizer(model, chosen, "float32")
    optimizer.connect(links)
    calls = batch()
    rows = 4 // shards
    own = slice(links.shard * rows, (links.shard + 1) * rows)
    seen = [_gathered(model, optimizer)]
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.begin_step(1)
        loss = model(*(each[own] for each in calls)) / 50
        with CommDebugMode() as issued:
            optimizer.before_backward(0)
        assert issued.get_total_counts() == sharded, "one sum of all second moments over the data ranks"
        loss.backward()
        with CommDebugMode() as issued:
            optimizer.step()
        assert issued.get_total_counts() == 0, "bases and updates need nothing of other ranks"
        seen.append(_gathered(model, optimizer))
    return seen


def _gathered(model, optimizer) -> dict[str, torch.Tensor]:
    found = {f"{name} weight": whole(param) for name, param in model.named_parameters()}
    for name, slots in optimizer.state_dict()["state"].items():
        found |= {f"{name} {slot}": whole(tensor) for slot, tensor in slots.items()}
    return found


def _moved(before: torch.Tensor, momentum: torch.Tensor, basis: torch.Tensor, parts: int) -> torch.Tensor:
    """Algorithm 3 of the paper on whole matrices, side A, norm linf."""
    m, n = before.shape[0] // parts, before.shape[1]
    basis = basis.reshape(BLOCKS, n // BLOCKS, n // BLOCKS)
    columns = momentum.split(n // BLOCKS, dim=1)
    update = torch.cat([torch.sign(c @ u) @ u.T for c, u in zip(columns, basis)], dim=1) / m**0.5
    return (1 - LR * DECAY) * before - LR * TAU * max(m, n) ** 0.5 * update


def _equal_to_one_process(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    for kind, sharded in (("llama3", False), ("llama3", True), ("gpt2", True)):
        wanted, found = _train(kind, None, False), _train(kind, mesh, sharded)
        under = [name.removesuffix(" basis") for name in found[1] if name.endswith(" basis")]
        assert len(under) == (14 if kind == "llama3" else 8)
        for name in under:
            what = (kind, sharded, name)
            for slot in ("statistic", "m"):
                one, other = wanted[1][f"{name} {slot}"], found[1][f"{name} {slot}"]
                torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5 * float(one.abs().max()))
            basis, statistic = found[1][f"{name} basis"], found[1][f"{name} statistic"]
            turned = basis.mT @ statistic @ basis
            off = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
            assert float(off.abs().max()) < 1e-4 * float(turned.abs().max()), what
            for before, after in itertools.pairwise(found):
                moved = _moved(
                    before[f"{name} weight"],
                    after[f"{name} m"],
                    after[f"{name} basis"],
                    3 if "wqkv" in name else 1,
                )
                # A coefficient next to zero may take another sign here: a few rows move by it.
                apart = (after[f"{name} weight"] - moved).abs() > 1e-5
                assert float(apart.float().mean()) < 0.01, what


def test_dobb_on_the_tensor_axis_equals_one_process():
    run_distributed(_equal_to_one_process, 4, timeout=300)
