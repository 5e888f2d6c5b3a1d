"""A captured step computes what the eager one does, bit for bit, through evaluations, checkpoints and
resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.recorded import RecordedGraph
from tests.trainer.runs import argv, assert_same_checkpoint, assert_same_steps, column, lines, write_corpus
from titanforge.captured import CapturedStep, StaticBatches
from titanforge.config import load_config
from titanforge.data import Batch
from titanforge.trainer import Trainer

GPU = torch.cuda.is_available()


def run(folder: Path, corpus: Path, steps: int = 6, **more: Any) -> Trainer:
    """On a GPU the real graph, on a CPU its stand-in."""
    arguments = argv(
        folder,
        corpus,
        training__steps=steps,
        training__global_batch_size=4,
        training__local_batch_size=2,
        lr_scheduler__total_steps=10,
        optimizer__lr=1e-2,
        checkpoint__enable=True,
        metrics__log_freq=1,
        **more,
    )
    trainer = Trainer(load_config(arguments), "cuda" if GPU else "cpu")
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr("titanforge.device_step.CudaGraph", RecordedGraph)


VARIANTS: dict[str, dict[str, Any]] = {
    "native": {
        "validation__enable": True,
        "validation__freq": 2,
        "validation__steps": 1,
        "data__validation_fraction": 0.2,
        "checkpoint__interval": 4,
    },
    "recomputed": {"activation_checkpoint__mode": "selective", "training__nonfinite_loss": "skip"},
    "forge": {"forge__enable": True, "forge__clip": "lagged"},
    "forge_muon": {"forge__enable": True, "forge__clip": "lagged", "optimizer__name": "Muon"},
    "dion": {"optimizer__name": "Dion"},
    "forge_dion": {"forge__enable": True, "forge__clip": "lagged", "optimizer__name": "Dion"},
}

DOBB: dict[str, dict[str, Any]] = {
    "side A": {"activation_checkpoint__mode": "full"},
    "of gradients": {"optimizer__dobb__source": "gradient"},
    "forge": {"forge__enable": True, "forge__clip": "lagged"},
}


@pytest.mark.parametrize("name", DOBB)
def test_refreshes_between_replays(name: str, tmp_path: Path) -> None:
    """Steps that refresh Dobb's bases run as they are; the others are one graph. A run that is
    resumed (side A) takes its refreshes at the same steps.
    """
    more = {**DOBB[name], "optimizer__name": "Dobb", "optimizer__dobb__period": 3}
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    run(tmp_path / "eager", corpus, 8, **more)
    if name == "side A":
        run(tmp_path / "captured", corpus, 2, **more)
    trainer = run(tmp_path / "captured", corpus, 8, compile__cuda_graph=True, **more)
    captured = trainer.device_step.captured
    assert captured is not None and captured.captured
    if not GPU:  # steps 1, 4 and 7 refresh; of the others three warm up
        replays = 2 if name != "side A" else 1
        assert (captured.graph.captures, captured.graph.replays) == (1, replays)  # pyright: ignore
    assert_same_steps(tmp_path / "captured", tmp_path / "eager")
    assert_same_checkpoint(tmp_path / "captured/checkpoint/step-8", tmp_path / "eager/checkpoint/step-8")


@pytest.mark.parametrize("name", VARIANTS)
def test_captured_is_eager(name: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    run(tmp_path / "eager", corpus, **VARIANTS[name])
    trainer = run(tmp_path / "captured", corpus, compile__cuda_graph=True, **VARIANTS[name])
    captured = trainer.device_step.captured
    assert captured is not None and captured.captured
    if not GPU:
        assert (captured.graph.captures, captured.graph.replays) == (1, 3)  # pyright: ignore
    assert_same_steps(tmp_path / "captured", tmp_path / "eager")
    ours, theirs = (
        [line["validation_loss"] for line in lines(tmp_path / kind) if "validation_loss" in line]
        for kind in ("captured", "eager")
    )
    assert ours == theirs and len(ours) == (3 if name == "native" else 0)
    assert_same_checkpoint(tmp_path / "captured/checkpoint/step-6", tmp_path / "eager/checkpoint/step-6")
    assert column(tmp_path / "eager", "loss")[-1] < column(tmp_path / "eager", "loss")[0]


def test_resumes_on_the_way(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    run(tmp_path / "eager", corpus)
    run(tmp_path / "captured", corpus, steps=4, compile__cuda_graph=True)
    run(tmp_path / "captured", corpus, compile__cuda_graph=True)
    assert_same_steps(tmp_path / "captured", tmp_path / "eager")
    assert_same_checkpoint(tmp_path / "captured/checkpoint/step-6", tmp_path / "eager/checkpoint/step-6")


def test_a_step_that_looks_at_a_value_is_refused_with_the_key() -> None:
    graph: Any = RecordedGraph(torch.device("cpu"))
    value = torch.ones(())
    step = CapturedStep(lambda: float(value * 2), graph, warm_up_steps=1)
    assert step() == 2.0
    with pytest.raises(RuntimeError, match=r"compile\.cuda_graph = true: .* set it to false"):
        step()


def test_capture_waits_until_the_step_is_ready() -> None:
    graph: Any = RecordedGraph(torch.device("cpu"))
    ready, freed = [False], []
    total = torch.zeros(())
    step = CapturedStep(
        lambda: total.add_(1.0),
        graph,
        warm_up_steps=1,
        ready=lambda: ready[0],
        before_capture=lambda: freed.append(1),
    )
    for _ in range(3):
        step()
    assert graph.captures == 0 and not step.captured
    ready[0] = True
    assert float(step()) == 4.0 and step.captured and (graph.captures, freed) == (1, [1])


def test_an_unusual_step_runs_as_it_is() -> None:
    graph: Any = RecordedGraph(torch.device("cpu"))
    total, usual = torch.zeros(()), [True]
    factor = [1.0]
    step = CapturedStep(lambda: total.add_(factor[0]), graph, warm_up_steps=1, usual=lambda: usual[0])
    for number, one in enumerate([False, True, True, False, True]):
        usual[0] = one
        factor[0] = 1.0 if one else 10.0
        step()
        assert step.captured == (number >= 2)
    assert float(total) == 23.0 and (graph.captures, graph.replays) == (1, 2)


def test_batches_of_another_shape_are_refused() -> None:
    static = StaticBatches(torch.device("cpu"))
    first = [Batch(*(torch.full((2, 8), part) for part in range(4)))]
    static.fill(first)
    (held,) = static.batches
    static.fill([Batch(*(part + 1 for part in first[0]))])
    assert static.batches[0] is held and int(held.tokens[0, 0]) == 1 and int(first[0].tokens[0, 0]) == 0
    with pytest.raises(RuntimeError, match=r"compile\.cuda_graph = true"):
        static.fill([Batch(*(part[:1] for part in first[0]))])
