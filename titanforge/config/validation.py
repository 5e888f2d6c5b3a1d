"""Checks across sections, made before any process group exists and any device memory is touched.

``validate_config`` raises ``ConfigError`` at the first setting that cannot run,
naming the key, its value and the way out, and returns warnings about settings
that have no effect in the chosen mode.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path

from titanforge.config import schema
from titanforge.config.bounds import check_bounds
from titanforge.config.effectless import effectless_settings
from titanforge.config.ranks import check_ranks
from titanforge.config.rules import MATRIX_RULES, RULE_KEYS, rule_name
from titanforge.config.schema import ConfigError, refusal, show
from titanforge.config.sections import JobConfig

DATASETS_WITH_PATH = ("text", "jsonl", "parquet")
HUB_DATASETS = ("c4", "c4_validation", "fineweb", "fineweb-edu", "openwebtext")
DATASETS = ("python_stdlib", *DATASETS_WITH_PATH, "huggingface", *HUB_DATASETS)
TORCH_OPTIM_RULES = ("adamw", "adam", "sgd")
CHECKPOINT_PARTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
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
    data_parallel = check_ranks(config, world_size)
    _check_batch(config, data_parallel)
    _check_optimizer(config)
    _check_dobb(config)
    warnings += _check_schedule(config)
    _check_forge(config, world_size, device_type)
    _check_cuda_graph(config, world_size, device_type)
    _check_sync(config)
    _check_data(config)
    _check_validation(config)
    warnings += _check_checkpoint(config, world_size)
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


def _check_rules(config: JobConfig) -> None:
    for path in ("optimizer.name", "optimizer.scalar.name"):
        name = rule_name(schema.get_value(config, path))
        if name not in RULE_KEYS:
            word = schema.nearest(name, RULE_KEYS)
            hint = f"; did you mean {show(word)}?" if word else ""
            raise refusal(config, path, f"must be one of {', '.join(sorted(RULE_KEYS))}{hint}")
    if rule_name(config.optimizer.scalar.name) in MATRIX_RULES:
        raise refusal(config, "optimizer.scalar.name", "takes matrices alone: use AdamW, Lion or the like")
    name = rule_name(config.optimizer.name)
    if len(config.optimizer.muon.coefficients) != 3:
        raise refusal(config, "optimizer.muon.coefficients", "must be three numbers: a, b, c")
    scale = config.optimizer.update_scale
    if (scale == "rank_corrected" and name != "dion") or (scale == "own" and name == "dobb"):
        raise refusal(
            config, "optimizer.update_scale", f'{name} has no such scale: take "shared", tau sqrt(max(m, n))'
        )
    if name == "dion" and config.optimizer.dion.rank_fraction == 0:
        raise refusal(config, "optimizer.dion.rank_fraction", "must be more than 0, at most 1")
    if config.optimizer.nesterov and "nesterov" not in RULE_KEYS[rule_name(config.optimizer.name)]:
        with_it = ", ".join(rule for rule, keys in RULE_KEYS.items() if "nesterov" in keys)
        raise refusal(
            config,
            "optimizer.nesterov",
            f"optimizer.name = {show(config.optimizer.name)} has no Nesterov form (these have: {with_it})",
        )


def _check_optimizer(config: JobConfig) -> None:
    optimizer, training = config.optimizer, config.training
    _check_rules(config)
    native = optimizer.implementation == "native"
    if optimizer.master_weights != "none":
        if training.dtype != "bfloat16":
            raise refusal(
                config,
                "optimizer.master_weights",
                f'needs training.dtype = "bfloat16", not {show(training.dtype)}: float32 weights are their'
                ' own masters, so set it to "none"',
            )
        if not native:
            raise refusal(
                config,
                "optimizer.master_weights",
                f'needs optimizer.implementation = "native", not {show(optimizer.implementation)}',
            )
    if not native:
        if rule_name(optimizer.name) not in TORCH_OPTIM_RULES:
            raise refusal(
                config,
                "optimizer.implementation",
                f"torch.optim has AdamW, Adam and SGD here, not optimizer.name = {show(optimizer.name)}: use"
                ' "native"',
            )
        if optimizer.state_dtype not in ("float32", training.dtype):
            raise refusal(
                config,
                "optimizer.state_dtype",
                f'needs optimizer.implementation = "native", not {show(optimizer.implementation)}:'
                " torch.optim keeps states in the weights' dtype",
            )
    for i, group in enumerate(optimizer.param_groups):
        path = f"optimizer.param_groups[{i}].pattern = {show(group.pattern)}"
        if not group.pattern:
            raise ConfigError(f'{path}: is empty: give a regular expression, e.g. "norm"')
        try:
            re.compile(group.pattern)
        except re.error as error:
            raise ConfigError(f"{path}: is not a regular expression: {error}") from None


def _check_dobb(config: JobConfig) -> None:
    """What Dobb does not work with; whether blocks fit shards is the model's to say."""
    if rule_name(config.optimizer.name) != "dobb" or config.optimizer.dobb.source == "gradient":
        return
    if config.parallelism.pipeline_parallel_degree > 1:
        raise refusal(
            config,
            "parallelism.pipeline_parallel_degree",
            "Dobb captures whole micro-batches, one after the other: set it to 1, or take"
            ' optimizer.dobb.source = "gradient"',
        )
    if config.training.enable_cpu_offload:
        raise refusal(
            config,
            "training.enable_cpu_offload",
            "Dobb captures on the GPU what it keeps beside the weights: set it to false, or take"
            ' optimizer.dobb.source = "gradient"',
        )
    if config.optimizer.dobb.side == "G" and config.compile.enable and "model" in config.compile.components:
        raise refusal(
            config,
            "optimizer.dobb.side",
            "output gradients are captured by hooks that compiled blocks do not have: set compile.enable ="
            ' false, or take "A"',
        )


