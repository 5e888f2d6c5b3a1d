"""Experts in whole runs: the load is that of the global batch, however many ranks share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import argv, column, read_checkpoint, train_all, write_corpus

MOE = {
    "model__name": "qwen3",
    "model__flavor": "debugmodel_moe",
    "model__head_dim": 16,
    "model__hidden_dim": 32,
    "model__n_experts": 6,
    "model__n_experts_per_token": 2,
    "training__steps": 3,
    "training__global_batch_size": 4,
    "training__local_batch_size": 1,
    "metrics__log_freq": 1,
    "checkpoint__enable": True,
    "checkpoint__interval": 3,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


def test_load_loss_and_bias_do_not_depend_on_the_ranks(corpus, tmp_path):
    """One rank with four micro-batches, two replicas, two shards: the same tokens, the same load."""
    options = {**MOE, "model__moe_balancing": "bias", "model__moe_bias_update_rate": 0.01}
    train_all(1, [argv(tmp_path / "one", corpus, **options)])
    replicas = {
        "parallelism__data_parallel_replicate_degree": 2,
        "parallelism__data_parallel_shard_degree": 1,
    }
    train_all(
        2,
        [
            argv(tmp_path / "replicas", corpus, **options, **replicas),
            argv(tmp_path / "shards", corpus, **options),
        ],
    )
    for name in ("replicas", "shards"):
        for key in ("router/max_load", "router/min_load", "router/imbalance"):
            assert column(tmp_path / name, key) == pytest.approx(column(tmp_path / "one", key), rel=1e-4), key
        losses = column(tmp_path / name, "loss")
        assert losses == pytest.approx(column(tmp_path / "one", "loss"), rel=1e-5)
    bias = "model.layers.0.feed_forward.router.expert_bias"
    stored = [read_checkpoint(tmp_path / name / "checkpoint/step-3")[bias] for name in ("one", "shards")]
    assert stored[0].abs().max() > 0.005 and stored[0].tolist() == stored[1].tolist()


def test_resuming_goes_on_from_the_stored_bias(corpus, tmp_path):
    options = {**MOE, "model__moe_balancing": "bias", "model__moe_bias_update_rate": 0.05}
    longer = {**options, "training__steps": 4, "checkpoint__interval": 2, "lr_scheduler__total_steps": 4}
    train_all(1, [argv(tmp_path / "whole", corpus, **longer)])
    train_all(
        1,
        [
            argv(tmp_path / "twice", corpus, **{**longer, "training__steps": 2}),
            argv(tmp_path / "twice", corpus, **longer),
        ],
    )
    for key in ("loss", "router/max_load", "router/imbalance"):
        assert column(tmp_path / "twice", key) == column(tmp_path / "whole", key), key
