from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titanforge.config.sections import JobConfig
from titanforge.metrics import MetricsLogger, read_metrics
from titanforge.metrics.eta import EtaEstimator
from titanforge.metrics.logger import read_scalars
from titanforge.metrics.sinks.jsonl import JsonlSink


@dataclasses.dataclass
class Place:
    """A process's place in the run."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009


class Model(nn.Linear):
    """Small, and it says what a token costs."""

    def __init__(self) -> None:
        super().__init__(64, 64)

    def flops_per_token(self, seq_len: int) -> float:
        return 1e6 * seq_len


class Recorder:
    """A sink that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.samples: list[tuple[str, str, int]] = []
        self.closed = False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.lines.append({"step": step} | values)

    def log_sample(self, prompt: str, text: str, step: int) -> None:
        self.samples.append((prompt, text, step))

    def close(self) -> None:
        self.closed = True


def config_for(folder: Path, steps: int = 12, log_freq: int = 5) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.training.steps = steps
    config.training.seq_len = 2
    config.metrics.log_freq = log_freq
    return config


def make(folder: Path, world_size: int = 1, **options: Any) -> tuple[MetricsLogger, Recorder]:
    sink = Recorder()
    place = Place(world_size=world_size)
    return MetricsLogger(config_for(folder), {}, place, Model(), None, sinks=[sink], **options), sink


LINE: dict[str, Any] = {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1}


def test_first_last_and_every_log_freq(tmp_path: Path) -> None:
    logger, _ = make(tmp_path)
    assert [step for step in range(1, 13) if logger.due(step)] == [1, 5, 10, 12]


def test_rates_count_all_ranks_and_leave_pauses_out(tmp_path: Path) -> None:
    logger, sink = make(tmp_path, world_size=8, resume_step=3, tokens_seen=100)
    logger.device_peak_flops = 1e9
    begin = time.perf_counter()
    for step in (4, 5):
        logger.begin_step()
        with logger.data_loading():
            time.sleep(0.02)
        time.sleep(0.02)
        if step == 4:
            assert logger.end_step(4, tokens_seen=300, **LINE) is None
            busy = time.perf_counter() - begin
            with logger.pause():
                time.sleep(0.3)
            begin = time.perf_counter() - busy
    line = logger.end_step(5, tokens_seen=500, **LINE | {"loss": torch.tensor(2.5)})
    busy = time.perf_counter() - begin
    assert line is not None and line == {k: v for k, v in sink.lines[0].items() if k != "step"}
    assert line["loss"] == 2.5 and line["tokens_seen"] == 500
    assert 400 / (busy + 0.05) < line["tokens_per_second"] < 400 / (busy - 0.05 if busy > 0.1 else 0.07)
    assert line["tokens_per_second_per_device"] == line["tokens_per_second"] / 8
    assert line["tflops_per_second"] == pytest.approx(line["tokens_per_second_per_device"] * 2e6 / 1e12)
    assert line["mfu"] == pytest.approx(line["tokens_per_second_per_device"] * 2e6 / 1e9)
    assert line["step_seconds"] == pytest.approx(400 / line["tokens_per_second"] / 2)
    assert 0.04 / (busy + 0.05) < line["data_loading_share"] < 0.9
    # The pause counts for the time left: 7 steps at more than 0.15 s each.
    assert line["eta_seconds"] > 7 * 0.15
    assert line["resumed_from"] == 3
    following = logger.end_step(10, tokens_seen=500, **LINE)
    assert following is not None and "resumed_from" not in following
    assert following["tokens_per_second"] == 0 and following["data_loading_share"] == 0


def test_no_peak_means_null_mfu(tmp_path: Path) -> None:
    logger, _ = make(tmp_path)
    logger.begin_step()
    line = logger.end_step(1, tokens_seen=10, **LINE)
    assert line is not None and line["mfu"] is None and line["tflops_per_second"] > 0


def test_tensors_are_read_exactly_and_by_logging_ranks_only(tmp_path: Path) -> None:
    loss = torch.tensor(0.1, dtype=torch.float32, requires_grad=True) * 1
    values = read_scalars({"loss": loss, "tokens": torch.tensor([12345678901]), "lr": 0.1, "note": None})
    assert values == {"loss": loss.item(), "tokens": 12345678901, "lr": 0.1, "note": None}
    assert isinstance(values["tokens"], int)
    with pytest.raises(ValueError, match="grad_norm"):
        read_scalars({"grad_norm": torch.ones(2)})
    # A meta tensor cannot be read: reading at a quiet step, or on a quiet rank, would raise.
    unreadable = LINE | {"loss": torch.empty((), device="meta")}
    logger, _ = make(tmp_path)
    logger.begin_step()
    assert logger.end_step(2, tokens_seen=1, **unreadable) is None
    quiet = MetricsLogger(config_for(tmp_path), {}, Place(rank=1, world_size=2), Model(), None)
    quiet.begin_step()
    assert quiet.end_step(1, tokens_seen=1, **unreadable) is None
    assert quiet.log_validation(1, loss=unreadable["loss"], tokens=1) is None
    quiet.log_sample(1, "a", "b")
    assert not list(tmp_path.iterdir())


