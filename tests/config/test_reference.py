from __future__ import annotations

from pathlib import Path

import pytest

from titanforge.config import JobConfig, format_help, load_config, reference_markdown, schema
from titanforge.config.reference import undocumented_keys
from titanforge.config.sections import ParamGroup
from titanforge.config.theirs import FOREIGN_KEYS

REPOSITORY = Path(__file__).parent.parent.parent


def test_every_key_is_documented():
    assert undocumented_keys() == []


def test_docs_belong_to_their_own_field():
    docs = {path: key.doc for path, key in schema.all_keys().items()}
    assert docs["training.seq_len"] == "Tokens per sequence."
    assert docs["optimizer.scalar.weight_decay"] == "Weight decay, in the way of the rule."
    assert "\n" not in docs["training.global_batch_size"]
    assert docs["training.global_batch_size"].endswith("reached by gradient accumulation.")


def test_help_has_every_key_with_type_default_and_doc():
    text = format_help()
    flat = " ".join(text.split())
    for path, key in schema.all_keys().items():
        heading = f"--{path} ({schema.describe_type(key.annotation)}; {schema.show(key.default)})"
        assert f"{heading} {key.doc}" in flat
    assert "--optimizer.param_groups[].pattern (string;" in flat
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_flag_prints_and_exits_even_beside_mistakes(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--training.stpes", "3", flag])
    assert caught.value.code == 0
    assert capsys.readouterr().out == format_help() + "\n"


def test_page_lists_every_key_and_every_lacking_one():
    page = reference_markdown()
    for path in (*schema.all_sections(), *FOREIGN_KEYS):
        assert path in page
    for key in schema.all_keys().values():
        kind, default = schema.describe_type(key.annotation), schema.show(key.default)
        assert f"| `{key.leaf}` | {kind} | `{default}` | {key.doc} |" in page


def test_page_in_docs_is_current():
    page = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == reference_markdown(), "docs/config.md is stale: run `make docs`"


@pytest.mark.parametrize(
    "path, text",
    [
        ("training.steps", "int"),
        ("training.max_norm", "float"),
        ("training.dataset_path", "string or none"),
        ("forge.enable", "bool"),
        ("compile.components", "list of string"),
        ("optimizer.param_groups", "list of tables"),
        ("training.dtype", 'one of "bfloat16", "float32"'),
    ],
)
def test_types_read_well(path, text):
    assert schema.describe_type(schema.all_keys()[path].annotation) == text


def test_values_are_shown_as_toml():
    assert schema.show([True, None, 1e-8, "a"]) == '[true, none, 1e-08, "a"]'
    assert schema.show(ParamGroup("x", lr=0.5)) == '{ pattern = "x", lr = 0.5 }'


def test_paths_read_and_write():
    config = JobConfig()
    schema.set_value(config, "training.dataloader.num_workers", 3)
    assert config.training.dataloader.num_workers == 3
    assert schema.get_value(config, "training.dataloader.num_workers") == 3


def test_page_of_optimizers_gives_every_key_of_the_matrix_rules_its_symbol_and_default():
    page = (REPOSITORY / "docs" / "optimizers.md").read_text(encoding="utf-8")
    table = page[page.index("| key | symbol | default | in the papers |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    told = {key.strip("`"): default.strip("`") for key, _, default, _ in rows}
    keys = schema.all_keys()
    assert told == {path: schema.show(keys[path].default) for path in told}
    matrix = ("optimizer.muon.", "optimizer.dion.", "optimizer.dobb.")
    assert {path for path in keys if path.startswith(matrix)} <= set(told)
    symbols = {key.strip("`"): symbol for key, symbol, *_ in rows}
    for path, symbol in (("momentum", "mu"), ("dobb.blocks", "B"), ("dobb.decay", "beta_C")):
        assert symbols[f"optimizer.{path}"] == symbol
