from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from titanforge.config.sections import Profiling
from titanforge.metrics import Profiler
from titanforge.metrics.profiling import absolute_schedule


def train(profiler: Profiler, steps: int) -> None:
    first = profiler.step_number + 1
    for step in range(first, first + steps):
        with profiler.recording(step):
            torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.close()
    profiler.close()


def test_traces_name_the_steps_of_the_run_also_after_resume(tmp_path: Path) -> None:
    config = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1)
    train(Profiler(config, tmp_path / "whole", rank=3), 8)
    train(Profiler(config, tmp_path / "resumed", rank=3, start_step=2), 6)
    for run in ("whole", "resumed"):
        names = sorted(p.relative_to(tmp_path / run).as_posix() for p in (tmp_path / run).rglob("*.json"))
        assert names == ["profile_traces/step_4/rank3_trace.json", "profile_traces/step_8/rank3_trace.json"]
    trace = json.loads((tmp_path / "resumed" / "profile_traces" / "step_4" / "rank3_trace.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert names.count("aten::mm") == 1  # one active step


def test_schedule_is_the_uninterrupted_one_from_any_step() -> None:
    whole = absolute_schedule(0, freq=10, active=2, warmup=3)
    for start in range(1, 25):
        resumed = absolute_schedule(start, freq=10, active=2, warmup=3)
        assert [resumed(n) for n in range(30)] == [whole(start + n) for n in range(30)]


def test_impossible_schedule_names_its_keys() -> None:
    config = Profiling(enable_profiling=True, profile_freq=3, profiler_warmup=3, profiler_active=1)
    with pytest.raises(ValueError, match=r"profiling\.profile_freq = 3 .*profiler_warmup = 3"):
        Profiler(config, ".")


def test_out_of_memory_surfaces_whatever_else_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way of the snapshot folder")
    config = Profiling(enable_profiling=True, enable_memory_snapshot=True, save_memory_snapshot_folder="file")
    profiler = Profiler(config, tmp_path, device_type="cpu")
    assert not profiler._snapshots  # the configuration's check has said so
    # On a machine without CUDA every snapshot call fails: just what must not hide the error.
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    profiler._snapshots = True
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(torch.OutOfMemoryError, match="tried to allocate"),
        profiler.recording(1),
    ):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")
    messages = [r.message for r in caplog.records]
    assert "out of memory in step 1" in messages
    assert any("could not write the memory snapshot" in m for m in messages)


def test_a_cut_trace_is_not_written(tmp_path: Path) -> None:
    profiler = Profiler(
        Profiling(enable_profiling=True, profile_freq=3, profiler_active=2, profiler_warmup=0), tmp_path
    )
    for step in (1, 2):
        with profiler.recording(step):
            pass
    with pytest.raises(KeyError), profiler.recording(3):
        raise KeyError("x")
    profiler.close()
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_out_of_memory_leaves_a_snapshot(tmp_path: Path) -> None:
    config = Profiling(enable_memory_snapshot=True, profile_freq=2)
    profiler = Profiler(config, tmp_path, device_type="cuda")
    for step in (1, 2, 3):
        with profiler.recording(step):
            torch.empty(2**20, device="cuda")
    with pytest.raises(torch.OutOfMemoryError), profiler.recording(4):
        torch.empty(2**50, device="cuda")
    profiler.close()
    folder = tmp_path / "memory_snapshot"
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*.pickle")}
    assert set(sizes) == {"step_2/rank0_memory.pickle", "step_4_oom/rank0_memory.pickle"}
    assert min(sizes.values()) > 1000
