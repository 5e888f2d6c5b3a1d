"""What train.py says and returns before any training: help, dry run, and mistakes in one line."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.distributed_harness import run_torchrun
from tests.trainer.runs import argv, write_corpus
from train import main


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl")


def test_help_and_dry_run_start_nothing(tmp_path, corpus, capsys):
    assert main(["--help"]) == 0
    assert "--training.steps" in capsys.readouterr().out
    arguments = argv(
        tmp_path / "run",
        corpus,
        job__dry_run=True,
        checkpoint__enable=True,
        model__flavor="8B",
        model__dim=None,
        model__n_layers=None,
        model__n_heads=None,
        model__n_kv_heads=None,
    )
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert "8,030,261,248 parameters" in told.out
    assert told.err == ""
    assert not dist.is_initialized()
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_a_wrong_key_under_torchrun_is_one_line_of_one_rank(tmp_path, corpus):
    ended = run_torchrun(["train.py", *argv(tmp_path / "run", corpus, training__step=3)], 2, timeout=60)
    assert ended.returncode == 1
    assert "exitcode  : 2" in ended.stderr, "torchrun names the rank's own code"
    (line,) = [line for line in ended.stderr.splitlines() if "training.step" in line]
    assert line.startswith("error: ") and "training.steps" in line
    assert 'train.py", line' not in ended.stderr, "no traceback of ours"


def test_a_mistake_found_while_building_under_torchrun_is_told_once(tmp_path, corpus):
    ended = run_torchrun(
        ["train.py", *argv(tmp_path / "run", corpus, model__flavor="9B", model__dim=None)], 2, timeout=60
    )
    assert ended.returncode == 1
    assert "exitcode  : 2" in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "model.flavor" in line]
    assert line.startswith("error: ") and "'9B'" in line


MISTAKES = {
    "model.flavor": {"model__flavor": "9B"},
    "model.name": {"model__name": "llama9"},
    "model.n_heads": {"model__n_heads": 3},
    "data.tokenizer": {"data__tokenizer": "absent/tokenizer.model"},
    "model.hf_assets_path": {"data__tokenizer": "auto", "model__hf_assets_path": "absent"},
    "training.dataset_path": {"training__dataset_path": "absent/*.jsonl"},
    "data.text_key": {"data__text_key": "body"},
    "training.global_batch_size": {"training__global_batch_size": 3},
    "parallelism.tensor_parallel_degree": {"parallelism__tensor_parallel_degree": 2},
    "checkpoint.initial_load_path": {
        "checkpoint__enable": True, "checkpoint__initial_load_path": "absent",
    },
    "checkpoint.load_step": {"checkpoint__enable": True, "checkpoint__load_step": 7},
    "optimizer.name": {"optimizer__name": "adamx"},
    "optimizer.param_groups": {"optimizer__param_groups": [{"pattern": "no such weight"}]},
    "validation.dataset_path": {"validation__enable": True, "validation__dataset": "text"},
    "validation.sample_prompts": {"validation__enable": True, "validation__sample_prompts": [""]},
    "training.steps": {"training__steps": "many"},
}  # fmt: skip


@pytest.mark.parametrize("key", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_key(tmp_path, corpus, capsys, key):
    code = main(argv(tmp_path / "run", corpus, **MISTAKES[key]))
    told = capsys.readouterr()
    errors = [line for line in told.err.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1, told.err
    assert errors[0].startswith("error: ") and key in errors[0]
    assert code == (1 if key == "data.text_key" else 2)
    assert "step " not in told.out, "no step was run"
    assert not dist.is_initialized()
