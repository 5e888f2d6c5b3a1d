"""Dobb on shards and replicas, dense and experts: equal to one process, and silent but for the statistics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.distributed_harness import run_distributed
from tests.optim import test_sharded
from tests.optim.test_dobb import T, micro_batch, options
from titanforge.models.layers.moe import MoE
from titanforge.optim import DataLinks, build_groups, build_optimizer, shard_dims
from titanforge.optim.accounting import second_moment_entries
from titanforge.optim.dobb.capture import DobbCapture
from titanforge.optim.matrix_options import DobbOptions
from titanforge.parallelisms import apply_fsdp
from titanforge.sync.ledger import CommLedger

STEPS, TOKENS, EXPERTS = 2 * T + 1, 40, 5
LAYOUTS = ((4, 1), (2, 2), (1, 4))
DENSE = {"wqkv": (24, 8), "w1": (16, 8), "w2": (8, 16), "router": (EXPERTS, 8)}


class Block(nn.Module):
    """A fused projection of three matrices, two linears, and experts, of which four ranks have 2, 2, 1, 0."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(8, 24, bias=False)
        self.w1 = nn.Linear(8, 16, bias=False)
        self.w2 = nn.Linear(16, 8, bias=False)
        self.moe = MoE(8, 16, EXPERTS, 2, 0.2)
        for weight in self.moe.parameters():
            nn.init.normal_(weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).chunk(3, dim=-1)
        x = x + self.w2(torch.tanh(self.w1(q * k + v)))
        return x + self.moe(x)[0]


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict({"0": Block()})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["0"](x)


