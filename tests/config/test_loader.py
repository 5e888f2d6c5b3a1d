from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.files import error_of, file_error, load_text
from titanforge.config import JobConfig, load_config, schema, to_flat_dict, to_toml
from titanforge.config.sections import DataSource, ParamGroup
from titanforge.config.toml_lines import key_lines, line_of

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


# --- precedence and spelling --------------------------------------------------------------------------------


def test_defaults_without_arguments():
    assert load_config([]) == JobConfig()


def test_command_line_wins_over_file_and_file_over_default(job_file):
    config = load_text(job_file, "[training]\nsteps = 7\nseq_len = 64\n", "--training.steps", "9")
    assert (config.training.steps, config.training.seq_len) == (9, 64)
    assert config.training.local_batch_size == JobConfig().training.local_batch_size


def test_order_on_the_command_line_does_not_matter_to_the_file(job_file):
    file = job_file("[training]\nsteps = 7\n")
    assert load_config(["--training.steps=9", f"--job.config_file={file}"]).training.steps == 9


def test_last_of_a_repeated_override_counts():
    assert load_config(["--training.steps", "1", "--training.steps=2"]).training.steps == 2


def test_default_file_is_read_unless_another_is_named(job_file, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text("[training]\nsteps = 8\n")
    file = job_file("[training]\nsteps = 7\n")
    assert load_config([], default_file=file).training.steps == 7
    assert load_config(["--job.config_file", str(other)], default_file=file).training.steps == 8


@pytest.mark.parametrize(
    "argv, path, value",
    [
        (["--training.dataloader.num_workers", "2"], "training.dataloader.num_workers", 2),
        (["--optimizer.scalar.lr", "1e-3"], "optimizer.scalar.lr", 1e-3),
        (["--optimizer.scalar.lr=none"], "optimizer.scalar.lr", None),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--forge.enable"], "forge.enable", True),
        (["--forge.enable", "--training.steps", "3"], "forge.enable", True),
        (["--forge.enable", "false"], "forge.enable", False),
        (["--forge.enable=True"], "forge.enable", True),
        (["--data.shuffle=false"], "data.shuffle", False),
        (["--compile.components", "model,loss"], "compile.components", ["model", "loss"]),
        (["--compile.components", "model", "loss"], "compile.components", ["model", "loss"]),
        (["--compile.components", '["loss"]'], "compile.components", ["loss"]),
        (["--compile.components="], "compile.components", []),
        (["--validation.sample_prompts", '["a, b", "c"]'], "validation.sample_prompts", ["a, b", "c"]),
        (["--training.dtype", "bfloat16"], "training.dtype", "bfloat16"),
        (["--training.local-batch-size", "3"], "training.local_batch_size", 3),
        (["--job.description=--odd=one"], "job.description", "--odd=one"),
        (["--data.tokenizer", "none"], "data.tokenizer", "none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_spellings_of_the_command_line(argv, path, value):
    read = schema.get_value(load_config(argv), path)
    assert read == value and type(read) is type(value)


def test_tables_of_a_list_are_typed(job_file):
    text = """
[[optimizer.param_groups]]
pattern = "norm"
weight_decay = 0
[[optimizer.param_groups]]
pattern = "output"
lr = 1e-4
"""
    groups = [ParamGroup(pattern="norm", weight_decay=0.0), ParamGroup(pattern="output", lr=1e-4)]
    read = load_text(job_file, text).optimizer.param_groups
    assert read == groups and type(read[0].weight_decay) is float
    argument = '[{pattern = "norm", weight_decay = 0}, {pattern = "output", lr = 1e-4}]'
    assert load_config(["--optimizer.param_groups", argument]).optimizer.param_groups == groups


def test_file_with_byte_order_mark_and_windows_line_ends(job_file):
    assert load_text(job_file, "\ufeff[training]\r\nsteps = 7\r\n").training.steps == 7


def test_defaults_are_not_shared_between_configurations():
    first = load_config([])
    first.compile.components.append("x")
    first.optimizer.param_groups.append(ParamGroup())
    assert load_config([]) == JobConfig()


# --- unknown names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written, meant",
    [
        ("training.stpes", "training.steps"),
        ("trainng.steps", "training.steps"),
        ("training.lr", "optimizer.lr"),
        ("training.batch_size", "training.local_batch_size"),
        ("optimizer.warmup_steps", "lr_scheduler.warmup_steps"),
        ("model.seq_len", "training.seq_len"),
        ("training.num_workers", "training.dataloader.num_workers"),
        ("steps", "training.steps"),
    ],
)
def test_unknown_key_names_the_nearest_valid_name(written, meant):
    assert (
        error_of(f"--{written}", "3") == f'command line: unknown key {written} = "3": did you mean {meant}?'
    )


def test_unknown_key_in_a_file_names_file_and_line(job_file):
    text = '[job]\ndescription = """\nstpes = 1\n"""\n\n[training]\n# a comment\nseq_len = 8\nstpes = 10\n'
    assert (
        file_error(job_file, text)
        == "job.toml:9: unknown key training.stpes = 10: did you mean training.steps?"
    )


def test_unknown_section_names_its_first_key(job_file):
    text = "\n[optimiser]\nlr = 1e-3\n"
    message = "job.toml:3: unknown key optimiser.lr = 0.001: did you mean optimizer.lr?"
    assert file_error(job_file, text) == message
    assert file_error(job_file, "\n\n[foo]\n").startswith("job.toml:3: unknown key foo = {}")


def test_nothing_like_it_points_to_help():
    assert error_of("--zzz.qqqqqqqqqqqqq=1").endswith("--help lists every key")


def test_unknown_key_in_a_table_of_a_list(job_file):
    text = '[[optimizer.param_groups]]\npattern = "a"\n\n[[optimizer.param_groups]]\npatern = "b"\n'
    message = 'job.toml:5: unknown key optimizer.param_groups[1].patern = "b": did you mean pattern?'
    assert file_error(job_file, text) == message


# --- wrong types and words ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, message",
    [
        ('steps = "ten"', 'training.steps = "ten": expected int'),
        ("steps = 10.0", "training.steps = 10.0: expected int"),
        ("steps = true", "training.steps = true: expected int"),
        ("steps = [1]", "training.steps = [1]: expected int"),
        ("max_norm = true", "training.max_norm = true: expected float"),
        ("max_norm = inf", "training.max_norm = inf: expected a finite number"),
        ("max_norm = nan", "training.max_norm = nan: expected a finite number"),
        ("dataset = 3", "training.dataset = 3: expected string"),
        ("dataset_path = 3", "training.dataset_path = 3: expected string or none"),
        ("enable_cpu_offload = 1", "training.enable_cpu_offload = 1: expected bool"),
        ("dataloader = 3", "training.dataloader = 3: expected a section, [training.dataloader]"),
        ("steps.x = 3", "training.steps = { x = 3 }: expected int"),
        (
            'dtype = "bfloat61"',
            'training.dtype = "bfloat61": expected one of "bfloat16", "float32"; did you mean "bfloat16"?',
        ),
        ("dtype = 16", 'training.dtype = 16: expected one of "bfloat16", "float32"'),
    ],
)
def test_wrong_type_in_a_file(job_file, line, message):
    assert file_error(job_file, f"[training]\n{line}\n") == f"job.toml:2: {message}"


def test_wrong_item_of_a_list_names_its_place(job_file):
    text = '[compile]\nenable = true\ncomponents = [\n  "model",\n  3,\n]\n'
    assert file_error(job_file, text) == "job.toml:3: compile.components[1] = 3: expected string"
    text = '[[optimizer.param_groups]]\npattern = "a"\nlr = "high"\n'
    assert file_error(job_file, text) == (
        'job.toml:3: optimizer.param_groups[0].lr = "high": expected float or none'
    )
    assert "optimizer.param_groups = 3: expected list of tables" in file_error(
        job_file, "[optimizer]\nparam_groups = 3\n"
    )
    assert "optimizer.param_groups[0] = 3: expected a table" in file_error(
        job_file, "[optimizer]\nparam_groups = [3]\n"
    )


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--training.steps", "ten"], 'training.steps = "ten": expected int'),
        (["--training.steps", "1.5"], 'training.steps = "1.5": expected int'),
        (["--training.steps", "none"], 'training.steps = "none": expected int'),
        (["--optimizer.lr", "inf"], "optimizer.lr = inf: expected a finite number"),
        (["--forge.enable", "yes"], 'forge.enable = "yes": expected bool'),
        (["--training.steps"], "--training.steps needs a value: expected int"),
        (["--training.steps", "1", "2"], '--training.steps takes one value, not 2 ("1 2"): quote it'),
        (["--training", "1"], "--training is a section: write --training.key value"),
        (["--job.config_file"], "--job.config_file needs a value: the path of a TOML file"),
        (["--compile.components", "[1"], 'compile.components = "[1": not a valid TOML array'),
        (["--optimizer.param_groups", "norm"], 'optimizer.param_groups = "norm": not a valid TOML array'),
        (
            ["job.toml"],
            '"job.toml" belongs to no key: write --section.key value (a job file goes to --job.config_file)',
        ),
        (
            ["--training.steps=1", "2"],
            '"2" belongs to no key: write --section.key value (a job file goes to --job.config_file)',
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_on_the_command_line(argv, message):
    assert error_of(*argv) == f"command line: {message}"


# --- the file itself ----------------------------------------------------------------------------------------


def test_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of("--job.config_file", "no.toml") == (
        f'job.config_file = "no.toml": no such file (looked in {tmp_path})'
    )


def test_folder_and_binary_instead_of_a_file(tmp_path):
    assert "cannot be read" in error_of("--job.config_file", str(tmp_path))
    binary = tmp_path / "x.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in error_of("--job.config_file", str(binary))


def test_toml_mistakes_name_the_line(job_file):
    message = file_error(job_file, "[training]\nsteps = 1\nseq_len = = 2\n")
    assert message.startswith("job.toml:3: not valid TOML: ")
    message = file_error(job_file, "[training]\nsteps = 1\nsteps = 2\n")
    assert message.startswith("job.toml:3: not valid TOML: ")


def test_lines_of_every_kind_of_key():
    text = '''top = 1
[a]
b.c = 2  # dotted
"quoted key" = "x # no comment"
array = [
  1, # one ]
  "]",
]
long = """
[not.a.section]
"""
  [ a . d ]
e = { f = 1 }
[[a.list]]
x = 1
[[a.list]]
x = 2
'''
    lines = key_lines(text)
    expected = {
        "top": 1,
        "a": 2,
        "a.b.c": 3,
        "a.quoted key": 4,
        "a.array": 5,
        "a.long": 9,
        "a.d": 12,
        "a.d.e": 13,
        "a.list": 14,
        "a.list[0]": 14,
        "a.list[0].x": 15,
        "a.list[1]": 16,
        "a.list[1].x": 17,
    }
    assert lines == expected
    assert line_of(lines, "a.d.e.f") == 13
    assert line_of(lines, "a.array[1]") == 5
    assert line_of(lines, "z.z") is None


# --- writing ------------------------------------------------------------------------------------------------


def odd_config() -> JobConfig:
    """A configuration where every key differs from its default."""
    config = JobConfig()
    for path, key in schema.all_keys().items():
        inner, _ = schema.without_none(key.annotation)
        item = schema.list_item(inner)
        if item is ParamGroup:
            value = [ParamGroup("a.b", lr=1e-20, beta1=0.5), ParamGroup('"q\\d"', weight_decay=3.0)]
        elif item is DataSource:
            value = [DataSource("text", "a.txt", 0.1), DataSource("c4", name='"q\\d"', split="x")]
        elif item is float:
            value = [1e-20, -0.5, 3.0]
        elif item == list[str]:
            value = [["a", "b.0"], ["c"]]
        elif item is not None:
            value = ["a", 'b "c", \\n \n\t', "[d]", ""]
        elif inner is bool:
            value = not key.default
        elif inner is int:
            value = (key.default or 0) + 12345
        elif inner is float:
            value = (key.default or 0.0) / 3 + 1.23456789e-7
        elif inner is str:
            value = 'é "quoted" \\ back # hash \x7f \x01 \u2028 \U0001f600\nline'
        else:  # a choice
            choices = inner.__args__
            value = choices[-1] if choices[-1] != key.default else choices[0]
        schema.set_value(config, path, value)
    return config


def test_written_toml_loads_back_to_the_same(job_file):
    for config in (JobConfig(), odd_config()):
        file = job_file(to_toml(config))
        config.job.config_file = file
        assert load_config(["--job.config_file", file]) == config


def test_flat_dict_has_every_key_and_plain_values():
    flat = to_flat_dict(odd_config())
    assert list(flat) == list(schema.all_keys())
    assert flat["optimizer.param_groups"][0]["lr"] == 1e-20
    assert to_flat_dict(JobConfig())["training.dataloader.num_workers"] == 0


def test_module_prints_the_merged_configuration(job_file):
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "titanforge.config", *argv]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)

    file = job_file("[training]\nsteps = 7\n[model]\nconverters = []\n")
    done = run("--job.config_file", file, "--training.seq_len", "32")
    assert done.returncode == 0 and "steps = 7\n" in done.stdout and "seq_len = 32\n" in done.stdout
    assert done.stderr.startswith(f"warning: {file}:4: model.converters = [] has no effect")
    failed = run("--training.stpes", "3")
    assert failed.returncode == 2 and failed.stdout == ""
    assert (
        failed.stderr
        == 'error: command line: unknown key training.stpes = "3": did you mean training.steps?\n'
    )
    assert run("--check", "--training.steps", "300").stdout == ""
    refused = run("--check", "--checkpoint.load_only")
    assert refused.returncode == 2
    assert refused.stderr == "error: checkpoint.load_only = true: needs checkpoint.enable = true\n"
    helped = run("--help")
    assert helped.returncode == 0 and "--training.dataloader.num_workers" in helped.stdout