def _check_schedule(config: JobConfig) -> list[str]:
    schedule, steps = config.lr_scheduler, config.training.steps
    warnings = []
    if schedule.total_steps is not None and schedule.warmup_steps > schedule.total_steps:
        raise refusal(
            config,
            "lr_scheduler.warmup_steps",
            f"is longer than the schedule, lr_scheduler.total_steps = {schedule.total_steps}: shorten it",
        )
    total = schedule.total_steps or steps
    if schedule.warmup_steps >= total:
        warnings.append(
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps}: the run, {total} steps, is all warm-up and"
            " ends before the learning rate decays"
        )
    elif schedule.decay_ratio is not None and schedule.warmup_steps + schedule.decay_ratio * total > total:
        warnings.append(
            f"lr_scheduler.decay_ratio = {schedule.decay_ratio}: warm-up ({schedule.warmup_steps} steps) and"
            f" decay ({round(schedule.decay_ratio * total)}) are longer than the schedule ({total}): the"
            " decay starts right after warm-up"
        )
    if total < steps:
        warnings.append(
            f"lr_scheduler.total_steps = {total}: less than training.steps = {steps}: the last"
            f" {steps - total} steps run at the schedule's floor"
        )
    return warnings


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
    elif rule == "dobb":
        reason = (
            'optimizer.name = "dobb" refreshes its bases at some steps, and a captured step never changes'
        )
    elif rule == "dion":
        reason = 'optimizer.name = "dion" factorises matrices with routines that may wait for the device'
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


