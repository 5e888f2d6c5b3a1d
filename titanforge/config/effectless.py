"""Settings that were changed but have no effect in the chosen mode.

One table says on what each key depends; whoever sets a key to something other
than its default while that condition is false is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from titanforge.config import schema
from titanforge.config.rules import MATRIX_RULES, RULE_KEYS, rule_name
from titanforge.config.sections import JobConfig


class Dependence(NamedTuple):
    """Keys (exact, or a section ending in a dot), when they count, and what to say when they do not."""

    keys: tuple[str, ...]
    counts: Callable[[JobConfig, str], bool]
    reason: str


_NOT_THIS_POLICY = "this sync.policy does not read it"
_STAGES = (
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
)
_FILE_DATASETS = {"python_stdlib", "text", "jsonl", "parquet"}


def _datasets(config: JobConfig) -> set[str]:
    """Every dataset that the run reads."""
    sources = {source.dataset for source in config.data.sources}
    return (sources or {config.training.dataset}) | ({config.validation.dataset or "text"})


DEPENDENCES = (
    Dependence(
        ("checkpoint.",),
        lambda config, device: config.checkpoint.enable,
        "checkpoint.enable is false",
    ),
    Dependence(
        ("checkpoint.export_dtype",),
        lambda config, device: config.checkpoint.last_save_model_only,
        "checkpoint.last_save_model_only is false",
    ),
    Dependence(
        ("checkpoint.initial_load_model_only",),
        lambda config, device: bool(
            config.checkpoint.initial_load_path is not None or config.checkpoint.initial_load_in_hf
        ),
        "checkpoint.initial_load_path is unset",
    ),
    Dependence(("forge.",), lambda config, device: config.forge.enable, "forge.enable is false"),
    Dependence(
        ("forge.clip",),
        lambda config, device: config.training.max_norm > 0,
        "training.max_norm is 0",
    ),
    Dependence(
        ("sync.",),
        lambda config, device: config.parallelism.data_parallel_replicate_degree > 1,
        "there is one replica (parallelism.data_parallel_replicate_degree = 1)",
    ),
    Dependence(
        ("sync.interval",), lambda config, device: config.sync.policy == "scheduled", _NOT_THIS_POLICY
    ),
    Dependence(("sync.threshold",), lambda config, device: config.sync.policy == "rmmc", _NOT_THIS_POLICY),
    Dependence(("sync.reduce",), lambda config, device: config.sync.policy == "every_step", _NOT_THIS_POLICY),
    Dependence(
        (
            "sync.local_update",
            "sync.local_lr",
            "sync.warmup_steps",
            "sync.max_interval",
            "sync.average_parameters",
        ),
        lambda config, device: config.sync.policy != "every_step",
        "sync.policy is every_step: there are no local steps",
    ),
    Dependence(
        (
            "parallelism.pipeline_parallel_schedule",
            "parallelism.pipeline_parallel_microbatch_size",
            *_STAGES,
            "parallelism.module_fqns_per_model_part",
        ),
        lambda config, device: config.parallelism.pipeline_parallel_degree > 1,
        "parallelism.pipeline_parallel_degree is 1",
    ),
    Dependence(
        _STAGES,
        lambda config, device: config.parallelism.module_fqns_per_model_part is None,
        "parallelism.module_fqns_per_model_part names the stages",
    ),
    Dependence(
        ("sync.low_rank",),
        lambda config, device: (
            rule_name(config.optimizer.name) == "dion"
            and (config.sync.policy != "every_step" or config.sync.reduce == "states")
        ),
        "no momentum is averaged by its factors: that is Dion's, under policies that average states",
    ),
    Dependence(
        ("sync.low_rank",),
        lambda config, device: (
            rule_name(config.optimizer.name) != "dion" or config.optimizer.dion.rank_fraction < 1
        ),
        "at optimizer.dion.rank_fraction = 1 factors are no smaller than the momentum, which is averaged",
    ),
    Dependence(
        ("parallelism.context_parallel_method",),
        lambda config, device: config.parallelism.context_parallel_degree > 1,
        "parallelism.context_parallel_degree is 1",
    ),
    Dependence(
        ("parallelism.fsdp_reshard_after_forward",),
        lambda config, device: (
            config.parallelism.data_parallel_shard_degree != 1
            or config.parallelism.context_parallel_degree > 1
        ),
        "parallelism.data_parallel_shard_degree is 1",
    ),
    Dependence(
        ("optimizer.scalar.",),
        lambda config, device: rule_name(config.optimizer.name) in MATRIX_RULES,
        "optimizer.name is not a matrix rule and takes every weight",
    ),
    Dependence(
        ("optimizer.update_scale", "optimizer.update_scale_tau", "optimizer.per_head"),
        lambda config, device: rule_name(config.optimizer.name) in MATRIX_RULES,
        "optimizer.name is not a matrix rule",
    ),
    *(
        Dependence(
            (f"optimizer.{section}.",),
            lambda config, device, rules=rules: rule_name(config.optimizer.name) in rules,
            f"optimizer.name is not {' or '.join(rules)}",
        )
        for section, rules in (("muon", ("muon", "scion")), ("dion", ("dion",)), ("dobb", ("dobb",)))
    ),
    Dependence(
        ("optimizer.dobb.capture",),
        lambda config, device: config.optimizer.dobb.source == "activation",
        'optimizer.dobb.source = "gradient" captures nothing',
    ),
    *(
        Dependence(
            (f"optimizer.{key}",),
            # bound now: the lambda runs when the loop is long over
            lambda config, device, key=key: key in RULE_KEYS[rule_name(config.optimizer.name)],
            f"this optimizer.name does not read {key}",
        )
        for key in ("momentum", "beta1", "beta2", "eps")
    ),
    *(
        Dependence(
            (f"optimizer.scalar.{key}",),
            lambda config, device, key=key: key in RULE_KEYS[rule_name(config.optimizer.scalar.name)],
            f"this optimizer.scalar.name does not read {key}",
        )
        for key in ("beta1", "beta2", "eps")
    ),
    Dependence(
        ("training.mixed_precision_param",),
        lambda config, device: config.training.dtype == "float32",
        "weights are stored in bfloat16 (training.dtype), and so is the computation",
    ),
    Dependence(
        ("training.dataloader.prefetch_factor", "training.dataloader.persistent_workers"),
        lambda config, device: config.training.dataloader.num_workers > 0,
        "training.dataloader.num_workers is 0",
    ),
    Dependence(
        ("training.dataloader.pin_memory", "training.enable_cpu_offload", "profiling.enable_memory_snapshot"),
        lambda config, device: device != "cpu",
        "the run is on CPU",
    ),
    Dependence(
        ("data.text_key",),
        lambda config, device: bool(_datasets(config) - {"python_stdlib", "text"}),
        "no dataset has records with fields",
    ),
    Dependence(
        ("data.subset", "data.split"),
        lambda config, device: config.training.dataset not in _FILE_DATASETS,
        "training.dataset is no Hugging Face dataset",
    ),
    Dependence(
        ("data.shuffle_window",),
        lambda config, device: config.data.shuffle and bool(_datasets(config) - _FILE_DATASETS),
        "nothing is shuffled in a stream: no Hugging Face dataset, or data.shuffle = false",
    ),
    Dependence(
        ("validation.subset", "validation.split"),
        lambda config, device: config.validation.dataset not in {None, *_FILE_DATASETS},
        "validation.dataset is no Hugging Face dataset",
    ),
    Dependence(
        ("activation_checkpoint.selective_ac_option",),
        lambda config, device: config.activation_checkpoint.mode == "selective",
        "activation_checkpoint.mode is not selective",
    ),
    Dependence(
        ("activation_checkpoint.preserve_rng_state",),
        lambda config, device: config.activation_checkpoint.mode in ("selective", "full"),
        "activation_checkpoint.mode is neither selective nor full",
    ),
    Dependence(
        ("activation_checkpoint.memory_budget",),
        lambda config, device: config.activation_checkpoint.mode == "memory_budget",
        "activation_checkpoint.mode is not memory_budget",
    ),
    Dependence(
        ("compile.components", "compile.backend"),
        lambda config, device: config.compile.enable,
        "compile.enable is false",
    ),
    Dependence(
        ("validation.",), lambda config, device: config.validation.enable, "validation.enable is false"
    ),
    Dependence(
        ("validation.sample_tokens", "validation.sample_temperature"),
        lambda config, device: bool(config.validation.sample_prompts),
        "validation.sample_prompts is empty",
    ),
    Dependence(
        ("profiling.profiler_active", "profiling.profiler_warmup"),
        lambda config, device: config.profiling.enable_profiling,
        "profiling.enable_profiling is false",
    ),
    Dependence(
        ("debug.deterministic_warn_only",),
        lambda config, device: config.debug.deterministic,
        "debug.deterministic is false",
    ),
)


def effectless_settings(config: JobConfig, device_type: str) -> list[str]:
    """One line per reason, naming each key that differs from its default and cannot matter in this mode."""
    reasons: dict[str, str] = {}
    for dependence in DEPENDENCES:
        if dependence.counts(config, device_type):
            continue
        for path, key in schema.all_keys().items():
            named = any(
                path == name or (name.endswith(".") and path.startswith(name)) for name in dependence.keys
            )
            if named and schema.get_value(config, path) != key.default:
                reasons.setdefault(path, dependence.reason)
    settings: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        settings.setdefault(reason, []).append(f"{path} = {schema.show(schema.get_value(config, path))}")
    return [
        f"{', '.join(written)} {'has' if len(written) == 1 else 'have'} no effect: {reason}"
        for reason, written in settings.items()
    ]
