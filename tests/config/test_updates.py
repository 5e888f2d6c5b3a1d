"""What update rules, engines, sync policies and captured steps do not take."""

from __future__ import annotations

import pytest

from tests.config.jobs import refusal_of, validate
from titanforge.config import ConfigError, load_config
from titanforge.layout import build_dims, check_model

REPLICAS = "--parallelism.data_parallel_replicate_degree=2"


def test_master_weights_need_bfloat16_storage_and_native_rules():
    for kind in ("float32", "stochastic_rounding"):
        message = refusal_of(f"--optimizer.master_weights={kind}")
        assert message.startswith(f'optimizer.master_weights = "{kind}": needs training.dtype = "bfloat16"')
        argv = (f"--optimizer.master_weights={kind}", "--training.dtype=bfloat16")
        assert validate(*argv) == []
        message = refusal_of(*argv, "--optimizer.implementation=fused")
        assert 'needs optimizer.implementation = "native", not "fused"' in message


def test_torch_optim_takes_its_own_rules_and_float32_states_alone():
    for implementation in ("fused", "foreach", "for-loop"):
        argv = ("--optimizer.implementation", implementation)
        for name in ("AdamW", "adam", "SGD"):
            assert validate(*argv, "--optimizer.name", name) == []
        message = refusal_of(*argv, "--optimizer.name", "Lion")
        assert message.startswith(f'optimizer.implementation = "{implementation}": ') and '"Lion"' in message
        message = refusal_of(*argv, "--optimizer.state_dtype", "bfloat16")
        assert message.startswith(
            'optimizer.state_dtype = "bfloat16": needs optimizer.implementation = "native"'
        )
        both = ("--optimizer.state_dtype=bfloat16", "--training.dtype=bfloat16")
        assert validate(*argv, *both) == []


def test_patterns_must_be_regular_expressions():
    message = refusal_of("--optimizer.param_groups", '[{pattern = "("}]')
    assert message.startswith('optimizer.param_groups[0].pattern = "(": is not a regular expression')
    assert "is empty" in refusal_of("--optimizer.param_groups", "[{lr = 1.0}]")


def test_fused_weights_and_exact_clipping_exclude_each_other():
    message = refusal_of("--forge.enable")
    assert message.startswith("training.max_norm = 1.0: ")
    for choice in ('forge.clip = "lagged"', "training.max_norm = 0", "forge.enable = false"):
        assert choice in message
    assert validate("--forge.enable", "--forge.clip=lagged") == []
    assert validate("--forge.enable", "--training.max_norm=0") == []
    hopper = ("--forge.enable", "--training.max_norm=0", "--forge.kernel=pp2")
    assert validate(*hopper) == []
    assert refusal_of(*hopper, device="cpu").startswith('forge.kernel = "pp2": runs on NVIDIA Hopper GPUs')
    lagged = ("--forge.enable", "--forge.clip=lagged")
    message = refusal_of(*lagged, "--optimizer.implementation=fused")
    assert message.startswith('optimizer.implementation = "fused": forge.enable = true')
    assert refusal_of(*lagged, "--training.enable_cpu_offload").startswith(
        "training.enable_cpu_offload = true: "
    )


def test_what_dobb_and_matrix_rules_do_not_take():
    dobb = "--optimizer.name=Dobb"
    assert validate(dobb, "--parallelism.data_parallel_replicate_degree=2", world_size=2) == []
    assert validate(dobb, world_size=2) == []
    offload = refusal_of(dobb, "--training.enable_cpu_offload", world_size=2)
    assert offload.startswith("training.enable_cpu_offload = true")
    assert "optimizer.dobb.blocks = 0" in refusal_of(dobb, "--optimizer.dobb.blocks=0")
    assert "optimizer.update_scale" in refusal_of(dobb, "--optimizer.update_scale=own")
    assert "optimizer.update_scale" in refusal_of(
        "--optimizer.name=muon", "--optimizer.update_scale=rank_corrected"
    )
    assert "more than 0" in refusal_of("--optimizer.name=dion", "--optimizer.dion.rank_fraction=0")
    assert "three numbers" in refusal_of("--optimizer.name=muon", "--optimizer.muon.coefficients=[1.0]")


