"""Weights alone: exported from shards, read back by anyone, and foreign ones read in."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.runs import TinyRun, assert_same, expected
from tests.distributed_harness import run_distributed
from titanforge.checkpoint import CheckpointError, safetensors_format


def _model_only(seed, tied=False, width=12):
    named = expected(seed, width, tied).items()
    return {n.removeprefix("model."): t for n, t in named if n.startswith("model.")}


def _export_and_read_back(rank, world_size, folder):
    run = TinyRun(True, seed=1, tied=True)
    safetensors_format.SHARD_BYTES = 2000
    options = {"last_save_model_only": True, "export_dtype": "bfloat16", "async_mode": "async"}
    manager = run.manager(folder, **options)
    manager.save(1, run.state)
    manager.save(2, run.state, last=True)
    manager.close()
    other = TinyRun(True, seed=9, tied=True)
    exported = folder / "checkpoint" / "export-step-2"
    loaded = other.manager(folder / "new", initial_load_path=str(exported)).load(other.state)
    assert sorted(loaded) == ["model"]
    found = {n.removeprefix("model."): t for n, t in other.full().items() if n.startswith("model.")}
    assert_same(found, {n: t.bfloat16().float() for n, t in _model_only(1, tied=True).items()})
    # Resuming takes the full checkpoint, not the export.
    assert other.manager(folder).load(other.state)["train_state"]["step"] == 1
    return sorted(path.name for path in exported.iterdir())


def test_export_from_shards_and_read_back(tmp_path):
    names = run_distributed(_export_and_read_back, 2, tmp_path)[0]
    folder = tmp_path / "checkpoint" / "export-step-2"
    weights = [name for name in names if name.endswith(".safetensors")]
    assert len(weights) > 1, names
    read = {name: t for file in weights for name, t in load_file(folder / file).items()}
    wanted = _model_only(1, tied=True)
    del wanted["output.weight"]  # tied: stored once
    assert_same(read, {name: t.bfloat16() for name, t in wanted.items()})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(wanted)


@pytest.fixture
def foreign(tmp_path):
    save_file(_model_only(3), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


@pytest.mark.usefixtures("one_process")
def test_foreign_weights_come_from_a_file_or_a_folder(foreign, tmp_path):
    for path in (foreign, foreign.parent):
        run = TinyRun(False, seed=9)
        run.manager(tmp_path / "run", initial_load_path=str(path)).load(run.state)
        found = {n.removeprefix("model."): t for n, t in run.full().items() if n.startswith("model.")}
        assert_same(found, _model_only(3))


@pytest.mark.usefixtures("one_process")
def test_weights_that_do_not_fit_are_named(foreign, tmp_path):
    for weights, message in [
        (_model_only(3, width=8), r"tok_embeddings.weight has shape \(33, 8\)"),
        ({"lm_head.weight": torch.ones(1)}, r"Missing: .*Not of this model: lm_head.weight"),
    ]:
        save_file(weights, foreign)
        run = TinyRun(False, seed=9)
        with pytest.raises(ValueError, match=message):
            run.manager(tmp_path / "run", initial_load_path=str(foreign)).load(run.state)
    run = TinyRun(False, seed=9)
    options = {"initial_load_path": str(foreign), "initial_load_model_only": False}
    with pytest.raises(ValueError, match="initial_load_model_only = false"):
        run.manager(tmp_path / "run", **options).load(run.state)


@pytest.mark.usefixtures("one_process")
def test_a_folder_of_exports_alone_is_no_fresh_start(tmp_path):
    run = TinyRun(False, seed=1)
    run.manager(tmp_path, last_save_model_only=True).save(1, run.state, last=True)
    with pytest.raises(CheckpointError, match=r"export-step-1.*initial_load_path"):
        run.manager(tmp_path).load(run.state)
