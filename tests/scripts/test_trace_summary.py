"""Shares of a trace's time: overlaps count once, what lies outside of the steps not at all."""

from __future__ import annotations

import json

import pytest

from scripts.bench.trace_summary import lines_of, summarize_trace


def _event(cat: str, name: str, ts: float, dur: float) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_shares_of_two_steps(tmp_path):
    events = [
        _event("user_annotation", "ProfilerStep#5", 1000, 1000),
        _event("user_annotation", "ProfilerStep#6", 2000, 1000),
        _event("cpu_op", "aten::mm", 1000, 500),
        _event("cuda_runtime", "cudaLaunchKernel", 1100, 100),
        _event("cuda_runtime", "cudaDeviceSynchronize", 2500, 400),
        _event("kernel", "gemm", 900, 300),
        _event("kernel", "gemm", 1500, 400),
        _event("kernel", "ncclDevKernel_AllGather", 1800, 300),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = summarize_trace(path)
    assert found["step_ms"] == 1.0 and found["host_ms"] == pytest.approx(0.25)
    assert found["busy"] == pytest.approx(800 / 2000)
    assert found["nccl"] == pytest.approx(300 / 2000) and found["nccl_alone"] == pytest.approx(200 / 2000)
    assert found["top"][0] == ("gemm", pytest.approx(0.35), 1.0)
    assert "busy 40%" in lines_of(found)[0]
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="no ProfilerStep"):
        summarize_trace(path)
