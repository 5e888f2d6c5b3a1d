"""A checkpoint goes back into the model that it was made with, and a seed starts a run."""

from __future__ import annotations

import torch.distributed as dist

from tests.trainer.runs import argv, write_corpus
from train import main


def test_a_model_of_the_same_shapes_that_computes_something_else_is_refused(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    run = {"checkpoint__enable": True, "training__steps": 1}
    assert main(argv(tmp_path / "run", corpus, **run)) == 0
    more = {**run, "training__steps": 2}
    capsys.readouterr()
    # Twice the heads of half the width: every weight has the shape that it had.
    assert main(argv(tmp_path / "run", corpus, **more, model__n_heads=4, model__n_kv_heads=2)) == 2
    error = capsys.readouterr().err
    assert "model.n_heads = 2, here 4" in error and "model.n_kv_heads = 1, here 2" in error
    # A longer sequence changes no weight's meaning.
    assert main(argv(tmp_path / "run", corpus, **more, training__seq_len=128)) == 0
    assert not dist.is_initialized()


def test_a_seed_is_refused_in_the_folder_of_a_run(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    run = {"checkpoint__enable": True, "training__steps": 1}
    assert main(argv(tmp_path / "run", corpus, **run)) == 0
    capsys.readouterr()
    assert main(argv(tmp_path / "run", corpus, **run, checkpoint__create_seed_checkpoint=True)) == 2
    assert "checkpoint.create_seed_checkpoint" in capsys.readouterr().err
    assert main(argv(tmp_path / "new", corpus, **run, checkpoint__create_seed_checkpoint=True)) == 0
    assert (tmp_path / "new" / "checkpoint" / "step-0").is_dir()
