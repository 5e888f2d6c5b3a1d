from __future__ import annotations

import os
from pathlib import Path

import pytest

from titanforge.checkpoint import manager
from titanforge.config import ConfigError, load_config, schema, validate_config
from titanforge.config.bounds import BOUNDS
from titanforge.config.checkpoints import CHECKPOINT_PARTS
from titanforge.config.datasets import DATASETS
from titanforge.config.effectless import DEPENDENCES
from titanforge.config.ranks import COORDINATE_RULES
from titanforge.config.rules import MATRIX_RULES, RULE_KEYS
from titanforge.config.updates import TORCH_OPTIM_RULES
from titanforge.config.validation import FORGE_KERNELS
from titanforge.data import sources
from titanforge.kernels.forms import AUTO, FORMS
from titanforge.layout import build_dims, check_model
from titanforge.optim.baseline import BASELINE_RULES
from titanforge.optim.registry import NESTEROV_RULES, RULES, build_rule

REPOSITORY = Path(__file__).parent.parent.parent
JOB_FILES = sorted((REPOSITORY / "train_configs").glob("*.toml"))


def validate(*argv: str, world_size: int = 1, device: str = "cuda") -> list[str]:
    return validate_config(load_config(list(argv)), world_size, device)


def refusal_of(*argv: str, world_size: int = 1, device: str = "cuda") -> str:
    with pytest.raises(ConfigError) as caught:
        validate(*argv, world_size=world_size, device=device)
    message = str(caught.value)
    assert "\n" not in message, "an error must be one line"
    return message


@pytest.mark.parametrize("file", JOB_FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("world_size, device", [(1, "cpu"), (64, "cuda")])
def test_shipped_job_files_are_valid_and_quiet(file, world_size, device):
    if file.stem.startswith("debug_sync"):
        world_size = max(world_size, 2)  # they are about two replicas
    if file.stem.endswith("_pp"):
        world_size = 2 if file.stem.startswith("debug") else 64
    if "forge" in file.stem:
        world_size = 1  # they are about one GPU
        if "cuda_graph = true" in file.read_text():
            device = "cuda"
    assert validate("--job.config_file", str(file), world_size=world_size, device=device) == []


def test_shipped_sizes_are_there():
    names = {file.stem for file in JOB_FILES}
    assert names >= {"debug_model", "llama3_1b", "llama3_3b", "llama3_8b", "llama3_70b", "llama3_405b"}


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_defaults_are_valid_and_quiet_anywhere(world_size):
    assert validate(world_size=world_size, device="cpu") == []
    assert validate(world_size=world_size) == []


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BOUNDS)
def test_each_bound_refuses_what_lies_below_and_names_the_key(path):
    low, high = BOUNDS[path]
    whole = schema.without_none(schema.all_keys()[path].annotation)[0] is int
    below = str(int(low) - 1) if whole else str(low - 0.5)
    message = refusal_of(f"--{path}={below}")
    assert message.startswith(f"{path} = {below}: must be at least {low}")
    if high is not None:
        assert f"less than {high}" in refusal_of(f"--{path}={int(high)}")


@pytest.mark.parametrize(
    "path", ["validation.steps", "training.global_batch_size", "parallelism.data_parallel_shard_degree"]
)
@pytest.mark.parametrize("value", [0, -2])
def test_minus_one_is_the_only_other_value(path, value):
    assert refusal_of(f"--{path}={value}").startswith(f"{path} = {value}: must be -1 or at least 1")


@pytest.mark.parametrize("path", ["lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor"])
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_shares_lie_between_0_and_1(path, value):
    assert refusal_of(f"--{path}={value}") == f"{path} = {value}: must lie between 0 and 1"


def test_bucket_size_and_group_values():
    assert refusal_of("--sync.bucket_mib=0") == "sync.bucket_mib = 0.0: must be greater than 0"
    groups = '[{pattern = "a"}, {pattern = "b", beta2 = 1.0}]'
    message = "optimizer.param_groups[1].beta2 = 1.0: must be at least 0 and less than 1"
    assert refusal_of("--optimizer.param_groups", groups) == message


def test_workers_beyond_the_streams_are_refused():
    message = refusal_of("--training.dataloader.num_workers=65")
    assert message.startswith("training.dataloader.num_workers = 65: ")
    assert "at most data.num_streams = 64" in message
    assert validate("--training.dataloader.num_workers=65", "--data.num_streams=65") == []


# --- parallel layout and batch ------------------------------------------------------------------------------


