"""Checks across sections, made before any process group exists and any device memory is touched.

``validate_config`` raises ``ConfigError`` at the first setting that cannot run,
naming the key, its value and the way out, and returns warnings about settings
that have no effect in the chosen mode.
"""

from __future__ import annotations

import os
from pathlib import Path

from titanforge.config import schema
from titanforge.config.bounds import check_bounds
from titanforge.config.checkpoints import check_checkpoint
from titanforge.config.datasets import check_data, check_validation
from titanforge.config.effectless import effectless_settings
from titanforge.config.ranks import check_ranks, slow_attention
from titanforge.config.rules import FOLDING_RULES, MATRIX_RULES, rule_name
from titanforge.config.schema import refusal, show
from titanforge.config.sections import JobConfig
from titanforge.config.updates import check_dobb, check_optimizer, check_schedule

FORGE_KERNELS = ("auto", "portable", "pp2", "coop")
COMPILE_COMPONENTS = ("model", "loss")


def validate_config(config: JobConfig, world_size: int, device_type: str) -> list[str]:
    """Check a merged configuration for a run on ``world_size`` ranks of ``device_type`` ("cuda" or "cpu").

    Returns:
        Warnings, one line each, about settings that have no effect or surprise.

    Raises:
        ConfigError: at the first setting that cannot run.
    """
    check_bounds(config)
    warnings: list[str] = []
    data_parallel = check_ranks(config, world_size, device_type)
    warnings += slow_attention(config, device_type)
    _check_batch(config, data_parallel)
    check_optimizer(config)
    check_dobb(config)
    warnings += check_schedule(config)
    _check_forge(config, world_size, device_type)
    _check_cuda_graph(config, world_size, device_type)
    _check_sync(config)
    _check_exchange(config)
    check_data(config)
    check_validation(config)
    warnings += check_checkpoint(config, world_size)
    _check_runtime(config)
    return warnings + effectless_settings(config, device_type)


def _check_batch(config: JobConfig, data_parallel: int) -> None:
    training = config.training
    per_micro_step = training.local_batch_size * data_parallel
    if training.global_batch_size != -1 and training.global_batch_size % per_micro_step:
        below = training.global_batch_size // per_micro_step * per_micro_step
        choices = [str(below)] if below else []
        raise refusal(
            config,
            "training.global_batch_size",
            f"must be a multiple of training.local_batch_size x data-parallel ranks ="
            f" {training.local_batch_size} x {data_parallel} = {per_micro_step}: use"
            f" {' or '.join([*choices, str(below + per_micro_step)])}, or another local_batch_size",
        )


def _check_forge(config: JobConfig, world_size: int, device_type: str) -> None:
    if not config.forge.enable:
        return
    _check_forge_ranks(config, world_size)
    if config.forge.kernel not in FORGE_KERNELS:
        raise refusal(config, "forge.kernel", f"must be one of {', '.join(FORGE_KERNELS)}")
    if config.forge.kernel in ("pp2", "coop") and device_type != "cuda":
        raise refusal(
            config,
            "forge.kernel",
            f"runs on NVIDIA Hopper GPUs, and this run is on {device_type}: set it to auto or portable",
        )
    if config.training.max_norm > 0 and config.forge.clip == "exact":
        raise refusal(
            config,
            "training.max_norm",
            "exact clipping needs every gradient before any update, and forge.enable = true keeps none: set"
            ' forge.clip = "lagged" (the norms of earlier steps set the factor), or training.max_norm = 0'
            " (no clipping), or forge.enable = false",
        )
    if config.optimizer.implementation != "native":
        raise refusal(
            config,
            "optimizer.implementation",
            'forge.enable = true runs titanforge\'s own rules: use "native", or forge.enable = false',
        )
    if config.training.enable_cpu_offload:
        raise refusal(
            config,
            "training.enable_cpu_offload",
            "forge.enable = true updates weights on the device: set one of the two to false",
        )


def _check_forge_ranks(config: JobConfig, world_size: int) -> None:
    """Fused replicas sum gradients at every step, and a rank must know when a gradient of its is complete."""
    if world_size == 1:
        return
    replicas = config.parallelism.data_parallel_replicate_degree > 1
    for path, only in (("sync.policy", "every_step"), ("sync.reduce", "gradients")) if replicas else ():
        if schema.get_value(config, path) != only:
            raise refusal(
                config,
                path,
                f'with forge.enable = true replicas sum gradients at every step: set it to "{only}", or'
                " forge.enable = false",
            )


def _check_cuda_graph(config: JobConfig, world_size: int, device_type: str) -> None:
    """A captured step is launches on one device, the same at every step."""
    if not config.compile.cuda_graph:
        return
    rule = rule_name(config.optimizer.name)
    reason = ""
    if device_type == "cpu" and not config.job.dry_run:
        reason = "there is no CUDA device here"
    elif world_size > 1:
        reason = f"runs on one rank as yet, and {world_size} were started"
    elif config.optimizer.implementation != "native":
        reason = (
            f"optimizer.implementation = {show(config.optimizer.implementation)} keeps the learning rate on"
            ' the host (take "native")'
        )
    elif rule == "dobb" and config.optimizer.dobb.period == 1:
        reason = (
            'optimizer.name = "dobb" with optimizer.dobb.period = 1 refreshes its bases at every step, and '
            "steps that do run as they are"
        )
    elif config.training.enable_cpu_offload:
        reason = "training.enable_cpu_offload = true updates on the host"
    if reason:
        raise refusal(config, "compile.cuda_graph", f"{reason}: set compile.cuda_graph = false")


