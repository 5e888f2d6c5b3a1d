"""Which collectives a step issues, by kind: a fallback to gathering something whole would show here."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from tests.distributed_harness import run_distributed
from tests.parallelisms.test_tensor_parallel import batch, build, fill
from titanforge.parallelisms import (
    apply_context_parallel,
    apply_fsdp,
    apply_tensor_parallel,
    complete_gradients,
    tensor_rank_weights,
)
from titanforge.parallelisms.named_groups import group_named, name_group
from titanforge.parallelisms.traffic import silent

LAYERS = 2


def _counted(model) -> dict[str, int]:
    """Of one step; all-to-alls, which are issued inside of operators of our own, as they are called."""
    counts: dict[str, int] = {}

    def spy(*args, **kwargs):
        counts["all_to_all"] = counts.get("all_to_all", 0) + 1
        return original(*args, **kwargs)

    original, dist.all_to_all_single = dist.all_to_all_single, spy
    with CommDebugMode() as communication:
        model(*batch()).backward()
    dist.all_to_all_single = original
    for operator, count in communication.get_comm_counts().items():
        name = str(operator).rpartition(".")[2]
        counts[name] = counts.get(name, 0) + count
    return counts


class Told(list):
    """What a model's collectives were recorded as."""

    def __call__(self, axis: str, purpose: str, size: int) -> None:
        assert size > 0
        self.append((axis, purpose))

    def counts(self) -> dict[tuple[str, str], int]:
        return {each: self.count(each) for each in set(self)}


def _tensor_counts(rank: int, world_size: int, kind: str) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    model = build(kind)
    told = Told()
    apply_tensor_parallel(model, mesh, told)
    fill(model)
    complete_gradients(model)
    if rank == 0:
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        assert held == tensor_rank_weights(build(kind), world_size)
    counts = _counted(model)
    exchanged = counts.get("all_to_all", 0)
    wanted = {("tp", "loss"): 2} | ({("tp", "rows of fused weights"): exchanged} if exchanged else {})
    assert told.counts() == wanted
    return counts


@pytest.mark.parametrize(
    ("kind", "replicated", "exchanged"),
    [("llama3", 2 * LAYERS + 1, 0), ("qwen3", 4 * LAYERS + 1, 0), ("gpt2", 4 * LAYERS + 3, 4 * LAYERS)],
)
def test_collectives_of_tensor_parallelism(kind, replicated, exchanged):
    """Two gathers and two scatters a block and direction, one of each at either end.

    replicated: weights of norms and positions, whose gradients are summed (biases see all tokens anyway);
    beside them the loss takes one maximum and one sum. exchanged: rows of GPT-2's fused weights and biases.
    """
    for counts in run_distributed(_tensor_counts, 2, kind):
        assert counts.pop("all_gather_into_tensor") == 4 * LAYERS + 2
        assert counts.pop("reduce_scatter_tensor") == 4 * LAYERS + 2
        assert sum(counts.pop(name, 0) for name in ("allreduce_", "all_reduce")) == 2 + replicated
        assert counts.pop("all_to_all", 0) == exchanged
        assert not counts


def _context_counts(rank: int, world_size: int, method: str) -> tuple[dict[str, int], int]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    model = build("llama3")
    told = Told()
    apply_context_parallel(model, mesh, method, told)
    fill(model)
    sent = []

    def spy(operations):
        sent.append([operation.tensor.numel() for operation in operations])
        return original(operations)

    original, dist.batch_isend_irecv = dist.batch_isend_irecv, spy
    share = 4 * 16 // world_size * 2 * 8 * 2  # tokens x key/value heads x E x (k, v)
    counts = _counted(model)
    assert all(sizes == [share, share] for sizes in sent), "one rank's keys and values at a time"
    purpose, number = ("keys and values", len(sent)) if sent else ("heads", counts["all_to_all"])
    assert told.counts() == {("cp", purpose): number}
    return counts, len(sent)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_collectives_of_context_parallelism(method):
    """Ulysses: two all-to-alls a block and direction. Ring: keys and values pass ranks - 1 times each way,
    their gradients once more, home. The gradients of weights are left to FSDP, which is absent here."""
    ranks = 4
    for counts, sent in run_distributed(_context_counts, ranks, method):
        assert counts == ({} if method == "ring" else {"all_to_all": 4 * LAYERS})
        assert sent == (LAYERS * (2 * (ranks - 1) + ranks) if method == "ring" else 0)


def _shard_counts(rank: int, world_size: int, kind: str, policy: str) -> dict[str, int]:
    model = build(kind)
    apply_fsdp(model, init_device_mesh("cpu", (world_size,)), torch.float32, reshard_policy=policy)
    fill(model)
    return _counted(model)


@pytest.mark.parametrize(
    ("kind", "policy", "gathers"),
    [
        ("llama3", "default", 2 * LAYERS + 4),  # embedding and blocks twice; head, and final norm, once
        ("llama3", "never", LAYERS + 3),
        ("gpt2", "always", 2 * LAYERS + 1),  # its embedding is its head, in the group of the final norm
    ],
)
def test_collectives_of_shards(kind, policy, gathers):
    """One gather a group in forward and, if it was freed, in backward; one scatter of its gradients."""
    groups = LAYERS + (3 if kind == "llama3" else 1)
    for counts in run_distributed(_shard_counts, 2, kind, policy):
        assert counts == {"_allgather_base_": gathers, "_reduce_scatter_base_": groups}


def _a_record_let_go(rank: int, world_size: int) -> None:
    class Record:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def add(self, axis: str, purpose: str, size: int) -> None:
            self.sizes.append(size)

    record = Record()
    name = name_group(dist.group.WORLD, record.add)
    group_named(name)[1]("cp", "heads", 8)
    assert record.sizes == [8]
    held = weakref.ref(record)
    del record
    assert held() is None, "the name of a group keeps a finished run's record"
    group, traffic = group_named(name)
    assert (group, traffic) == (dist.group.WORLD, silent)


def test_a_named_group_keeps_no_record_alive():
    run_distributed(_a_record_let_go, 1)