def test_degrees_must_make_the_number_of_ranks():
    message = refusal_of("--parallelism.data_parallel_replicate_degree=3", world_size=4)
    assert message.startswith(
        "parallelism.data_parallel_replicate_degree = 3: does not divide the number of ranks, 4"
    )
    message = refusal_of(
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=4",
        world_size=4,
    )
    assert "makes 8 ranks, but 4 were started: set it to -1 (here 2), or take 8 ranks" in message
    dry = refusal_of("--parallelism.data_parallel_replicate_degree=2", "--job.dry_run", world_size=1)
    assert dry.endswith("use a divisor of it, or another number of ranks (WORLD_SIZE=N before a dry run)")
    assert validate("--parallelism.data_parallel_replicate_degree=2", world_size=4) == []
    both = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2")
    assert validate(*both, world_size=4) == []


def test_split_sequences_must_divide_and_what_is_not_shown_with_them_is_refused():
    tensor = ("--parallelism.tensor_parallel_degree=4", "--training.seq_len=128")
    assert validate(*tensor, world_size=8) == []
    assert "does not divide the number of ranks, 6" in refusal_of(*tensor, world_size=6)
    message = refusal_of(*tensor, "--parallelism.data_parallel_shard_degree=3", world_size=8)
    assert (
        "times tensor_parallel_degree = 4 makes 12 ranks, but 8 were started: set it to -1 (here 2)"
        in message
    )
    message = refusal_of(*tensor, "--training.seq_len=126", world_size=8)
    assert message.startswith("training.seq_len = 126: must be a multiple of 4")
    assert message.endswith("use 128")
    assert "validation.seq_len = 9" in refusal_of(*tensor, "--validation.seq_len=9", world_size=8)
    for argument in ("training.enable_cpu_offload=true",):
        assert refusal_of(*tensor, f"--{argument}", world_size=8).startswith(argument.split("=")[0])
    compiled = (*tensor, "--compile.enable=true")
    assert validate(*compiled, "--activation_checkpoint.mode=full", world_size=8) == []
    ring = (*compiled, "--parallelism.context_parallel_degree=2")
    (warning,) = validate(*ring, world_size=8)
    assert warning.startswith('parallelism.context_parallel_method = "ring": forms attention scores')
    assert validate(*ring, "--data.document_mask=false", world_size=8) == []
    assert validate(*ring, "--parallelism.context_parallel_method=ulysses", world_size=8) == []
    assert validate(*ring, world_size=8, device="cpu") == []
    for key, value in (("side", "G"), ("norm", "l2"), ("source", "gradient")):
        dobb = ("--optimizer.name=Dobb", f"--optimizer.dobb.{key}={value}")
        assert refusal_of(*tensor, *dobb, world_size=8).startswith(f'optimizer.dobb.{key} = "{value}"')
    for name in RULES:
        argv = (*tensor, f"--optimizer.name={name}")
        rule = build_rule(name)
        if rule.regime == 1 or rule.u_gathers or name == "dobb":
            assert validate(*argv, world_size=8) == []
        else:
            assert "optimizer.name" in refusal_of(*argv, world_size=8), name


def test_async_tensor_parallel_wants_gpus_and_the_compiler():
    key = "parallelism.enable_async_tensor_parallel"
    wanted = ("--parallelism.tensor_parallel_degree=2", "--compile.enable=true", f"--{key}=true")
    assert validate(*wanted, world_size=2, device="cuda") == []
    for argv, device, what in (
        (wanted[1:], "cuda", "nothing to overlap"),
        (wanted, "cpu", "needs CUDA devices"),
        ((wanted[0], wanted[2]), "cuda", "set compile.enable = true"),
        ((*wanted, "--compile.backend=aot_eager"), "cuda", "set compile.enable = true"),
        ((*wanted, "--compile.components=loss"), "cuda", "set compile.enable = true"),
    ):
        message = refusal_of(*argv, world_size=2, device=device)
        assert message.startswith(f"{key} = true: "), argv
        assert what in message
        assert message.endswith("set it to false")


def test_global_batch_must_divide():
    argv = ("--training.local_batch_size=4", "--training.global_batch_size=20")
    assert validate(*argv, world_size=1) == []
    assert refusal_of(*argv, world_size=2) == (
        "training.global_batch_size = 20: must be a multiple of training.local_batch_size x data-parallel"
        " ranks = 4 x 2 = 8: use 16 or 24, or another local_batch_size"
    )
    assert "use 32, or" in refusal_of(*argv, world_size=8)


