"""Sync policies through train.py: HSDP, saves and evaluations as sync points, resume, fewer replicas."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import (
    argv,
    assert_same_checkpoint,
    column,
    lines,
    train_all,
    train_each,
    write_corpus,
)  # fmt: skip


def _arguments(folder: Path, corpus: Path, **overrides: Any) -> list[str]:
    settings: dict[str, Any] = {
        "training__steps": 8,
        "training__global_batch_size": 8,
        "training__local_batch_size": 2,
        "parallelism__data_parallel_replicate_degree": 2,
        "optimizer__name": "muon",
        "optimizer__lr": 2e-3,
        "checkpoint__enable": True,
        "checkpoint__interval": 4,
        "sync__policy": "rmmc",
        "sync__threshold": 0.6,
        "sync__warmup_steps": 1,
        "sync__max_interval": 3,
    }
    return argv(folder, corpus, **(settings | overrides))


def _syncs(folder: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["sync"]) for line in lines(folder) if "sync" in line]


def test_rmmc_saves_evaluates_resumes_and_goes_on_with_fewer_replicas(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=200)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    evaluation = {"validation__enable": True, "validation__freq": 3, "validation__steps": 1}
    evaluation["metrics__enable_plot"] = True
    common = {**evaluation, "data__validation_fraction": 0.2, "sync__threshold": 1e9}
    train_all(
        2,
        [
            _arguments(whole, corpus, **common),
            _arguments(parts, corpus, **common, training__steps=4, lr_scheduler__total_steps=8),
            _arguments(parts, corpus, **common, lr_scheduler__total_steps=8),
        ],
    )
    # Warm-up; an evaluation and a save amid local steps; the bound; the last evaluation, with the last save.
    assert _syncs(whole) == [
        (1, "warm-up"), (3, "evaluation"), (4, "checkpoint"), (6, "evaluation"), (8, "evaluation"),
    ]  # fmt: skip
    assert column(parts, "loss")[:4] == column(whole, "loss")[:4]
    last = [line for line in lines(whole) if "sync" in line][-1]
    assert last["sync/drift"] > 0 and last["sync/local_steps"] == 2
    line = next(line for line in lines(whole) if "loss" in line and line["step"] == 8)
    assert line["sync/rate"] == 4 / 8 and line["sync/local_steps"] == 2 and line["sync/rmmc_max"] > 0
    assert sum(name.startswith("sync/rmmc/layers.") for name in line) == 3
    assert line["comm/world/decision_count"] == 8
    assert line["comm/world/agreement_count"] > 0
    # The second process of `parts` counts on where the first one ended.
    resumed = next(line for line in lines(parts) if "loss" in line and line["step"] == 8)
    for key in ("loss/loss", "world/decision", "dp_replicate/states", "dp_replicate/weights"):
        assert resumed[f"comm/{key}_bytes"] == line[f"comm/{key}_bytes"] > 0
    assert (whole / "metrics.png").stat().st_size > 0
    # The second process of `parts` began where the first had saved, and the last step's evaluation and save
    # of the first are the sync points of step 4 in both.
    assert_same_checkpoint(parts / "checkpoint/step-8", whole / "checkpoint/step-8")
    train_all(
        1,
        [
            _arguments(
                whole, corpus, **common, training__steps=10, parallelism__data_parallel_replicate_degree=1
            )
        ],
    )
    assert len(column(whole, "loss")) == 10


def test_scheduled_inside_hsdp_and_rmmc_inside_tensor_parallelism(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=200)
    folder, split, whole = tmp_path / "hsdp", tmp_path / "split", tmp_path / "whole"
    momentum = {
        "optimizer__name": "sgd",
        "optimizer__lr": 0.1,
        "training__steps": 6,
        "training__max_norm": 0,
        "model__n_kv_heads": 2,
        "sync__threshold": 1e9,
        "sync__max_interval": 2,
        "checkpoint__enable": False,
    }
    train_all(2, [_arguments(whole, corpus, **momentum)])
    train_all(
        4,
        [
            _arguments(
                split,
                corpus,
                **momentum,
                training__local_batch_size=4,
                parallelism__tensor_parallel_degree=2,
            ),
            _arguments(
                folder,
                corpus,
                training__steps=6,
                optimizer__name="adamw",
                parallelism__data_parallel_shard_degree=2,
                sync__policy="scheduled",
                sync__interval=3,
                sync__threshold=None,
                sync__max_interval=None,
            ),
        ],
    )
    assert _syncs(folder) == [(1, "warm-up"), (4, "scheduled"), (6, "checkpoint")]
    losses = column(folder, "loss")
    assert losses[-1] < losses[0]
    # Saved amid local steps, it knows no replicas: the mean goes on on two whole ones, and on one.
    firsts = []
    for replicas in (2, 1):
        shutil.copytree(folder / "checkpoint", tmp_path / f"on_{replicas}" / "checkpoint")
        layout = {"parallelism__data_parallel_replicate_degree": replicas, "sync__interval": 3}
        more = {"sync__policy": "scheduled", "sync__threshold": None, "sync__max_interval": None}
        arguments = _arguments(
            tmp_path / f"on_{replicas}", corpus, **layout, **more, optimizer__name="adamw", training__steps=8
        )
        train_all(replicas, [arguments])
        logged = [line for line in lines(tmp_path / f"on_{replicas}") if "loss" in line]
        assert [line["step"] for line in logged] == [7, 8]
        firsts.append(logged[0])
    for key in ("loss", "tokens_seen"):
        assert firsts[0][key] == pytest.approx(firsts[1][key], abs=1e-5)
    # Replicas of two ranks each decide, and train, as replicas of one: norms are of whole weights.
    assert _syncs(split) == _syncs(whole) == [(1, "warm-up"), (4, "max_interval")]
    assert column(split, "sync/rmmc_max")[2:] == pytest.approx(column(whole, "sync/rmmc_max")[2:], rel=1e-3)
    assert column(split, "loss") == pytest.approx(column(whole, "loss"), abs=1e-5)


def test_codes_that_would_send_nothing_are_refused(tmp_path):
    """Whether a momentum goes by its factors depends on the model's sizes and on how it is sharded."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    dion = {
        "optimizer__name": "dion", "optimizer__scalar__name": "sgd", "sync__exchange_dtype": "int4",
        "sync__policy": "scheduled", "sync__threshold": None, "sync__max_interval": None,
        "checkpoint__enable": False, "training__steps": 1,
    }  # fmt: skip
    large, small = (
        _arguments(tmp_path / str(rank), corpus, **dion, optimizer__dion__rank_fraction=rank)
        for rank in (0.99, 0.25)
    )
    refused, runs = train_each(2, [large, small])
    for code, message in refused:
        assert code == 2 and 'sync.exchange_dtype = "int4": ' in message and "rank_fraction" in message
    assert [code for code, _ in runs] == [0, 0]