class Run:
    """A model and its optimizer on `replicas` x `shards` ranks; rows of a common batch are dealt to them."""

    device = "cpu"

    def __init__(self, chosen, replicas: int = 1, shards: int = 1, seed: int = 0) -> None:
        self.rank = dist.get_rank() if replicas * shards > 1 else 0
        self.ranks, self.shards, self.replicas = replicas * shards, shards, replicas
        self.model, self.ledger = Net(seed).to(self.device), CommLedger()
        if chosen.dobb.side == "G":
            # The gradients of a softmax's inputs sum to zero: along that direction M U is noise, and l2 makes
            # a column of unit norm of it.
            self.model.layers["0"].moe.router.requires_grad_(False)  # pyright: ignore
        self.replica_group = None
        shard_group = None
        if self.ranks > 1:
            mesh = init_device_mesh(self.device, (replicas, shards), mesh_dim_names=("replicate", "shard"))
            if replicas > 1:
                self.replica_group = mesh["replicate"].get_group()
            if shards > 1:
                shard_group = mesh["shard"].get_group()
                dims = shard_dims(build_groups(self.model, chosen), shards)
                apply_fsdp(self.model, mesh["shard"], torch.float32, shard_dim=lambda p: dims.get(id(p)))
        self.optimizer = build_optimizer(self.model, chosen, "float32")
        ledger, what = self.ledger, {"purpose": "second moments"}
        scatter = partial(ledger.reduce_scatter, group=shard_group, axis="shard", **what)
        reduce = partial(ledger.all_reduce, group=self.replica_group, axis="replicate", **what)
        self.optimizer.connect(
            DataLinks(
                shards,
                self.rank % shards,
                replicas,
                None if shard_group is None else scatter,
                None if self.replica_group is None else reduce,
                partial(ledger.record, "shard"),
            )
        )

    def train(self, first: int, last: int, micro_batches: int = 1, collectives: list | None = None) -> None:
        """collectives: receives how many were issued by each optimizer step."""
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.optimizer.begin_step(micro_batches)
            for index in range(micro_batches):
                x = micro_batch(step, index, TOKENS)[self.rank :: self.ranks].to(self.device)
                loss = self.model(x).square().sum() / (TOKENS * micro_batches)
                self.optimizer.before_backward(index)
                loss.backward()
            for param in self.model.parameters():
                if self.replica_group is not None and param.grad is not None:
                    local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                    dist.all_reduce(local, group=self.replica_group)
            with CommDebugMode() as issued:
                self.optimizer.step()
            if collectives is not None:
                collectives.append(issued.get_total_counts())

    def whole(self) -> dict[str, dict[str, Tensor]]:
        """Weights and states by name, gathered."""
        found = {name: {"weight": param} for name, param in self.model.named_parameters()}
        for name, slots in self.optimizer.state_dict()["state"].items():
            found[name] |= slots
        return {name: {s: whole(t) for s, t in slots.items()} for name, slots in found.items()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_equal(one: dict, other: dict, tolerance: float = 0.0, slots: tuple[str, ...] = ()) -> None:
    assert one.keys() == other.keys()
    for name, states in one.items():
        for slot, tensor in states.items():
            if slots and slot not in slots:
                continue
            near = tolerance * float(tensor.abs().max()) if tolerance else 0.0
            torch.testing.assert_close(
                other[name][slot], tensor, rtol=0, atol=near, msg=lambda m, n=name, s=slot: f"{n} {s}: {m}"
            )


def moments(chosen, shards: int) -> int:
    """Second moments and positions that a refresh adds up, as the paper counts them."""
    dobb = DobbOptions(side=chosen.dobb.side, blocks=chosen.dobb.blocks)
    parts = 3 if dobb.side == "G" else 1
    dense = dict(DENSE)
    if dobb.side == "G":
        del dense["router"]
    entries = sum(second_moment_entries(m, n, dobb) for name, (m, n) in dense.items() if name != "wqkv")
    entries += parts * second_moment_entries(8, 8, dobb)
    padded = -(-EXPERTS // shards) * shards  # the last ranks have fewer experts
    widths = (8, 8, 16) if dobb.side == "A" else (16, 16, 8)
    entries += padded * sum(w * w // dobb.blocks for w in widths)
    # Each shard is told all positions, and how many blocks have failed so far.
    return entries + shards * (len(dense) + 3 * EXPERTS + 1)


def layouts(rank: int, world_size: int, folder: str, splits=LAYOUTS, near: float = 1e-3) -> None:
    # l2: a sign would turn the last bit of a sum into a whole step.
    for side, capture in (("A", "first"), ("G", "all")):
        chosen = options(norm="l2", side=side, capture=capture, blocks=4)
        alone = Run(chosen)
        alone.train(0, STEPS, 2)
        expected = alone.whole()
        for replicas, shards in splits:
            run = Run(chosen, replicas, shards)
            counts: list[int] = []
            run.train(0, STEPS, 2, counts)
            # An orthogonal iteration doubles what differs; weights and momenta follow.
            assert_equal(expected, run.whole(), near, ("weight", "m", "statistic"))
            refreshes = -(-STEPS // T)
            for axis, size in (("shard", shards), ("replicate", replicas)):
                entry = run.ledger.total(axis)
                per_refresh = 4 * moments(chosen, shards) // (1 if axis == "shard" else shards)
                wanted = (refreshes, refreshes * per_refresh) if size > 1 else (0, 0)
                assert (entry.count, entry.bytes) == wanted
            # The update itself is silent; the replicas' half waits for the shards' on CPU.
            late = replicas > 1 and shards > 1 and Run.device == "cpu"
            assert counts == [int(late and step % T == 0) for step in range(STEPS)]


def gradient_source(rank: int, world_size: int, folder: str) -> None:
    """Second moments of the gradient need no exchange at all."""
    chosen = options(norm="l2", side="A", blocks=4, source="gradient")
    alone, run = Run(chosen), Run(chosen, 1, 4)
    alone.train(0, T + 1)
    counts: list[int] = []
    run.train(0, T + 1, collectives=counts)
    assert sum(counts) == 0 and run.ledger.total().count == 0
    assert_equal(alone.whole(), run.whole(), 1e-3, ("weight", "m", "statistic"))


def resumed(rank: int, world_size: int, folder: str) -> None:
    """From the middle of a period: the same bits on the same ranks, the same run on others."""
    chosen = options(norm="l2", blocks=4, basis_dtype="bfloat16")
    run = Run(chosen, 2, 2)
    names = sorted((n, s) for n, slots in run.optimizer.state_dict()["state"].items() for s in slots)
    of_all = [None] * world_size
    dist.all_gather_object(of_all, names)
    assert all(theirs == names for theirs in of_all)
    run.train(0, T + 1)
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)  # pyright: ignore[reportPrivateImportUsage]
    run.train(T + 1, 2 * T + 1)
    expected = run.whole()
    for replicas, shards in ((2, 2), (1, 4)):
        again = Run(chosen, replicas, shards, seed=5)
        state = {"model": again.model.state_dict(), "optimizer": again.optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)  # pyright: ignore[reportPrivateImportUsage]
        again.model.load_state_dict(state["model"])
        again.optimizer.load_state_dict(state["optimizer"])
        again.train(T + 1, 2 * T + 1)
        if shards == 2:
            assert_equal(expected, again.whole())
        else:
            assert_equal(expected, again.whole(), 1e-2, ("weight", "m", "statistic"))


def launches(rank: int, world_size: int, folder: str) -> None:
    """When reductions are launched; that buckets of one weight each leave the same bits as larger ones."""
    for side in ("A", "G"):
        chosen = options(side=side, blocks=4)
        plain, early = Run(chosen, 2, 2), Run(chosen, 2, 2)
        capture, in_backward = early.optimizer.capture, []  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(capture, DobbCapture)
        capture._buckets = [[weight] for weight in capture.weights]
        scatter = capture.links.reduce_scatter

        def noted(*tensors, scatter=scatter, in_backward=in_backward, **how):
            in_backward.append(torch._C._current_graph_task_id() != -1)
            return scatter(*tensors, **how)

        capture.links = replace(capture.links, reduce_scatter=noted)
        capture.failed_blocks += 1 + capture.links.shard
        for run in (plain, early):
            run.train(0, T + 1)
        assert_equal(plain.whole(), early.whole())
        assert int(early.optimizer.metrics()["dobb_failed_blocks"]) == 1 + 2, "of both shards, once"
        assert in_backward == 2 * len(capture.weights) * [side == "G"]


def other_rules(rank: int, world_size: int, folder: str) -> None:
    """Muon, RMNP and Dion as on one rank: where three rows leave a rank without any, and on the shards that
    FSDP makes of what another axis has cut, along the same dim or the other.
    """
    flat = init_device_mesh("cpu", (world_size,))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for recipe in test_sharded.RECIPES:
        if recipe[0] not in test_sharded.MATRIX_RULES:
            continue
        for axis in (None, 0, 1):
            sizes = (3, 1) if axis is None else (4, 4)  # two axes cut evenly
            alone, cut = test_sharded.Model(*sizes), test_sharded.Model(*sizes)
            expected = test_sharded.train(alone, recipe)
            for module in (*cut.layers, cut):
                for name, param in list(module.named_parameters()) if axis is not None else []:
                    if param.dim() > 1 and not isinstance(param, DTensor):
                        owner = module.get_submodule(name.rpartition(".")[0])
                        # Of experts: the experts, or the rows of each, as FSDP takes the others.
                        split = distribute_tensor(param.detach(), both["tensor"], [Shard(axis)])
                        owner._parameters[name.rpartition(".")[2]] = nn.Parameter(split)
                fully_shard(module, mesh=flat if axis is None else both["shard"])
            found = test_sharded.train(cut, recipe)
            for (name, one), other in zip(alone.named_parameters(), cut.parameters()):
                torch.testing.assert_close(whole(other), one.detach(), rtol=0, atol=1e-6)
                for slot, state in expected["state"][name].items():
                    torch.testing.assert_close(whole(found["state"][name][slot]), state, rtol=1e-5, atol=1e-6)


def everything(rank: int, world_size: int, folder: str) -> None:
    layouts(rank, world_size, folder)
    gradient_source(rank, world_size, folder)
    resumed(rank, world_size, folder)
    launches(rank, world_size, folder)
    other_rules(rank, world_size, folder)


def test_shards_and_replicas(tmp_path) -> None:
    run_distributed(everything, 4, str(tmp_path))