def _check_sync(config: JobConfig) -> None:
    """Policies under which replicas differ need a step in two halves and states that have a mean."""
    sync, optimizer = config.sync, config.optimizer
    averages = sync.policy != "every_step" or sync.reduce == "states"
    if not averages or config.parallelism.data_parallel_replicate_degree == 1:
        return
    key = "sync.reduce" if sync.policy == "every_step" else "sync.policy"
    instead = 'sync.reduce = "gradients"' if sync.policy == "every_step" else 'sync.policy = "every_step"'
    if optimizer.implementation != "native":
        raise refusal(
            config,
            key,
            "cuts a step in two, which torch.optim cannot: set optimizer.implementation = "
            f'"native", or {instead}',
        )
    if optimizer.state_dtype in ("int8", "fp8") or optimizer.master_weights == "stochastic_rounding":
        raise refusal(
            config,
            key,
            "averages weights and states: set optimizer.state_dtype to float32 or bfloat16 and "
            f"optimizer.master_weights to none or float32, or {instead}",
        )


def _check_exchange(config: JobConfig) -> None:
    """Codes are for what is formed anew at each exchange: a mean in few bits must not overwrite a state."""
    sync, optimizer = config.sync, config.optimizer
    if sync.exchange_dtype == "float32" or config.parallelism.data_parallel_replicate_degree == 1:
        return
    if sync.policy == "every_step" and sync.reduce == "gradients":
        return
    name = rule_name(optimizer.name)
    folds = [name in FOLDING_RULES and not optimizer.nesterov]
    if name in MATRIX_RULES:
        folds.append(rule_name(optimizer.scalar.name) in FOLDING_RULES)
    # Where nothing folds, rmmc decides by states of whole steps, which take no mean gradient.
    gradients = not all(folds) and (any(folds) or sync.policy != "rmmc")
    # Whether shards leave a weight whole (they do experts), `check_exchange` of the assembly knows.
    factors = name == "dion" and sync.low_rank and optimizer.dion.rank_fraction < 1
    if not (gradients or factors):
        raise refusal(
            config,
            "sync.exchange_dtype",
            "replicas would average states and weights alone, which go as float32: set it to "
            '"float32", or take optimizer.name = "Dion" with optimizer.dion.rank_fraction below 1, or '
            'sync.policy = "every_step" with sync.reduce = "gradients"',
        )


def _check_runtime(config: JobConfig) -> None:
    profiling, recompute = config.profiling, config.activation_checkpoint
    covered = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < covered:
        raise refusal(
            config,
            "profiling.profile_freq",
            f"must be at least profiler_warmup + profiler_active = {covered}",
        )
    option = recompute.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) >= 1):
        raise refusal(
            config,
            "activation_checkpoint.selective_ac_option",
            'must be "op" or a whole number of at least 1, as a string ("2": every second block)',
        )
    if recompute.memory_budget > 1:
        raise refusal(
            config, "activation_checkpoint.memory_budget", "is a share of what would be kept: at most 1"
        )
    if recompute.mode == "memory_budget":
        compiles_blocks = config.compile.enable and "model" in config.compile.components
        if not compiles_blocks or config.compile.backend in ("eager", "aot_eager"):
            raise refusal(
                config,
                "activation_checkpoint.mode",
                "the compiler keeps to a budget: set compile.enable = true, with model among "
                'compile.components and compile.backend = "inductor", or use none, selective or full',
            )
    for component in config.compile.components:
        if component not in COMPILE_COMPONENTS:
            raise refusal(
                config,
                "compile.components",
                f"{show(component)} is not one of {', '.join(COMPILE_COMPONENTS)}",
            )
    if config.compile.enable and not config.compile.components:
        raise refusal(
            config, "compile.components", "compile.enable = true has nothing to compile: name model, loss"
        )
    _check_writable(config, "job.dump_folder", Path(config.job.dump_folder))
    if config.checkpoint.enable and not config.checkpoint.load_only:
        folder = Path(config.job.dump_folder) / config.checkpoint.folder
        _check_writable(config, "checkpoint.folder", folder)


def _check_writable(config: JobConfig, path: str, folder: Path) -> None:
    """Now, and not when the first file is written, which may be hours later. Makes nothing."""
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    except OSError as error:  # e.g. a name that is too long
        raise refusal(config, path, f"cannot be used ({error.strerror}): choose another folder") from None
    if not there.is_dir():
        what = "is" if there == folder.absolute() else f"lies below {there}, which is"
        raise refusal(config, path, f"{what} a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise refusal(config, path, f"{there} cannot be written to: choose another folder")
