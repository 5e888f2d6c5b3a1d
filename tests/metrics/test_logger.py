from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from titanforge.config.sections import JobConfig
from titanforge.metrics import MetricsLogger, read_metrics
from titanforge.metrics.eta import EtaEstimator
from titanforge.metrics.logger import build_sinks, read_scalars


class Recorder:
    """A sink that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.closed = False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.lines.append({"step": step} | values)

    def close(self) -> None:
        self.closed = True


def make(**options: Any) -> tuple[MetricsLogger, Recorder]:
    sink = Recorder()
    return MetricsLogger([sink], **({"log_freq": 5, "total_steps": 12} | options)), sink


def test_first_last_and_every_log_freq() -> None:
    logger, _ = make()
    assert [step for step in range(1, 13) if logger.should_log(step)] == [1, 5, 10, 12]


def test_rates_count_every_rank_once_and_leave_pauses_out() -> None:
    # 8 ranks, of which 4 read different tokens (the others share a sequence, say).
    logger, sink = make(
        data_parallel_degree=4,
        num_devices=8,
        flops_per_token=1e6,
        device_peak_flops=1e9,
        start_step=3,
        tokens_seen=100,
    )
    logger.start()
    begin = time.perf_counter()
    for _ in range(2):
        with logger.data_loading():
            time.sleep(0.02)
        logger.count_tokens(50)
        time.sleep(0.02)
    busy = time.perf_counter() - begin
    with logger.paused():
        time.sleep(0.3)
    line = logger.log(5, {"loss": torch.tensor(2.5), "lr": 0.1})
    assert line is not None and line == {k: v for k, v in sink.lines[0].items() if k != "step"}
    assert line["tokens_seen"] == 100 + 2 * 50 * 4
    assert 400 / (busy + 0.1) < line["tokens_per_second"] <= 400 / busy
    assert line["tokens_per_second_per_device"] == line["tokens_per_second"] / 8
    assert line["tflops_per_second"] == pytest.approx(line["tokens_per_second_per_device"] * 1e6 / 1e12)
    assert line["mfu"] == pytest.approx(line["tokens_per_second_per_device"] * 1e6 / 1e9)
    assert line["step_seconds"] == pytest.approx(400 / line["tokens_per_second"] / 2)
    assert 0.04 / (busy + 0.1) < line["data_loading_share"] < 0.9
    # The pause counts for the time left: 7 steps at more than 0.15 s each.
    assert line["eta_seconds"] > 7 * 0.15
    assert line["resumed_from"] == 3
    following = logger.log(10, {"loss": 1.0})
    assert following is not None and "resumed_from" not in following
    assert following["tokens_per_second"] == 0 and following["data_loading_share"] == 0


def test_unknown_peak_means_null_mfu() -> None:
    logger, _ = make(flops_per_token=1e6, device_peak_flops=None)
    logger.count_tokens(10)
    line = logger.log(1, {"loss": 1.0})
    assert line is not None and line["mfu"] is None and line["tflops_per_second"] > 0


def test_tensors_are_read_exactly_and_at_log_steps_only() -> None:
    loss = torch.tensor(0.1, dtype=torch.float32, requires_grad=True) * 1
    values = read_scalars({"loss": loss, "tokens": torch.tensor([12345678901]), "lr": 0.1, "note": None})
    assert values == {"loss": loss.item(), "tokens": 12345678901, "lr": 0.1, "note": None}
    assert isinstance(values["tokens"], int)
    with pytest.raises(ValueError, match="grad_norm"):
        read_scalars({"grad_norm": torch.ones(2)})
    # A meta tensor cannot be read: a quiet rank that tried would raise.
    quiet = MetricsLogger([], log_freq=1, total_steps=2)
    assert quiet.log(1, {"loss": torch.empty((), device="meta")}) is None
    assert quiet.log_validation(1, torch.empty((), device="meta"), 1) is None


def test_validation_line() -> None:
    logger, sink = make()
    logger.log_validation(5, torch.tensor(2.0), torch.tensor(640))
    assert {k: v for k, v in sink.lines[0].items() if k != "time"} == {
        "step": 5,
        "validation_loss": 2.0,
        "validation_tokens": 640,
    }


def test_close_closes_sinks_once() -> None:
    logger, sink = make()
    logger.close()
    logger.close()
    assert sink.closed and logger.log(1, {"loss": 1.0}) is None


def test_eta_forgets_the_first_interval() -> None:
    eta = EtaEstimator(total_steps=100)
    assert eta.update(1, 1, 50.0) == pytest.approx(99 * 50)  # compiling
    assert eta.update(10, 9, 9.0) == pytest.approx(90 * 1.0)
    assert eta.update(20, 10, 20.0) == pytest.approx(80 * (0.8 * 1.0 + 0.2 * 2.0))
    assert eta.update(100, 80, 80.0) == 0


def config_for(folder: Path) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.training.steps = 4
    config.metrics.log_freq = 1
    config.metrics.enable_tensorboard = True
    return config


def test_built_logger_writes_the_promised_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    logger = MetricsLogger.build(
        config_for(tmp_path),
        rank=0,
        world_size=1,
        data_parallel_degree=1,
        flops_per_token=1e6,
        device="cpu",
        model=model,
        optimizer=optimizer,
    )
    for step in (1, 2):
        model(torch.randn(2, 64)).sum().backward()
        logger.observe_gradients()
        optimizer.step()
        optimizer.zero_grad()
        logger.count_tokens(2)
        logger.log(step, {"loss": 1.0, "grad_norm": torch.tensor(2.0), "lr": 1e-3})
    logger.log_validation(2, 0.9, 64)
    logger.close()
    first, second, validation = (
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
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
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert list((tmp_path / "tb").glob("events*"))


def test_sinks_by_rank(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    assert build_sinks(config, rank=1, is_logging_rank=False, start_step=0) == []
    config.metrics.save_for_all_ranks = True
    for rank in (0, 1):
        logger = MetricsLogger(build_sinks(config, rank, rank == 0, 0), log_freq=1, total_steps=4)
        logger.log(1, {"loss": float(rank)})
        logger.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["loss"] == 0.0
    assert read_metrics(tmp_path / "metrics_rank1.jsonl")[0]["loss"] == 1.0
    assert list((tmp_path / "tb_rank1").glob("events*"))
