"""The tables of docs/parallelism.md: every cell is tried, what works and what is refused."""

from __future__ import annotations

import re

import pytest

from tests.distributed_harness import REPOSITORY
from tests.trainer.test_expert_layouts import LAYOUTS as EXPERT_LAYOUTS
from tests.trainer.test_split_models import LAYOUTS
from titanforge.config import load_config, validate_config
from titanforge.layout import build_dims, check_model

PAGE = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
MODELS = {
    "`llama3`": ("llama3", "8B"),
    "`qwen3`": ("qwen3", "8B"),
    "`qwen3`, experts": ("qwen3", "30B-A3B"),
    "`gpt2`": ("gpt2", "124M"),
}
KEYS = {
    "dp_shard": "data_parallel_shard_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}
# Trained beside one process in tests/trainer/test_layouts.py, the others in test_split_models.py.
ELSEWHERE = {"dp_shard 2", "dp_replicate 2 × dp_shard 2"}


def table(first: str) -> list[list[str]]:
    """Cells of the table whose head begins with that column, head first."""
    lines = PAGE[PAGE.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def degrees(layout: str) -> dict[str, int | str]:
    found: dict[str, int | str] = {KEYS[a]: int(n) for a, n in re.findall(r"(\w+) (\d+)", layout)}
    if method := re.search("ring|ulysses", layout):
        found["context_parallel_method"] = method[0]
    return found


def accepted(argv: list[str], ranks: int) -> bool:
    try:
        config = load_config([*argv, "--training.seq_len=1024", "--training.local_batch_size=4"])
        validate_config(config, ranks, "cuda")
        check_model(config, build_dims(config, ranks))
    except ValueError:
        return False
    return True


HEAD, *ROWS = table("layout")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_layout_is_taken_or_refused_as_written(row):
    argv = [f"--parallelism.{key}={value}" for key, value in degrees(row[0]).items()]
    ranks = 1
    for key, value in degrees(row[0]).items():
        ranks *= value if isinstance(value, int) and key != KEYS["ep"] else 1
    for column, cell in zip(HEAD[1:], row[1:], strict=True):
        family, flavor = MODELS[column]
        assert cell in ("yes", "no")
        model = [f"--model.name={family}", f"--model.flavor={flavor}"]
        assert accepted([*argv, *model], ranks) == (cell == "yes"), (column, cell)


def test_what_works_is_trained_in_a_test():
    names = {
        "tensor": "tp",
        "context": "cp",
        "data_replicate": "dp_replicate",
        "expert": "ep",
        "pipeline": "pp",
    }
    trained = []
    for ranks, axes in [*LAYOUTS.values(), *EXPERT_LAYOUTS.values()]:
        sizes = {names[axis]: size for axis, size in axes.items() if axis in names}
        left = ranks
        for axis, size in sizes.items():
            left //= size if axis != "ep" else 1
        method = {"context_parallel_method": axes.get("method", "ring")} if "cp" in sizes else {}
        shard = {"data_parallel_shard_degree": left} if left > 1 else {}
        trained.append({KEYS[axis]: size for axis, size in sizes.items()} | shard | method)
    for row in ROWS:
        if "yes" in row and row[0] not in ELSEWHERE:
            assert degrees(row[0]) in trained, row[0]


@pytest.mark.parametrize(("axis", "column"), [("tp 2", 1), ("cp 2", 2), ("pp 2", 3)])
@pytest.mark.parametrize("row", table("beside it")[1:], ids=lambda row: row[0])
def test_each_option_is_taken_or_refused_as_written(row, axis, column):
    key, value = re.fullmatch(r"`([\w.]+) = \"?([\w]+)\"?`", row[0]).groups()
    argv = [f"--parallelism.{name}={size}" for name, size in degrees(axis).items()]
    assert accepted([*argv, "--parallelism.data_parallel_replicate_degree=2"], 4)
    argv += ["--parallelism.data_parallel_replicate_degree=2", f"--{key}={value}"]
    if key == "checkpoint.enable":
        argv.append("--checkpoint.folder=nowhere")
    if key == "forge.enable":
        argv.append("--forge.clip=lagged")
    assert accepted(argv, 4) == (row[column] == "yes")