def _matches(pattern: str) -> Iterable[Path]:
    """Files that a file, folder or glob stands for (a folder: everything below it)."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return (found for found in path.rglob("*") if found.is_file())
    found = glob.glob(str(path), recursive=True)
    return [Path(name) for name in found if Path(name).is_file()]


def _check_dataset(dataset: str, path: str | None, dataset_key: str, path_key: str) -> None:
    of_dataset, of_path = f"{dataset_key} = {show(dataset)}", f"{path_key} = {show(path)}"
    if dataset not in DATASETS:
        word = schema.nearest(dataset, DATASETS)
        hint = f"did you mean {show(word)}?" if word else 'others by "huggingface" and their id as the path'
        if dataset == "c4_test":
            hint = 'c4_test is torchtitan\'s own test file: read it as "jsonl", or use "python_stdlib"'
        raise ConfigError(f"{of_dataset}: must be one of {', '.join(DATASETS)}; {hint}")
    if dataset == "python_stdlib":
        if path is not None:
            raise ConfigError(f"{of_path}: {of_dataset} brings its own files: unset it")
        return
    if not path:
        if dataset in HUB_DATASETS:
            return
        what = "a folder or hub id" if dataset == "huggingface" else "a file, folder or glob"
        raise ConfigError(f"{of_path}: {of_dataset} needs the path of {what} here")
    if dataset in DATASETS_WITH_PATH:
        if next(iter(_matches(path)), None) is None:
            raise ConfigError(
                f"{of_path}: no such file, and no match as a folder or glob (from {Path.cwd()})"
            )
    elif not Path(path).expanduser().is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", path):
        raise ConfigError(
            f"{of_path}: no such folder (from {Path.cwd()}), and no hub id (owner/name@revision)"
        )


def _check_sources(config: JobConfig) -> None:
    """The mix of `[[data.sources]]`, or the one dataset of `[training]`."""
    training, sources = config.training, config.data.sources
    if not sources:
        _check_dataset(training.dataset, training.dataset_path, "training.dataset", "training.dataset_path")
        return
    for path in ("training.dataset", "training.dataset_path", "data.subset", "data.split"):
        if schema.get_value(config, path) != schema.all_keys()[path].default:
            raise refusal(config, path, "[[data.sources]] names what to train on: keep one of the two")
    for i, source in enumerate(sources):
        key = f"data.sources[{i}]"
        _check_dataset(source.dataset, source.path, f"{key}.dataset", f"{key}.path")
        if source.weight <= 0:
            raise ConfigError(f"{key}.weight = {source.weight}: must be above 0 (leave the source out)")


def _check_data(config: JobConfig) -> None:
    _check_sources(config)
    assets, tokenizer = config.model.hf_assets_path, config.data.tokenizer
    if tokenizer == "auto" and assets and not Path(assets).expanduser().is_dir():
        raise refusal(
            config, "model.hf_assets_path", 'no such folder: correct it, or set data.tokenizer = "byte"'
        )
    if tokenizer.startswith("package:"):  # a file inside an installed Python package; found when it is read
        return
    if tokenizer not in ("auto", "byte") and not Path(tokenizer).expanduser().exists():
        raise refusal(
            config,
            "data.tokenizer",
            'must be "auto", "byte", the path of a tokenizer file, or package:NAME/PATH; no such file',
        )


def _check_validation(config: JobConfig) -> None:
    validation = config.validation
    if not validation.enable:
        return
    if "" in validation.sample_prompts:
        raise refusal(
            config, "validation.sample_prompts", "an empty prompt gives nothing to continue: leave it out"
        )
    if validation.dataset is not None:
        _check_dataset(
            validation.dataset, validation.dataset_path, "validation.dataset", "validation.dataset_path"
        )
    elif validation.dataset_path is not None:
        raise refusal(
            config, "validation.dataset_path", f"needs validation.dataset, one of {', '.join(DATASETS)}"
        )
    elif config.data.validation_fraction == 0:
        raise refusal(
            config,
            "data.validation_fraction",
            "validation.enable = true has nothing to evaluate on: hold out a share of the documents"
            " (e.g. 0.02), or set validation.dataset",
        )


def _check_checkpoint(config: JobConfig, world_size: int) -> list[str]:
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        # Training silently from random weights would be the worst reading of these three.
        for path in (
            "checkpoint.initial_load_path",
            "checkpoint.initial_load_in_hf",
            "checkpoint.create_seed_checkpoint",
            "checkpoint.load_only",
        ):
            if schema.get_value(config, path):
                raise refusal(config, path, "needs checkpoint.enable = true")
        if checkpoint.load_step != -1:
            raise refusal(config, "checkpoint.load_step", "needs checkpoint.enable = true")
        return []
    if checkpoint.keep_latest_k == 1:
        raise refusal(
            config,
            "checkpoint.keep_latest_k",
            "a crash during a save would leave no checkpoint: keep at least 2, or 0 for all",
        )
    for part in checkpoint.exclude_from_loading:
        if part not in CHECKPOINT_PARTS:
            word = schema.nearest(part, CHECKPOINT_PARTS)
            hint = f"; did you mean {show(word)}?" if word else ""
            raise refusal(
                config,
                "checkpoint.exclude_from_loading",
                f"{show(part)} is not one of {', '.join(CHECKPOINT_PARTS)}{hint}",
            )
    if checkpoint.initial_load_path and not Path(checkpoint.initial_load_path).expanduser().is_dir():
        raise refusal(config, "checkpoint.initial_load_path", "no such folder")
    _check_hugging_face(config)
    if checkpoint.create_seed_checkpoint and world_size != 1:
        raise refusal(
            config,
            "checkpoint.create_seed_checkpoint",
            f"is made by one process, not {world_size}: start it with torchrun --nproc_per_node=1",
        )
    if checkpoint.create_seed_checkpoint and checkpoint.load_only:
        raise refusal(config, "checkpoint.load_only", "contradicts checkpoint.create_seed_checkpoint = true")
    if checkpoint.last_save_model_only:
        return [
            "checkpoint.last_save_model_only = true: the last checkpoint holds weights alone, for no resume"
        ]
    return []


def _check_hugging_face(config: JobConfig) -> None:
    checkpoint, model = config.checkpoint, config.model
    if checkpoint.initial_load_in_hf:
        if not (checkpoint.initial_load_path or model.hf_assets_path):
            raise refusal(
                config,
                "checkpoint.initial_load_in_hf",
                "needs the model's folder: set checkpoint.initial_load_path or model.hf_assets_path",
            )
        if not checkpoint.initial_load_model_only:
            raise refusal(
                config,
                "checkpoint.initial_load_model_only",
                "checkpoint.initial_load_in_hf = true finds weights alone: set it to true",
            )
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        raise refusal(
            config,
            "checkpoint.last_save_in_hf",
            "holds weights alone: set checkpoint.last_save_model_only = true as well",
        )
    if checkpoint.last_save_in_hf and model.moe_balancing == "bias":
        raise refusal(
            config,
            "model.moe_balancing",
            "Hugging Face's model has no bias on the choice of experts (checkpoint.last_save_in_hf = true):"
            ' use "auxiliary_loss"',
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
