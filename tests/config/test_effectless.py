"""Settings that nothing reads are named, with the reason."""

from __future__ import annotations

import pytest

from tests.config.jobs import validate
from titanforge.config import schema
from titanforge.config.effectless import DEPENDENCES

REPLICAS = "--parallelism.data_parallel_replicate_degree=2"


@pytest.mark.parametrize(
    "argv, path",
    [
        (["--checkpoint.interval=5"], "checkpoint.interval"),
        (["--checkpoint.enable", "--checkpoint.export_dtype=bfloat16"], "checkpoint.export_dtype"),
        (
            ["--checkpoint.enable", "--checkpoint.initial_load_model_only=false"],
            "checkpoint.initial_load_model_only",
        ),
        (["--forge.kernel=x"], "forge.kernel"),
        (["--forge.enable", "--training.max_norm=0", "--forge.clip=lagged"], "forge.clip"),
        (["--sync.bucket_mib=1"], "sync.bucket_mib"),
        (["--parallelism.context_parallel_method=ulysses"], "parallelism.context_parallel_method"),
        (
            ["--parallelism.data_parallel_shard_degree=1", "--parallelism.fsdp_reshard_after_forward=never"],
            "parallelism.fsdp_reshard_after_forward",
        ),
        (["--optimizer.scalar.lr=1"], "optimizer.scalar.lr"),
        (
            ["--optimizer.name=Muon", "--optimizer.scalar.name=Lion", "--optimizer.scalar.eps=1"],
            "optimizer.scalar.eps",
        ),
        (["--optimizer.momentum=0.8"], "optimizer.momentum"),
        (["--optimizer.name=SGD", "--optimizer.beta2=0.9"], "optimizer.beta2"),
        (["--optimizer.name=lion", "--optimizer.eps=1"], "optimizer.eps"),
        (
            ["--training.dtype=bfloat16", "--training.mixed_precision_param=float32"],
            "training.mixed_precision_param",
        ),
        (["--training.dataloader.prefetch_factor=3"], "training.dataloader.prefetch_factor"),
        (["--training.dataloader.persistent_workers"], "training.dataloader.persistent_workers"),
        (["--data.text_key=x"], "data.text_key"),
        (
            ["--activation_checkpoint.mode=full", "--activation_checkpoint.selective_ac_option=2"],
            "activation_checkpoint.selective_ac_option",
        ),
        (
            ["--activation_checkpoint.mode=none", "--activation_checkpoint.preserve_rng_state=false"],
            "activation_checkpoint.preserve_rng_state",
        ),
        (["--activation_checkpoint.memory_budget=0.7"], "activation_checkpoint.memory_budget"),
        (["--compile.backend=eager"], "compile.backend"),
        (["--validation.freq=5"], "validation.freq"),
        (["--validation.enable", "--validation.sample_tokens=5"], "validation.sample_tokens"),
        (["--profiling.profiler_active=2"], "profiling.profiler_active"),
        (["--debug.deterministic_warn_only"], "debug.deterministic_warn_only"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_without_effect_warns_by_name(argv, path):
    (warning,) = validate(*argv)
    assert warning.startswith(f"{path} = ") and " has no effect: " in warning


@pytest.mark.parametrize("key", ["training.dataloader.pin_memory", "training.enable_cpu_offload"])
def test_gpu_settings_warn_on_cpu_alone(key):
    (warning,) = validate(f"--{key}", device="cpu")
    assert warning == f"{key} = true has no effect: the run is on CPU"
    assert validate(f"--{key}", device="cuda") == []


def test_low_rank_needs_a_rank_below_the_full_one():
    dion = [REPLICAS, "--optimizer.name=Dion", "--sync.policy=scheduled", "--sync.low_rank=false"]
    (warning,) = validate(*dion, world_size=2)
    assert warning.startswith("sync.low_rank = false has no effect: at optimizer.dion.rank_fraction = 1 ")
    assert validate(*dion, "--optimizer.dion.rank_fraction=0.25", world_size=2) == []


def test_one_line_per_reason():
    (warning,) = validate("--validation.freq=5", "--validation.steps=2")
    assert warning == "validation.freq = 5, validation.steps = 2 have no effect: validation.enable is false"


def test_a_matrix_rule_reads_its_companion_and_momentum():
    assert validate("--optimizer.name=Muon", "--optimizer.scalar.lr=1", "--optimizer.momentum=0.8") == []


def test_the_table_names_existing_keys():
    paths = schema.all_keys()
    for dependence in DEPENDENCES:
        for name in dependence.keys:
            assert name in paths or (name.endswith(".") and any(path.startswith(name) for path in paths)), (
                name
            )


@pytest.mark.parametrize(
    "arguments, key",
    [
        (["--sync.policy=rmmc", "--sync.interval=3"], "sync.interval"),
        (["--sync.policy=scheduled", "--sync.threshold=0.1"], "sync.threshold"),
        (["--sync.policy=scheduled", "--sync.reduce=states"], "sync.reduce"),
        (["--sync.max_interval=3"], "sync.max_interval"),
    ],
)
def test_keys_that_a_policy_does_not_read_are_named(arguments, key):
    (warning,) = validate(REPLICAS, *arguments, world_size=2)
    assert warning.startswith(key)
