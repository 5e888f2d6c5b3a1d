"""On a GPU: runs whose steps are one CUDA graph are the eager runs bit for bit, and replays read no host
memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.trainer.runs import argv, assert_same_checkpoint, assert_same_steps, training_lines, write_corpus
from titanforge.captured import CapturedStep
from titanforge.config import load_config
from titanforge.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE: dict[str, Any] = {
    "model__dim": 256,
    "model__n_heads": 4,
    "model__n_kv_heads": 2,
    "training__seq_len": 256,
    "training__dtype": "bfloat16",
    "optimizer__lr": 1e-3,
    "training__max_norm": 0.0,
}
FORGE = {"forge__enable": True}
DOBB = {"optimizer__name": "Dobb", "optimizer__dobb__blocks": 4, "optimizer__dobb__period": 3}
COMPILED = {"compile__enable": True}
EIGHT_BITS = {"optimizer__state_dtype": "int8", "optimizer__master_weights": "stochastic_rounding"}
EXPERTS = {"model__name": "qwen3", "model__flavor": "debugmodel_moe", "model__head_dim": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "native": {"training__max_norm": 1.0, "training__global_batch_size": 4, "training__local_batch_size": 2},
    "native compiled": {**COMPILED, "training__max_norm": 1.0},
    "native fp8": {"optimizer__state_dtype": "fp8"},
    "forge": {**FORGE, "training__global_batch_size": 4, "training__local_batch_size": 2},
    "forge compiled int8": {**FORGE, **COMPILED, **EIGHT_BITS},
    "forge compiled fp8": {**FORGE, **COMPILED, "optimizer__state_dtype": "fp8"},
    "forge lagged full": {
        **FORGE,
        "training__max_norm": 1.0,
        "forge__clip": "lagged",
        "activation_checkpoint__mode": "full",
    },
    "forge compiled selective": {**FORGE, **COMPILED, "activation_checkpoint__mode": "selective"},
    "forge muon": {**FORGE, **COMPILED, "optimizer__name": "Muon", "optimizer__state_dtype": "bfloat16"},
    "dion": {"optimizer__name": "Dion"},
    "forge compiled dion": {
        **FORGE,
        **COMPILED,
        "optimizer__name": "Dion",
        "optimizer__dion__rank_fraction": 0.25,
        "optimizer__state_dtype": "bfloat16",
    },
    "dobb": DOBB,
    "forge compiled dobb": {**FORGE, **COMPILED, **DOBB, "optimizer__state_dtype": "bfloat16"},
    "forge adafactor": {**FORGE, "optimizer__name": "Adafactor"},
    "forge experts": {**FORGE, **EXPERTS},
    "experts muon": {**EXPERTS, "optimizer__name": "Muon"},
    "no document mask": {**FORGE, **COMPILED, "data__document_mask": False},
}


def build(folder: Path, corpus: Path, **more: Any) -> Trainer:
    options = {
        "training__steps": 8,
        "checkpoint__enable": True,
        "checkpoint__interval": 5,
        "validation__enable": True,
        "validation__freq": 4,
        "validation__steps": 1,
        "data__validation_fraction": 0.2,
        "metrics__log_freq": 1,
    }
    return Trainer(load_config(argv(folder, corpus, **{**options, **SHAPE, **more})), "cuda")


def run(folder: Path, corpus: Path, **more: Any) -> bool:
    """Whether its steps were captured."""
    trainer = build(folder, corpus, **more)
    try:
        trainer.train()
        captured = trainer.device_step.captured
        return captured is not None and captured.captured
    finally:
        trainer.close()


@pytest.mark.parametrize("name", VARIANTS)
def test_captured_is_eager(name: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 200)
    assert not run(tmp_path / "eager", corpus, **VARIANTS[name])
    assert run(tmp_path / "captured", corpus, compile__cuda_graph=True, **VARIANTS[name])
    assert_same_steps(tmp_path / "captured", tmp_path / "eager")
    assert_same_checkpoint(tmp_path / "captured/checkpoint/step-8", tmp_path / "eager/checkpoint/step-8")
    ours, theirs = (training_lines(tmp_path / kind)[-1] for kind in ("captured", "eager"))
    assert ours["memory/gradients_gib"] == theirs["memory/gradients_gib"]
    assert ours["peak_memory_gib"] > ours["memory/weights_gib"] + ours["memory/states_gib"]


@pytest.mark.parametrize(
    "more",
    [FORGE, {}, {**FORGE, "optimizer__name": "Dion"}, {"optimizer__name": "Dion"}],
    ids=["forge", "native", "forge dion", "dion"],
)
def test_a_replay_copies_nothing_from_the_host(more: dict[str, Any], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 200)
    trainer = build(tmp_path / "run", corpus, compile__cuda_graph=True, validation__enable=False, **more)
    try:
        for _ in range(5):
            trainer.train_step()
        captured = trainer.device_step.captured
        assert isinstance(captured, CapturedStep) and captured.captured
        trainer.optimizer.begin_captured_step(1)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            captured.graph.replay()
            torch.cuda.synchronize()
    finally:
        trainer.close()
    names = [event.name for event in seen.events() or []]
    assert len(names) > 50
    assert [name for name in names if "HtoD" in name or "DtoH" in name] == []