# --- optimizer, schedule, FORGE -----------------------------------------------------------------------------


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


def test_schedule():
    message = refusal_of("--lr_scheduler.warmup_steps=11", "--lr_scheduler.total_steps=10")
    assert message.startswith("lr_scheduler.warmup_steps = 11: is longer than the schedule")
    (warning,) = validate("--training.steps=100")
    assert warning.startswith("lr_scheduler.warmup_steps = 200: the run, 100 steps, is all warm-up")
    (warning,) = validate("--training.steps=1000", "--lr_scheduler.decay_ratio=0.9")
    assert "warm-up (200 steps) and decay (900) are longer than the schedule (1000)" in warning
    (warning,) = validate("--training.steps=1000", "--lr_scheduler.total_steps=900")
    assert "the last 100 steps run at the schedule's floor" in warning
    assert validate("--training.steps=1000", "--lr_scheduler.total_steps=2000") == []
    assert validate("--training.steps=1000", "--lr_scheduler.decay_ratio=0.8") == []


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


# --- data and validation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["text", "jsonl", "parquet"])
def test_datasets_that_need_a_path(dataset, tmp_path):
    argv = (f"--training.dataset={dataset}",)
    message = refusal_of(*argv)
    assert (
        message.startswith("training.dataset_path = none: ")
        and f'training.dataset = "{dataset}" needs' in message
    )
    missing = str(tmp_path / "none" / "*.x")
    message = refusal_of(*argv, f"--training.dataset_path={missing}")
    assert message.startswith(f'training.dataset_path = "{missing}": no such file')
    assert "no such file" in refusal_of(*argv, f"--training.dataset_path={tmp_path}")  # an empty folder
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.x").write_text("x")
    for path in (tmp_path, tmp_path / "deep" / "a.x", tmp_path / "*" / "*.x", tmp_path / "**" / "a.x"):
        assert validate(*argv, f"--training.dataset_path={path}") == []


def test_embedded_text_takes_no_path():
    message = refusal_of("--training.dataset_path=x")
    assert (
        message
        == 'training.dataset_path = "x": training.dataset = "python_stdlib" brings its own files: unset it'
    )


def test_unknown_datasets():
    assert refusal_of("--training.dataset=jsnol").endswith('did you mean "jsonl"?')
    assert refusal_of("--training.dataset=pile").startswith(
        'training.dataset = "pile": must be one of python_stdlib,'
    )
    message = refusal_of("--validation.enable", "--validation.dataset=pile_validation")
    assert message.startswith('validation.dataset = "pile_validation": must be one of')
    assert "torchtitan's own test file" in refusal_of("--training.dataset=c4_test")


def test_hugging_face_datasets(tmp_path):
    assert validate("--training.dataset=c4", "--data.subset=en", "--data.shuffle_window=10") == []
    assert validate("--training.dataset=huggingface", f"--training.dataset_path={tmp_path}") == []
    assert validate("--training.dataset=huggingface", "--training.dataset_path=a-b/c.d@v1") == []
    assert refusal_of("--training.dataset=huggingface").endswith("the path of a folder or hub id here")
    message = refusal_of("--training.dataset=huggingface", "--training.dataset_path=/no/such/folder")
    assert message.startswith('training.dataset_path = "/no/such/folder": no such folder')
    (warning,) = validate("--data.split=test")
    assert warning.endswith("training.dataset is no Hugging Face dataset")
    (warning,) = validate("--data.shuffle_window=7")
    assert warning.endswith("or data.shuffle = false")


