"""Every configuration key: one dataclass per TOML section, help under each field.

The string literal below a field is that key's documentation: ``--help`` and
``docs/config.md`` are made from it. Names and meanings follow torchtitan's TOML
configuration wherever the same thing exists there. This package imports nothing
of ours, and validates nothing beyond types: ``loader`` checks words and types,
``validation`` checks sections against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from titanforge.config.sections.model import (
    ActivationCheckpoint,
    Compile,
    Model,
)
from titanforge.config.sections.optimizer import (
    DionOptions,
    DobbOptions,
    Forge,
    LRScheduler,
    MuonOptions,
    Optimizer,
    ParamGroup,
    ScalarOptimizer,
)
from titanforge.config.sections.parallelism import (
    Parallelism,
    Sync,
)
from titanforge.config.sections.run import (
    Checkpoint,
    Comm,
    Debug,
    Job,
    Metrics,
    Profiling,
)
from titanforge.config.sections.training import (
    Data,
    DataLoader,
    DataSource,
    Training,
    Validation,
)

__all__ = [
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Compile",
    "Data",
    "DataLoader",
    "DataSource",
    "Debug",
    "DionOptions",
    "DobbOptions",
    "Forge",
    "Job",
    "JobConfig",
    "LRScheduler",
    "Metrics",
    "Model",
    "MuonOptions",
    "Optimizer",
    "Parallelism",
    "ParamGroup",
    "Profiling",
    "ScalarOptimizer",
    "Sync",
    "Training",
    "Validation",
]


@dataclass
class JobConfig:
    """The whole configuration; one field per TOML section."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    parallelism: Parallelism = field(default_factory=Parallelism)
    sync: Sync = field(default_factory=Sync)
    forge: Forge = field(default_factory=Forge)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    validation: Validation = field(default_factory=Validation)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