def test_validation_and_samples(tmp_path: Path) -> None:
    logger, sink = make(tmp_path)
    logger.log_validation(5, loss=torch.tensor(2.0), tokens=torch.tensor(640))
    assert {k: v for k, v in sink.lines[0].items() if k != "time"} == {
        "step": 5,
        "validation_loss": 2.0,
        "validation_tokens": 640,
    }
    logger.log_sample(5, "def ", "f(x):")
    logger.close()
    assert sink.samples == [("def ", "f(x):", 5)]
    assert read_metrics(tmp_path / "samples.jsonl") == [{"step": 5, "prompt": "def ", "text": "f(x):"}]


def test_close_closes_sinks_once(tmp_path: Path) -> None:
    logger, sink = make(tmp_path)
    logger.close()
    logger.close()
    assert sink.closed and logger.end_step(1, tokens_seen=1, **LINE) is None


def test_eta_forgets_the_first_interval() -> None:
    eta = EtaEstimator(total_steps=100)
    assert eta.update(1, 1, 50.0) == pytest.approx(99 * 50)  # compiling
    assert eta.update(10, 9, 9.0) == pytest.approx(90 * 1.0)
    assert eta.update(20, 10, 20.0) == pytest.approx(80 * (0.8 * 1.0 + 0.2 * 2.0))
    assert eta.update(100, 80, 80.0) == 0


def test_configured_sinks_get_the_promised_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    config = config_for(tmp_path, steps=4, log_freq=1)
    config.metrics.enable_tensorboard = True
    logger = MetricsLogger(config, {}, Place(), model, optimizer)
    for step in (1, 2):
        logger.begin_step()
        optimizer.zero_grad()
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        logger.end_step(
            step, loss=torch.tensor(1.0), grad_norm=torch.tensor(2.0), lr=1e-3, tokens_seen=2 * step
        )
    logger.log_validation(2, loss=0.9, tokens=64)
    logger.log_sample(2, "import os", "\nprint")
    logger.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second, validation = (json.loads(line) for line in lines)
    promised = (
        "step loss grad_norm lr tokens_per_second tflops_per_second mfu data_loading_share peak_memory_gib "
    )
    promised += (
        "memory/weights_gib memory/states_gib memory/gradients_gib memory/activations_gib tokens_seen "
    )
    promised += "eta_seconds time"
    assert set(promised.split()) <= set(first) == set(second)
    assert first["mfu"] is None and second["tokens_seen"] == 4
    weights = 4 * 64 * 65
    assert second["memory/weights_gib"] * 2**30 == pytest.approx(weights)
    assert second["memory/gradients_gib"] * 2**30 == pytest.approx(weights)
    assert second["memory/states_gib"] * 2**30 == pytest.approx(
        2 * weights, abs=16
    )  # and torch's step counters
    assert validation["validation_loss"] == 0.9
    printed = capsys.readouterr().out
    assert printed.count("grad") == 2 and printed.endswith("sample after step 2:\n  | import os\n  | print\n")
    assert list((tmp_path / "tb").glob("events*"))


def test_sinks_by_rank(tmp_path: Path) -> None:
    config = config_for(tmp_path, log_freq=1)
    config.metrics.enable_tensorboard = True
    config.metrics.save_for_all_ranks = True
    for rank in (0, 1):
        logger = MetricsLogger(config, {}, Place(rank, 2), Model(), None)
        logger.begin_step()
        logger.end_step(1, tokens_seen=1, **LINE | {"loss": float(rank)})
        logger.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["loss"] == 0.0
    assert read_metrics(tmp_path / "metrics_rank1.jsonl")[0]["loss"] == 1.0
    assert list((tmp_path / "tb_rank1").glob("events*"))


def test_sync_events_go_to_the_file_alone_ahead_of_the_next_line(tmp_path: Path) -> None:
    config, recorder = config_for(tmp_path), Recorder()
    file = JsonlSink(tmp_path / "metrics.jsonl")
    logger = MetricsLogger(config, {}, Place(), Model(), None, sinks=[recorder, file])
    for step in (1, 2, 3, 4, 5):
        logger.begin_step()
        if step in (2, 4):
            logger.sync_events(step, [{"sync": "rmmc", "sync/drift": torch.tensor(0.5)}])
        logger.end_step(step, tokens_seen=step, **LINE)
    logger.sync_events(5, [{"sync": "checkpoint", "sync/drift": 0.0}])
    logger.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r.get("sync")) for r in records] == [
        (1, None), (2, "rmmc"), (4, "rmmc"), (5, None), (5, "checkpoint"),
    ]  # fmt: skip
    assert records[1]["sync/drift"] == 0.5
    assert [line["step"] for line in recorder.lines] == [1, 5]
