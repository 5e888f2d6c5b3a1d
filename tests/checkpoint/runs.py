"""A tiny run: model, fake optimizer state, everything a checkpoint holds, on any layout."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.parallelisms.toy import make_toy
from titanforge.checkpoint import CheckpointManager
from titanforge.config.sections import Checkpoint
from titanforge.parallelisms import Runtime, apply_fsdp, init_distributed

COMM = SimpleNamespace(
    init_timeout_seconds=60,
    train_timeout_seconds=60,
    trace_buf_size=0,
    save_traces_folder="comm_traces",
    save_traces_file_prefix="rank_",
)


def settings(**options: Any) -> Checkpoint:
    return dataclasses.replace(Checkpoint(enable=True), **options)


class TinyRun:
    """A model (FSDP over all ranks, or plain replicas) with one state tensor per weight."""

    def __init__(self, sharded: bool, seed: int, width: int = 12, tied: bool = False, replicate: int = 1):
        self.runtime: Runtime = init_distributed(COMM, "cpu")
        self.model = make_toy(width=width, seed=seed, tied=tied)
        if sharded:
            shape = (replicate, self.runtime.world_size // replicate)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
            apply_fsdp(self.model, mesh["dp_shard"], torch.float32)
        self.moments = {
            name: {
                "exp_avg": torch.zeros_like(p.detach()) + p.detach() * 2,
                "step": torch.tensor(float(seed)),
            }
            for name, p in self.model.named_parameters()
        }
        self.step, self.seed = seed, seed
        torch.manual_seed(1000 * seed + self.runtime.rank)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": {"state": self.moments, "rule": "AdamW", "lr": 0.1 + self.seed},
            "train_state": {"step": self.step, "tokens_seen": 2**60 + self.step},
            "dataloader": {"streams": {0: (1, 2), 7: (3, 4)}, "order": torch.arange(3)},
            "rng": {"cpu": torch.get_rng_state()},
        }

    def manager(self, folder, **options: Any) -> CheckpointManager:
        return CheckpointManager(
            settings(**options), folder, config_toml='[job]\ndescription = "tiny"\n', runtime=self.runtime
        )

    def full(self) -> dict[str, torch.Tensor]:
        """Whole tensors of model and optimizer by name (collective)."""
        named = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        named |= {f"moment.{n}": slots["exp_avg"] for n, slots in self.moments.items()}
        named |= {f"step.{n}": slots["step"] for n, slots in self.moments.items()}
        return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in named.items()}

    def mutate(self) -> None:
        """What training does right after a save: every tensor changes in place."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(100.0)
            for slots in self.moments.values():
                slots["exp_avg"].mul_(-3.0)
                slots["step"].add_(1)


def expected(seed: int, width: int = 12, tied: bool = False) -> dict[str, torch.Tensor]:
    """What ``TinyRun(seed=seed).full()`` is, without any process group."""
    model: nn.Module = make_toy(width=width, seed=seed, tied=tied)
    named = {f"model.{n}": t for n, t in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        named[f"moment.{name}"] = parameter.detach() * 2
        named[f"step.{name}"] = torch.tensor(float(seed))
    return named


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