def test_a_mix_of_sources(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    mix = f'[{{dataset = "jsonl", path = "{path}", weight = 3}}, {{dataset = "python_stdlib"}}]'
    assert validate(f"--data.sources={mix}", "--data.text_key=body") == []
    message = refusal_of(f"--data.sources={mix}", "--training.dataset=text")
    assert message == (
        'training.dataset = "text": [[data.sources]] names what to train on: keep one of the two'
    )
    message = refusal_of('--data.sources=[{dataset = "text"}]')
    assert message.startswith('data.sources[0].path = none: data.sources[0].dataset = "text" needs the path')
    message = refusal_of('--data.sources=[{}, {dataset = "jsnol"}]')
    assert message.startswith('data.sources[1].dataset = "jsnol": must be one of')
    assert refusal_of("--data.sources=[{weight = 0}]").startswith("data.sources[0].weight = 0.0: must be")


def test_tokenizer_paths(tmp_path):
    missing = str(tmp_path / "none")
    assert refusal_of(f"--data.tokenizer={missing}").startswith(f'data.tokenizer = "{missing}": ')
    message = refusal_of(f"--model.hf_assets_path={missing}")
    assert message.startswith(f'model.hf_assets_path = "{missing}": no such folder')
    assert validate(f"--model.hf_assets_path={missing}", "--data.tokenizer=byte") == []
    assert validate(f"--model.hf_assets_path={tmp_path}") == []
    file = tmp_path / "tokenizer.model"
    file.write_text("x")
    assert validate(f"--data.tokenizer={file}") == []
    assert validate("--data.tokenizer=package:somewhere/tokenizer.model") == []


def test_validation_needs_something_to_evaluate_on(tmp_path):
    assert validate("--validation.enable") == []
    message = refusal_of("--validation.enable", "--data.validation_fraction=0")
    assert message.startswith(
        "data.validation_fraction = 0.0: validation.enable = true has nothing to evaluate on"
    )
    file = tmp_path / "a.txt"
    file.write_text("x")
    message = refusal_of("--validation.enable", f"--validation.dataset_path={file}")
    assert message.startswith(f'validation.dataset_path = "{file}": needs validation.dataset')
    own = ("--validation.enable", "--validation.dataset=text")
    assert refusal_of(*own).startswith("validation.dataset_path = none: ")
    assert validate(*own, f"--validation.dataset_path={file}", "--data.validation_fraction=0") == []


# --- checkpoints and the rest -------------------------------------------------------------------------------


def test_checkpoint_rules(tmp_path):
    enabled = ("--checkpoint.enable",)
    assert validate(*enabled) == []
    assert refusal_of(*enabled, "--checkpoint.keep_latest_k=1").startswith(
        "checkpoint.keep_latest_k = 1: a crash"
    )
    assert validate(*enabled, "--checkpoint.keep_latest_k=0") == []
    message = refusal_of(*enabled, "--checkpoint.exclude_from_loading=optimiser")
    assert '"optimiser" is not one of' in message and message.endswith('did you mean "optimizer"?')
    missing = str(tmp_path / "none")
    message = refusal_of(*enabled, f"--checkpoint.initial_load_path={missing}")
    assert message == f'checkpoint.initial_load_path = "{missing}": no such folder'
    assert validate(*enabled, f"--checkpoint.initial_load_path={tmp_path}") == []
    (warning,) = validate(*enabled, "--checkpoint.last_save_model_only")
    assert warning.startswith("checkpoint.last_save_model_only = true: ")
    seed = (*enabled, "--checkpoint.create_seed_checkpoint")
    assert validate(*seed) == []
    assert "is made by one process, not 2" in refusal_of(*seed, world_size=2)
    assert refusal_of(*seed, "--checkpoint.load_only").startswith("checkpoint.load_only = true: contradicts")


@pytest.mark.parametrize(
    "argument", ["initial_load_path=.", "create_seed_checkpoint", "load_only", "load_step=5"]
)
def test_loading_needs_checkpoints_switched_on(argument):
    message = refusal_of(f"--checkpoint.{argument}")
    assert message.startswith(f"checkpoint.{argument.partition('=')[0]} = ")
    assert message.endswith("needs checkpoint.enable = true")


def test_profiler_window_fits_its_period():
    argv = ("--profiling.enable_profiling", "--profiling.profile_freq=3")
    message = "profiling.profile_freq = 3: must be at least profiler_warmup + profiler_active = 4"
    assert refusal_of(*argv) == message
    assert validate(*argv, "--profiling.profiler_warmup=2") == []


@pytest.mark.parametrize("option", ["0", "-1", "every", "1.5", ""])
def test_selective_option(option):
    message = refusal_of(f"--activation_checkpoint.selective_ac_option={option}")
    assert message.startswith(f'activation_checkpoint.selective_ac_option = "{option}": must be "op" or')
    assert validate("--activation_checkpoint.selective_ac_option=2") == []


def test_compile_components():
    budget = "--activation_checkpoint.mode=memory_budget"
    assert validate(budget, "--compile.enable", "--activation_checkpoint.memory_budget=0.99") == []
    for others in ([], ["--compile.enable", "--compile.backend=aot_eager"]):
        message = refusal_of(budget, *others)
        assert message.startswith('activation_checkpoint.mode = "memory_budget": the compiler keeps to')
    message = refusal_of(budget, "--compile.enable", "--activation_checkpoint.memory_budget=1.5")
    assert message.startswith("activation_checkpoint.memory_budget = 1.5: is a share")
    message = refusal_of("--compile.enable", "--compile.components=model,optim")
    assert message.endswith('"optim" is not one of model, loss')
    assert "nothing to compile" in refusal_of("--compile.enable", "--compile.components=")


@pytest.mark.parametrize(
    "key", ["training.steps", "training.gc_freq", "data.num_streams", "comm.init_timeout_seconds"]
)
def test_numbers_beyond_any_use_are_named(key):
    assert refusal_of(f"--{key}={10**30}").startswith(f"{key} = ")


def test_folders_that_cannot_be_written_are_named_before_the_run(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    assert f"lies below {file}, which is a file" in refusal_of(f"--job.dump_folder={file}/run")
    assert "checkpoint.folder" in refusal_of(
        f"--job.dump_folder={tmp_path}", "--checkpoint.enable", "--checkpoint.folder=file"
    )
    told = refusal_of(f"--job.dump_folder={tmp_path / ('long' * 100)}")
    assert "job.dump_folder" in told and "File name too long" in told
    # The superuser may write everywhere, so the system's answer is what is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"{tmp_path} cannot be written to" in refusal_of(f"--job.dump_folder={tmp_path}/new/run")
    assert not (tmp_path / "new").exists()


def test_dump_folder_is_no_file(tmp_path):
    file = tmp_path / "x"
    file.write_text("")
    assert refusal_of(f"--job.dump_folder={file}") == f'job.dump_folder = "{file}": is a file, not a folder'


# --- settings without effect --------------------------------------------------------------------------------


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


def test_one_line_per_reason():
    (warning,) = validate("--validation.freq=5", "--validation.steps=2")
    assert warning == "validation.freq = 5, validation.steps = 2 have no effect: validation.enable is false"


def test_a_matrix_rule_reads_its_companion_and_momentum():
    assert validate("--optimizer.name=Muon", "--optimizer.scalar.lr=1", "--optimizer.momentum=0.8") == []


def test_rule_table_is_that_of_the_rules():
    class Recorder(dict):
        """Hyperparameters that remember which of them were read."""

        def __init__(self, values):
            super().__init__(values)
            self.read = set()

        def __getitem__(self, key):
            self.read.add(key)
            return super().__getitem__(key)

    assert set(RULE_KEYS) == set(RULES), "titanforge/config/rules.py lists other rules than titanforge/optim"
    values = {"lr": 1.0, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "momentum": 0.9}
    for name, keys in RULE_KEYS.items():
        rule = build_rule(name, momentum=0.9)
        options = Recorder(values)
        rule.hyperparameters(options, 3)
        assert options.read - {"lr", "weight_decay"} == keys - {"nesterov"}, name
        assert ("nesterov" in keys) == (name in NESTEROV_RULES), name
        assert (name in MATRIX_RULES) == rule.matrix_only, name


def test_dataset_names_are_those_of_the_sources():
    assert DATASETS == sources.DATASETS


def test_other_names_are_those_of_their_layers():
    assert CHECKPOINT_PARTS == manager._PARTS
    assert (AUTO, *FORMS) == FORGE_KERNELS
    assert set(TORCH_OPTIM_RULES) == set(BASELINE_RULES)
    assert {name for name in RULES if build_rule(name, momentum=0.9).regime == 1} == COORDINATE_RULES


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


def test_the_table_names_existing_keys():
    paths = schema.all_keys()
    for dependence in DEPENDENCES:
        for name in dependence.keys:
            assert name in paths or (name.endswith(".") and any(path.startswith(name) for path in paths)), (
                name
            )


# --- sync policies ------------------------------------------------------------------------------------------

REPLICAS = "--parallelism.data_parallel_replicate_degree=2"


def test_policies_that_average_need_a_step_in_halves_and_plain_states():
    rmmc = (REPLICAS, "--sync.policy=rmmc")
    assert validate(*rmmc, world_size=2) == []
    for argument in ("--optimizer.implementation=fused", "--optimizer.state_dtype=int8"):
        assert refusal_of(*rmmc, argument, world_size=2).startswith('sync.policy = "rmmc": ')
    message = refusal_of(REPLICAS, "--sync.reduce=states", "--optimizer.state_dtype=int8", world_size=2)
    assert message.startswith('sync.reduce = "states": ') and 'sync.reduce = "gradients"' in message
    assert refusal_of("--sync.interval=0").startswith("sync.interval = 0: must be at least 1")
    assert "finite" in refusal_of("--sync.threshold=inf")


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
