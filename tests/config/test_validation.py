"""Numbers, ranks, schedules and folders are checked before a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.config.jobs import refusal_of, validate
from titanforge.config import schema
from titanforge.config.bounds import BOUNDS
from titanforge.optim.registry import RULES, build_rule

REPOSITORY = Path(__file__).parent.parent.parent
JOB_FILES = sorted((REPOSITORY / "train_configs").glob("*.toml"))


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
    tau = "optimizer.update_scale_tau"
    assert refusal_of(f"--{tau}=0", "--optimizer.name=Muon") == f"{tau} = 0.0: must be greater than 0"
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


# --- schedule -----------------------------------------------------------------------------------------------


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