def test_rules_are_checked_by_name():
    message = refusal_of("--optimizer.name=AdamWW")
    assert message.startswith('optimizer.name = "AdamWW": must be one of adafactor,')
    assert message.endswith('did you mean "adamw"?')
    assert refusal_of("--optimizer.scalar.name=zzz").startswith(
        'optimizer.scalar.name = "zzz": must be one of'
    )
    message = refusal_of("--optimizer.name=muon", "--optimizer.scalar.name=Muon")
    assert message == 'optimizer.scalar.name = "Muon": takes matrices alone: use AdamW, Lion or the like'
    assert refusal_of("--optimizer.nesterov") == (
        'optimizer.nesterov = true: optimizer.name = "AdamW" has no Nesterov form '
        "(these have: dobb, muon, rmnp, sgd)"
    )
    assert (
        validate("--optimizer.name=adam-mini")
        == validate("--optimizer.name=SGD", "--optimizer.nesterov")
        == []
    )


def test_policies_that_average_need_a_step_in_halves_and_plain_states():
    rmmc = (REPLICAS, "--sync.policy=rmmc")
    assert validate(*rmmc, world_size=2) == []
    for argument in ("--optimizer.implementation=fused", "--optimizer.state_dtype=int8"):
        assert refusal_of(*rmmc, argument, world_size=2).startswith('sync.policy = "rmmc": ')
    message = refusal_of(REPLICAS, "--sync.reduce=states", "--optimizer.state_dtype=int8", world_size=2)
    assert message.startswith('sync.reduce = "states": ') and 'sync.reduce = "gradients"' in message
    assert refusal_of("--sync.interval=0").startswith("sync.interval = 0: must be at least 1")
    assert "finite" in refusal_of("--sync.threshold=inf")


@pytest.mark.parametrize("rule", ["AdamW", "SGD", "Muon", "Dion"])
def test_codes_are_for_what_is_formed_anew(rule):
    codes = (REPLICAS, "--sync.exchange_dtype=int4", f"--optimizer.name={rule}")
    assert validate(*codes, world_size=2) == []  # gradients
    for policy in ("--sync.reduce=states", "--sync.policy=scheduled", "--sync.policy=rmmc"):
        if rule == "SGD" or (rule == "AdamW" and "rmmc" in policy):
            message = refusal_of(*codes, policy, world_size=2)
            assert message.startswith('sync.exchange_dtype = "int4": ') and '"float32"' in message
        else:  # gradients of AdamW, or Dion's factors
            assert validate(*codes, policy, world_size=2) == []
        if rule in ("Muon", "Dion"):
            alone = (*codes, policy, "--optimizer.scalar.name=SGD")
            assert "sync.exchange_dtype" in refusal_of(*alone, world_size=2)


@pytest.mark.parametrize("policy", ["--sync.reduce=states", "--sync.policy=scheduled", "--sync.policy=rmmc"])
def test_codes_are_for_factors_where_there_are_any(policy):
    alone = (REPLICAS, "--sync.exchange_dtype=int4", "--optimizer.name=Dion", "--optimizer.scalar.name=SGD")
    below = (*alone, policy, "--optimizer.dion.rank_fraction=0.25")
    assert validate(*below, world_size=2) == []
    assert "sync.exchange_dtype" in refusal_of(*below, "--sync.low_rank=false", world_size=2)
    # Shards leave experts whole, and which weights these are is known of the model.
    assert validate(*below, "--parallelism.data_parallel_shard_degree=2", world_size=4) == []


@pytest.mark.parametrize(
    "arguments, where, reason",
    [
        ([], {"device": "cpu"}, "no CUDA device"),
        ([], {"world_size": 2}, "2 were started"),
        (["--optimizer.implementation=fused"], {}, 'optimizer.implementation = "fused"'),
        (["--optimizer.name=Dobb", "--optimizer.dobb.period=1"], {}, "dobb.period = 1"),
        (["--training.enable_cpu_offload"], {}, "training.enable_cpu_offload"),
    ],
)
def test_what_a_captured_step_does_not_take(arguments, where, reason):
    captured = "--compile.cuda_graph"
    assert validate(captured) == validate(captured, "--job.dry_run", device="cpu") == []
    for name in ("Dion", "Dobb"):
        assert validate(captured, f"--optimizer.name={name}") == []
    message = refusal_of(captured, *arguments, **where)
    assert message.startswith("compile.cuda_graph = true: ") and reason in message
    assert message.endswith("set compile.cuda_graph = false")


def test_experts_in_float32_are_not_captured():
    model = ["--model.name=qwen3", "--model.flavor=debugmodel_moe", "--compile.cuda_graph"]
    check_model(load_config(model), build_dims(load_config(model), 1))
    wide = load_config([*model, "--training.mixed_precision_param=float32"])
    with pytest.raises(ConfigError, match=r"compile\.cuda_graph = true: experts"):
        check_model(wide, build_dims(wide, 1))
