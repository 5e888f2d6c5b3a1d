"""A short training run of a small Llama on any layout, made of the trainer's own parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scripts.exactness.registry import World
from titanforge.assembly import build_meta_model, mesh_sizes, probe_forward
from titanforge.config import JobConfig
from titanforge.config.sections import Optimizer
from titanforge.forge import ParamPlan, Ranks, Steps, attach
from titanforge.forge.plan import Granule, plan
from titanforge.layout import build_dims, parallelize
from titanforge.models.initialization import initialize_weights
from titanforge.optim import build_optimizer
from titanforge.optim.build import build_groups, build_recipe
from titanforge.parallelisms import ParallelDims
from titanforge.sync import CommLedger, Replication, build_sync_policy

STEPS = 5


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes, and how a context is split; all of 1: one rank by itself."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    method: str = "ring"


ALONE = Layout()


def job(world: World, layout: Layout = ALONE, **changes: Any) -> JobConfig:
    """The configuration of a run; changes: `section__key=value`.

    Sizes follow the world, so that heads and sequences can be dealt to its ranks, and are ragged elsewhere.
    """
    config = JobConfig()
    heads = 4 if world.size <= 2 else 2 * world.size
    head_dim = 32 if world.on_gpu else 8
    sizes = {
        "name": "llama3",
        "flavor": "debugmodel",
        "n_layers": 2,
        "dim": heads * head_dim,
        "n_heads": heads,
        "n_kv_heads": heads // 2,
        "hidden_dim": heads * (head_dim * 2 + 2),
    }
    for key, value in sizes.items():
        setattr(config.model, key, value)
    pieces = 2 * world.size  # of a sequence, two a rank where attention goes round in a ring
    config.training.seq_len = -(-(128 if world.on_gpu else 16) // pieces) * pieces
    config.training.max_norm = 0.0
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    config.optimizer.lr = 1e-3
    parallelism = config.parallelism
    parallelism.data_parallel_replicate_degree = layout.dp_replicate
    parallelism.data_parallel_shard_degree = layout.dp_shard
    parallelism.context_parallel_degree = layout.cp
    parallelism.tensor_parallel_degree = layout.tp
    parallelism.expert_parallel_degree = layout.ep
    parallelism.pipeline_parallel_degree = layout.pp
    # Two sequences a rank in all, as `batch` makes them.
    config.training.local_batch_size = 2 * world.size // (layout.dp_replicate * layout.dp_shard)
    parallelism.context_parallel_method = layout.method  # pyright: ignore[reportAttributeAccessIssue]
    for path, value in changes.items():
        section, key = path.split("__")
        holder = getattr(config, section)
        if key not in {field.name for field in dataclasses.fields(holder)}:
            raise KeyError(path)
        setattr(holder, key, value)
    return config


VOCABULARY = 300
Make = Callable[[nn.Module, JobConfig, ParallelDims], Any]


def ordinary(model: nn.Module, config: JobConfig, dims: ParallelDims) -> Any:
    """The ordinary engine."""
    return build_optimizer(model, config.optimizer, config.training.dtype, seed=3)


def fused(model: nn.Module, config: JobConfig, dims: ParallelDims) -> Any:
    """Updates inside backward."""
    return _attached(model, config, dims)


def partly_fused(model: nn.Module, config: JobConfig, dims: ParallelDims) -> Any:
    """Updates inside backward where the plan has them, the others by `step`."""
    return _attached(model, config, dims, all_fused=False)


def formed(model: nn.Module, config: JobConfig, dims: ParallelDims) -> Any:
    """The same operands, but each gradient is formed from the same tiles and handed to the flat pass."""

    def always(rule: Any, placement: Any, mesh: Mapping[str, int], schedule: Any) -> ParamPlan:
        decided = plan(rule, placement, mesh, schedule)
        return ParamPlan(Granule.LAYER, "formed for comparison", deferred=decided.deferred)

    return _attached(model, config, dims, planner=always)


def _attached(
    model: nn.Module, config: JobConfig, dims: ParallelDims, all_fused: bool = True, **more: Any
) -> Any:
    device = next(model.parameters()).device
    optimizer = attach(
        model,
        build_groups(model, config.optimizer),
        build_recipe(config.optimizer, config.training.dtype),
        probe=lambda: probe_forward(model, device),
        steps=Steps(),
        seed=3,
        ranks=_ranks(dims),
        **more,
    )
    left = [line.name for line in optimizer.plan if not line.plan.fused]
    if left and all_fused:
        raise RuntimeError(f"not fused, so nothing would be shown: {left}")
    return optimizer


def _ranks(dims: ParallelDims) -> Ranks:
    if dims.world_size == 1:
        return Ranks()

    def sum_over_data(tensor: Tensor) -> None:
        if (group := dims.get_group("loss")) is not None:
            dist.all_reduce(tensor, group=group)

    return Ranks(mesh_sizes(dims), sum_over_data)


class Run:
    """A model on a layout, its optimizer and its sync policy; trained by `train`."""

    def __init__(self, world: World, config: JobConfig, make: Make = ordinary) -> None:
        self.world, self.config = world, config
        self.dims = _dims(world, config)
        self.model: Any = build_meta_model(config, VOCABULARY)[0]
        self.pipeline = parallelize(self.model, config, self.dims, world.device)
        initialize_weights(self.model, 3)
        self.model.train()
        self.optimizer = make(self.model, config, self.dims)
        self.ledger = CommLedger()
        alone = self.dims.world_size == 1
        self.sync = build_sync_policy(config.sync)
        replicas = None if alone else self.dims.get_group("dp_replicate")
        replication = replicas and Replication(replicas, self.dims.get_group("replica"), dist.group.WORLD)
        self.sync.attach(self.model, replication, self.ledger, self.optimizer)

    def _sum_over_data(self, tensor: Tensor) -> None:
        if self.dims.world_size > 1 and (group := self.dims.get_group("loss")) is not None:
            dist.all_reduce(tensor, group=group)

    def step(self, number: int) -> float:
        """One step on batch `number`; returns the loss of the whole global batch."""
        tokens, labels = batch(self.world, self.config, number)
        valid = int((labels != -100).sum())
        part = self._own(tokens.shape[0])
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens[part])
        self.optimizer.set_lr(1.0 / (1 + 0.1 * number))
        self.optimizer.zero_grad()
        self.optimizer.begin_step(1)
        self.sync.begin_step(1, [valid])
        self.sync.before_backward(0)
        if self.pipeline is not None:
            loss = self.pipeline.forward_backward(tokens[part], positions, None, labels[part], valid) / valid
        else:
            loss = self.model(tokens[part], None, None, labels[part]) / valid
            self.optimizer.before_backward(0, torch.isfinite(loss.detach()))
            loss.backward()
        self.sync.reduce_gradients()
        self.sync.step(self.optimizer, None, None)
        total = loss.detach().clone()
        self._sum_over_data(total)
        return float(total)

    def _own(self, sequences: int) -> slice:
        if self.dims.world_size == 1:
            return slice(None)
        rank, size = self.dims.data_rank_and_size()
        each = sequences // size
        return slice(rank * each, (rank + 1) * each)

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        """Steps first … last - 1; their losses."""
        return [self.step(number) for number in range(first, last)]

    @torch.no_grad()
    def round_weights(self) -> None:
        """Start from what bf16 weights of the same seed would be."""
        for param in self.model.parameters():
            param.copy_(param.bfloat16())

    def weights(self) -> dict[str, Tensor]:
        """Whole weights by name; collective."""
        return {name: whole(param) for name, param in self.model.named_parameters()}

    def states(self) -> dict[str, Tensor]:
        """Whole optimizer states by name; collective."""
        return {
            f"{name}.{slot}": whole(tensor)
            for name, slots in self.optimizer.state_dict()["state"].items()
            for slot, tensor in slots.items()
        }

    def close(self) -> None:
        self.sync.close()


def _dims(world: World, config: JobConfig) -> ParallelDims:
    parallelism = config.parallelism
    ranks = (
        parallelism.data_parallel_replicate_degree
        * parallelism.data_parallel_shard_degree
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
        * parallelism.pipeline_parallel_degree
    )
    if ranks not in (1, world.size):
        raise ValueError(f"a layout of {ranks} ranks in a world of {world.size}")
    dims = build_dims(config, ranks)
    if ranks > 1:
        dims.build_mesh(world.device.type)
    return dims


def batch(world: World, config: JobConfig, number: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a global batch, two sequences a rank, labels left out unevenly."""
    generator = torch.Generator().manual_seed(1000 + number)
    T = config.training.seq_len
    tokens = torch.randint(0, VOCABULARY, (2 * world.size, T + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, : 1 + number % (T // 2)] = -100
    return tokens[:, :-1].to(world.device), labels.to(world.device)


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, whatever part of it is here; collective."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def losses_apart(ours: list[float], theirs: list[float]) -> float:
    """The largest distance of two runs' losses; infinite if the runs did not learn or lose a step."""
    if len(ours) != len(theirs) or len(set(theirs)) < len(theirs):
        return float("inf")
    return largest(abs(a - b) for a, b in zip(ours, theirs))


def tensors_apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest distance of two runs' tensors; infinite if they are not the same ones."""
    if ours.keys() != theirs.keys() or any(ours[n].shape != theirs[n].shape for n in ours):
        return float("inf")
    return largest(float((ours[n].double() - theirs[n].double()).abs().max()) for n in ours)


def drift(world: World, tensors: Mapping[str, Tensor]) -> float:
    """The largest distance of one tensor on two ranks; collective."""
    found = []
    for tensor in tensors.values():
        low, high = tensor.float().clone(), tensor.float().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        found.append(float((high - low).abs().max()))
    return largest(found)


def distributed(optimizer: Any) -> bool:
    """Whether any weight of an optimizer is shared out over ranks."""
    return any(isinstance(param, DTensor) for group in optimizer.groups for param in group.params)


def largest(values: Iterable[float]) -> float:
    """The largest of some distances; infinite if one is not a number, which `max` would pass over."""
    found = list(values)
    return max(found) if found and not any(map(math.isnan, found)) else math.inf


def rule(name: str = "AdamW", **more: Any) -> Optimizer:
    """An `[optimizer]` section."""
    return Optimizer(**{"name": name, "lr": 1e-3, **more})
