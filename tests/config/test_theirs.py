"""torchtitan's files: what loads, what only warns, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.config.files import error_of, file_error, load_text
from titanforge.config import JobConfig, read_config, schema
from titanforge.config.theirs import FOREIGN_KEYS
from titanforge.config.toml_lines import key_lines

HERE = Path(__file__).parent


def test_their_defaults_load_with_warnings_alone():
    loaded = read_config(["--job.config_file", str(HERE / "torchtitan_defaults.toml")])
    assert loaded.config.optimizer.implementation == "fused"
    warned = {warning.split(": ", 1)[1].split(" = ", 1)[0] for warning in loaded.warnings}
    assert warned == set(FOREIGN_KEYS)


def test_every_key_of_theirs_is_ours_or_in_the_table():
    # A key that is neither would have been refused above; here: nothing in the table that is not theirs.
    lines = key_lines((HERE / "torchtitan_defaults.toml").read_text())
    assert set(FOREIGN_KEYS) <= set(lines)
    assert not set(FOREIGN_KEYS) & set(schema.all_keys()), "a key that we have is listed as lacking"


def test_their_llama3_8b_file_loads_and_float8_section_only_warns():
    file = HERE / "torchtitan_llama3_8b.toml"
    loaded = read_config(["--job.config_file", str(file)])
    assert loaded.config.training.seq_len == 8192 and loaded.config.model.flavor == "8B"
    assert len(loaded.warnings) == 3
    line = file.read_text().splitlines().index('filter_fqns = ["output"]') + 1
    assert loaded.warnings[2].startswith(
        f'{file}:{line}: quantize.linear.float8.filter_fqns = ["output"] has no effect: '
    )


def test_empty_section_of_theirs_is_fine(job_file):
    loaded = read_config(["--job.config_file", job_file("[quantize.linear.float8]\n[fault_tolerance]\n")])
    loaded.config.job.config_file = None
    assert loaded.config == JobConfig() and loaded.warnings == []


@pytest.mark.parametrize(
    "path, value",
    [
        ("model.converters", '["float8"]'),
        ("fault_tolerance.enable", "true"),
        ("checkpoint.initial_load_in_hf_quantized", "true"),
        ("optimizer.early_step_in_backward", "true"),
        ("quantize.linear.float8.enable_fsdp_float8_all_gather", "true"),
        ("parallelism.expert_tensor_parallel_degree", "2"),
        ("experimental.custom_import", '"my.module"'),
    ],
)
def test_a_key_of_theirs_that_is_switched_on_is_refused(job_file, path, value):
    section, _, leaf = path.rpartition(".")
    written = f"{path} = {value}: titanforge has no such key: {FOREIGN_KEYS[path].instead}"
    assert file_error(job_file, f"[{section}]\n{leaf} = {value}\n") == f"job.toml:2: {written}"
    assert error_of(f"--{path}", value) == f"command line: {written}"


def test_a_switch_of_theirs_alone_on_the_command_line_is_on():
    assert "titanforge has no such key" in error_of("--fault_tolerance.enable")
    assert len(read_config(["--fault_tolerance.enable=false"]).warnings) == 1


def test_what_is_advised_instead_exists():
    keys = {*schema.all_keys(), *schema.all_sections()}
    for path, foreign in FOREIGN_KEYS.items():
        for word in foreign.instead.replace(",", " ").replace(";", " ").replace("(", " ").split():
            if "." in word.strip(".") and word.partition(".")[0] in {key.partition(".")[0] for key in keys}:
                assert word.rstrip(".") in keys or word.endswith(".*"), f"{path} advises {word}"


def test_warnings_are_logged_once_by_the_first_rank_only(job_file, caplog, monkeypatch):
    text = "[model]\nconverters = []\n"
    with caplog.at_level(logging.WARNING):
        load_text(job_file, text)
        monkeypatch.setenv("RANK", "1")
        load_text(job_file, text)
    assert [record.message.partition(": ")[2].split(" ")[0] for record in caplog.records] == [
        "model.converters"
    ]
