"""A toy run of replicas on real processes: model, data, training loop, comparisons."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from titanforge.config.sections import Optimizer, ScalarOptimizer
from titanforge.optim import DataLinks, RuleOptimizer, build_groups, build_optimizer, shard_dims
from titanforge.sync import (
    CommLedger,
    EveryStep,
    LocalUpdate,
    Replication,
    Rmmc,
    Scheduled,
    StatesEveryStep,
    SyncPolicy,
)

SEQUENCES, LENGTH, VOCABULARY = 8, 6, 11


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.output = nn.Linear(6, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.output(hidden)


def settings_of(rule: str, **options: Any) -> Optimizer:
    return Optimizer(name=rule, lr=2e-2, momentum=0.9, scalar=ScalarOptimizer(lr=1e-2), **options)


def optimizer_of(model: nn.Module, rule: str = "muon", **options: Any) -> RuleOptimizer:
    optimizer = build_optimizer(model, settings_of(rule, **options), "float32")
    assert isinstance(optimizer, RuleOptimizer)
    return optimizer


POLICIES = {
    "gradients": EveryStep,
    "states": StatesEveryStep,
    "scheduled": Scheduled,
    "rmmc": Rmmc,
}


class Run:
    """One rank of a run in which replica r reads `sequences[r::replicas]`, and its shards deal those."""

    def __init__(
        self,
        policy: SyncPolicy,
        rule: str = "muon",
        shards: int = 1,
        uneven: bool = False,
        attach: bool = True,
        **options: Any,
    ) -> None:
        self.replicas = dist.get_world_size() // shards
        self.mesh: DeviceMesh = init_device_mesh(
            "cpu", (self.replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard")
        )
        self.replica = self.mesh["dp_replicate"].get_local_rank()
        self.shard, self.shards, self.uneven = self.mesh["dp_shard"].get_local_rank(), shards, uneven
        self.model = Model()
        if shards > 1:
            dims = shard_dims(build_groups(self.model, settings_of(rule, **options)), shards)
            place = lambda param: Shard(dims[id(param)]) if id(param) in dims else None  # noqa: E731
            for layer in self.model.layers:
                fully_shard(layer, mesh=self.mesh["dp_shard"], shard_placement_fn=place)
            fully_shard(self.model, mesh=self.mesh["dp_shard"], shard_placement_fn=place)
            for module in (*self.model.layers, self.model):
                module.set_gradient_divide_factor(1.0)  # pyright: ignore
                module.set_force_sum_reduction_for_comms(True)  # pyright: ignore
        self.optimizer = optimizer_of(self.model, rule, **options)
        self.policy, self.ledger, self.count = policy, CommLedger(), 0
        replicas = self.mesh["dp_replicate"].get_group()
        split = self.mesh["dp_shard"].get_group() if shards > 1 else None
        if attach:
            policy.attach(
                self.model, Replication(replicas, split, dist.group.WORLD), self.ledger, self.optimizer
            )
            what = {"purpose": "second moments"}
            scatter = partial(self.ledger.reduce_scatter, group=split, axis="dp_shard", **what)
            reduce = partial(self.ledger.all_reduce, group=replicas, axis="dp_replicate", **what)
            self.optimizer.connect(
                DataLinks(shards, self.shard, self.replicas, scatter if split else None, reduce)
            )

    def batch(self, replica: int) -> Tensor:
        tokens = torch.randint(
            0, VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(self.count)
        )
        part = tokens[replica :: self.replicas]
        # Replica 0 trains on half as much, so that a mean of means would be wrong.
        return part[: len(part) // 2] if self.uneven and replica == 0 else part

    def tokens(self) -> list[int]:
        return [self.batch(replica)[:, 1:].numel() for replica in range(self.replicas)]

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.policy.begin_step(1, self.tokens())
        self.optimizer.begin_step(1)
        self.policy.before_backward(0)
        tokens = self.batch(self.replica)[self.shard :: self.shards]
        losses = nn.functional.cross_entropy(
            self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        self.optimizer.before_backward(0)
        (losses / self.policy.gradient_divisor(self.tokens())).backward()
        self.policy.reduce_gradients()

    def step(self, flag: float = 1.0, lr_factor: float = 1.0) -> str | None:
        """Returns why the step was a sync, None if it was none."""
        self.optimizer.set_lr(lr_factor)
        self.backward()
        if not flag:  # why a step is not applied
            for param in self.model.parameters():
                param.grad = torch.full_like(param, math.nan)
        self.policy.step(self.optimizer, torch.tensor(flag), torch.tensor(1.0))
        self.count += 1
        events = self.policy.take_events()
        return events[-1]["sync"] if events else None

    def everything(self) -> dict[str, Tensor]:
        """Whole weights and states by name."""
        found = {
            f"{item.name}/{item.slot}": item.tensor.clone() for item in self.optimizer.replicated_tensors()
        }
        return found

    def weights(self) -> dict[str, Tensor]:
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.model.named_parameters()
        }


def differences(group: Any, tensors: dict[str, Tensor]) -> list[str]:
    """Names of tensors whose bits are not the same on all ranks of the group."""
    found = []
    for name, tensor in tensors.items():
        low, high = tensor.clone(), tensor.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
        if not torch.equal(low, high):
            found.append(name)
    return found


def unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def local(kind: Any, lr: float | None = None) -> LocalUpdate:
    return LocalUpdate(kind, lr)
