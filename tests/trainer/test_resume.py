"""Training in three pieces is training in one, bit for bit; on other layouts to 1e-5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.runs import (
    argv,
    assert_same_checkpoint,
    assert_same_steps,
    column,
    distance,
    greatest_difference,
    read_checkpoint,
    train_all,
    write_corpus,
)
from titanforge.checkpoint import json_state
from titanforge.optim import lr_factor

VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "lion": {"optimizer__name": "Lion", "optimizer__lr": 1e-4},
    "fused": {"optimizer__implementation": "fused"},
    "foreach": {"optimizer__implementation": "foreach"},
    "master": {"training__dtype": "bfloat16", "optimizer__master_weights": "float32"},
    "workers": {"training__dataloader__num_workers": 1},
    # A period of three: the second piece begins within one.
    "dobb": {
        "optimizer__name": "Dobb",
        "optimizer__dobb__blocks": 4,
        "optimizer__dobb__period": 3,
    },
}
REPLICAS = {"parallelism__data_parallel_replicate_degree": 2}
SHARDS = {"parallelism__data_parallel_replicate_degree": 1}


def _run(folder: Path, corpus: Path, steps: int, **more: Any) -> list[str]:
    return argv(
        folder,
        corpus,
        training__steps=steps,
        training__local_batch_size=2,
        training__global_batch_size=8,
        lr_scheduler__total_steps=6,
        checkpoint__enable=True,
        data__validation_fraction=0,
        **more,
    )


@pytest.mark.parametrize("layout", [REPLICAS, SHARDS], ids=["replicas", "shards"])
def test_six_steps_are_two_and_two_and_two(tmp_path, layout):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=16)
    names = ["lion", "fused", "master"] if layout is REPLICAS else ["adamw", "foreach", "workers", "dobb"]
    runs = []
    for name in names:
        more = layout | VARIANTS[name]
        runs += [_run(tmp_path / name / "whole", corpus, 6, **more)]
        runs += [_run(tmp_path / name / "pieces", corpus, steps, **more) for steps in (2, 4, 6)]
    train_all(2, runs)
    for name in names:
        whole, pieces = tmp_path / name / "whole", tmp_path / name / "pieces"
        assert_same_steps(pieces, whole)
        assert_same_checkpoint(pieces / "checkpoint/step-6", whole / "checkpoint/step-6")
        _assert_complete(whole)


def _assert_complete(folder: Path) -> None:
    """That what is compared moves at all: states, schedule, and the data past the end of an epoch."""
    peak = 1e-4 if "lion" in str(folder) else 8e-4
    wanted = [peak * lr_factor(step, 2, 6, 0.8, "linear", 0.0) for step in range(6)]
    assert column(folder, "lr") == pytest.approx(wanted, rel=1e-6)
    saved = read_checkpoint(folder / "checkpoint/step-6")
    states = [value for name, value in saved.items() if name.startswith("optimizer.state.")]
    assert len(states) >= len([name for name in saved if name.startswith("model.")])
    assert all(bool(state.any()) for state in states)
    streams = json_state.decode(json.loads(saved["json:dataloader"]))["streams"]
    assert (streams[:, 0] > 0).all(), "every stream went past the end of an epoch"


def test_a_run_moves_from_replicas_to_shards_to_one_process(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=16)
    moved, whole = tmp_path / "moved", tmp_path / "whole"
    compiled = {
        "compile__enable": True,
        "compile__backend": "aot_eager",
        "activation_checkpoint__mode": "full",
    }
    train_all(2, [_run(moved, corpus, 2, **REPLICAS), _run(moved, corpus, 4, **SHARDS, **compiled)])
    # A run that is done and started again has nothing to train and harms nothing; it may be asked to export.
    export = {"checkpoint__last_save_model_only": True}
    again = [_run(moved, corpus, 6), _run(moved, corpus, 6), _run(moved, corpus, 6, **export)]
    train_all(1, [*again, _run(whole, corpus, 6)])
    exported = load_file(moved / "checkpoint/export-step-6/model.safetensors")
    saved = read_checkpoint(moved / "checkpoint/step-6")
    assert all(torch.equal(weight, saved[f"model.{name}"]) for name, weight in exported.items())
    assert column(moved, "lr") == column(whole, "lr")
    assert column(moved, "tokens_seen") == column(whole, "tokens_seen")
    assert greatest_difference(moved, whole) < 1e-5
    assert distance(moved / "checkpoint/step-6", whole / "checkpoint/step-6") < 1e-5
    ours, theirs = (read_checkpoint(f / "checkpoint/step-6") for f in (moved, whole))
    assert ours["json:dataloader"] == theirs["json:dataloader"]


def test_an_asynchronous_checkpoint_holds_the_step_it_is_named_after(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=16)
    whole, saved = tmp_path / "whole", tmp_path / "saved"
    background = {"checkpoint__async_mode": "async", "checkpoint__interval": 1, **SHARDS}
    runs = [
        _run(whole, corpus, 6, checkpoint__interval=1, **SHARDS),
        _run(saved, corpus, 5, **background),
        # Step 3 was written in the background while steps 4 and 5 changed the weights.
        _run(saved, corpus, 6, checkpoint__load_step=3, **background),
    ]
    train_all(2, runs[:2])
    for step in (1, 2, 3, 4, 5):
        assert_same_checkpoint(saved / f"checkpoint/step-{step}", whole / f"checkpoint/step-{step}")
    train_all(2, runs[2:])
    assert_same_steps(saved, whole)
    assert_same_checkpoint(saved / "checkpoint/step-6", whole / "checkpoint/step-6")
