from __future__ import annotations

import errno
import io
import json
import math
import os
from pathlib import Path

import pytest

from titanforge.metrics.sinks.console import ConsoleSink, format_duration
from titanforge.metrics.sinks.jsonl import JsonlSink, read_metrics
from titanforge.metrics.sinks.tensorboard import TensorBoardSink
from titanforge.metrics.sinks.wandb import WandbSink, choose_mode


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(path: Path, steps: range, start_step: int = 0, loss: float = 1.0) -> None:
    sink = JsonlSink(path, start_step)
    for step in steps:
        sink.log({"loss": loss}, step)
    sink.close()


def test_jsonl_resume_keeps_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8), loss=1.0)
    # Killed after step 7, last checkpoint at step 4; then killed again at 6 and resumed from 6.
    write(path, range(5, 7), start_step=4, loss=2.0)
    write(path, range(7, 10), start_step=6, loss=3.0)
    assert steps_of(path) == list(range(1, 10))
    assert [r["loss"] for r in read_metrics(path)] == [1.0] * 4 + [2.0] * 2 + [3.0] * 3


def test_jsonl_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    write(path, range(3, 5), start_step=2)
    assert steps_of(path) == [1, 2, 3, 4]


def test_jsonl_line_is_on_disk_before_close(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log({"loss": 1.0}, 1)
    assert steps_of(tmp_path / "metrics.jsonl") == [1]
    sink.close()


def test_jsonl_on_a_full_disk_loses_lines_and_not_the_run(tmp_path, monkeypatch, caplog) -> None:
    write, room = os.write, [10_000]

    def limited(descriptor: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    monkeypatch.setattr(os, "write", limited)
    sink.log({"loss": 1.0}, 1)
    room[0] = 5
    for step in (2, 3):
        sink.log({"loss": 1.0}, step)
    room[0] = 10_000
    for step in (4, 5):
        sink.log({"loss": 1.0}, step)
    sink.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 4, 5]
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert (
        len(told) == 1 and "step 2" in told[0] and "No space left" in told[0] and "job.dump_folder" in told[0]
    )


def test_jsonl_fresh_start_moves_the_former_run_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3), loss=1.0)
    write(path, range(1, 4), loss=2.0)
    write(path, range(1, 2), loss=3.0)
    assert steps_of(path) == [1]
    assert steps_of(tmp_path / "metrics.1.jsonl") == [1, 2]
    assert steps_of(tmp_path / "metrics.2.jsonl") == [1, 2, 3]


def test_jsonl_nonfinite_values_stay_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log({"loss": math.nan, "grad_norm": math.inf, "lr": 0.1, "mfu": None}, 1)
    sink.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["loss"] is None and record["grad_norm"] is None and record["mfu"] is None
    assert record["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}
    assert record["lr"] == 0.1


def test_read_metrics_refuses_another_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("hello\nworld\n")
    with pytest.raises(ValueError, match="not a metrics file"):
        read_metrics(tmp_path / "x.jsonl")


LINE = {
    "loss": 2.345678,
    "grad_norm": 0.987,
    "lr": 3e-4,
    "tokens_per_second": 12345.6,
    "tflops_per_second": 412.3,
    "mfu": 0.417,
    "data_loading_share": 0.012,
    "peak_memory_gib": 61.5,
    "eta_seconds": 3725.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_console_line_is_complete_and_aligned() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(1000, stream=stream)
    sink.log(LINE, 1)
    sink.log(LINE | {"loss": 12.5, "mfu": None, "eta_seconds": None, "tokens_per_second": 98.0}, 1000)
    first, second = stream.getvalue().splitlines()
    for text in (
        "1/1000",
        "2.3457",
        "0.987",
        "3.00e-04",
        "12,346",
        "412.30",
        "41.7%",
        "1.2%",
        "61.50GiB",
        "1:02:05",
    ):
        assert text in first
    assert len(first) == len(second)
    assert [i for i, c in enumerate(first) if first[i : i + 3] == "MFU"] == [second.index("MFU")]
    assert "\033" not in first


def test_console_colors_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    ConsoleSink(10, stream=terminal).log(LINE, 1)
    assert "\033[32mloss" in terminal.getvalue()
    plain = Terminal()
    ConsoleSink(10, colors=False, stream=plain).log(LINE, 1)
    assert "\033" not in plain.getvalue()


def test_console_validation_line() -> None:
    stream = io.StringIO()
    ConsoleSink(100, stream=stream).log({"validation_loss": 2.1, "validation_tokens": 40960, "time": 1.0}, 20)
    assert "validation loss   2.1000" in stream.getvalue() and "40,960" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (3725, "1:02:05"), (93784, "1d02:03:04"), (None, "-"), (math.inf, "-")],
)
def test_format_duration(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_tensorboard_is_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in range(1, 6):
        sink.log({"loss": 1.0 / step, "mfu": None, "memory/weights_gib": 2.0, "time": 0.0}, step)
    sink.close()
    resumed = TensorBoardSink(tmp_path, start_step=3)
    resumed.log({"loss": 9.0}, 4)
    resumed.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "memory/weights_gib"}
    points = [(p.step, round(p.value, 4)) for p in events.Scalars("loss")]
    assert points == [(1, 1.0), (2, 0.5), (3, 0.3333), (4, 9.0)]


@pytest.fixture
def no_wandb_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    import os

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_wandb_mode(no_wandb_login: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_mode() == "offline"
    monkeypatch.setenv("WANDB_MODE", "online")  # would prompt, or fail, without a key
    assert choose_mode() == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode() is None
    monkeypatch.delenv("WANDB_MODE")
    no_wandb_login.write_text("machine api.wandb.ai login user password secret\n")
    assert choose_mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")  # logged in elsewhere only
    assert choose_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert choose_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert choose_mode() is None


def test_wandb_offline_run_and_resume(
    no_wandb_login: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB_PROJECT", "from-the-environment")
    config = {"training": {"steps": 4}, "model": {"name": "llama3"}}
    sink = WandbSink("ours", tmp_path, config, description="a test")
    assert sink._run.project == "from-the-environment"
    assert sink._run.config["training"] == {"steps": 4}
    sink.log({"loss": 1.0, "mfu": None}, 1)
    run_id = sink._run.id
    sink.close()
    resumed = WandbSink("ours", tmp_path, config, start_step=2)
    resumed.log({"loss": 0.5}, 3)
    resumed.close()
    assert resumed._run.id == run_id
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) >= 1 and all(run_id in file.name and file.stat().st_size > 0 for file in files)
    fresh = WandbSink("ours", tmp_path, config)
    fresh.close()
    assert fresh._run.id != run_id
