"""What a run says at its start of momenta that cross replicas, beside what its ledger then counts."""

from __future__ import annotations

import contextlib
import io

from tests.distributed_harness import run_distributed
from tests.trainer.runs import argv, write_corpus
from titanforge.config import load_config
from titanforge.trainer import Trainer

LAYOUTS = {  # of four ranks: replicas, and what splits each
    "whole": (4, {}),
    "shards": (2, {"parallelism__data_parallel_shard_degree": 2}),
    "tensor": (2, {"parallelism__tensor_parallel_degree": 2}),
    "stages": (2, {"parallelism__pipeline_parallel_degree": 2}),
}


def _lines_and_traffic(rank: int, world_size: int, runs: dict[str, list[str]]) -> dict[str, tuple]:
    found = {}
    for name, arguments in runs.items():
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            trainer = Trainer(load_config(arguments), "cpu")
            trainer.train()
        entry = trainer.ledger.total("dp_replicate", "factors")
        trainer.close()
        lines = [line.strip() for line in said.getvalue().splitlines() if "replicas average" in line]
        found[name] = lines, entry.bytes
    return found


def test_the_start_says_whether_momenta_go_by_factors_or_densely(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    common = {
        "model__n_kv_heads": 2,
        "training__steps": 1,
        "training__local_batch_size": 2,
        "optimizer__name": "dion",
        "optimizer__dion__rank_fraction": 0.25,
        "sync__reduce": "states",
    }

    runs = {
        name: argv(
            tmp_path / name, corpus, **common, **split, parallelism__data_parallel_replicate_degree=replicas
        )
        for name, (replicas, split) in LAYOUTS.items()
    }
    found = run_distributed(_lines_and_traffic, 4, runs)[0]

    ((line,), sent) = found["whole"]
    values = sent // 4  # of one step, in float32
    assert line == f"replicas average {values:,} values of factors at a sync, sent as float32"
    for name, key in (("shards", "data_parallel_shard_degree"), ("tensor", "tensor_parallel_degree")):
        ((line,), sent) = found[name]
        assert sent == 0
        assert line == (
            f"replicas average momenta densely, not by {values:,} values of factors: sync.low_rank needs "
            f"weights that are whole within a replica, and parallelism.{key} = 2 cuts them"
        )
    ((line,), sent) = found["stages"]
    told = "values of factors of this rank's stages at a sync, sent as float32"
    assert 0 < sent < 4 * values and line == f"replicas average {sent // 4:,} {told}"
