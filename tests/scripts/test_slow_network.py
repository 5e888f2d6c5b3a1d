"""`scripts/bench/slow_network.py` without its networks: its jobs are valid, and its table is arithmetic."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from scripts.bench import slow_network
from titanforge.config import load_config, validate_config

OPTIONS = argparse.Namespace(
    replicas=2, steps=8, every_steps=8, warmup=2, dim=64, layers=2, seq_len=32, rank_fraction=0.25
)


def test_each_policy_is_a_job_for_replicas() -> None:
    for name, sync in slow_network.policies(2).items():
        config = load_config(slow_network.arguments(Path("nowhere"), OPTIONS, sync))
        assert not any("no effect" in line for line in validate_config(config, 2, "cpu")), name
        assert config.sync.policy == sync["policy"]


def _write(folder: Path, syncs: list[int], seconds: dict[int, float], sent: dict[str, int]) -> None:
    """Eight steps, of which 1 and 8 are logged."""
    folder.mkdir()
    lines = [{"step": step, "sync": "max_interval"} for step in syncs]
    first, last = ({"step": step, "loss": 1.0, **counted} for step, counted in ((1, {}), (8, sent)))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [first, *lines, last])))
    steps = [
        {"step": step, "seconds": took, "collectives": int(step not in syncs)}
        for step, took in seconds.items()
    ]
    (folder / slow_network.STEPS).write_text("\n".join(map(json.dumps, steps)))


def test_the_table_weighs_medians_by_how_often_each_kind_of_step_came(tmp_path: Path) -> None:
    every, local = tmp_path / "every", tmp_path / "local"
    _write(every, [], dict.fromkeys(range(1, 9), 1.0), {"comm/dp_replicate/gradients_bytes": 7 * 1000})
    times = {1: 9.0, 2: 9.0, 3: 0.2, 4: 0.2, 5: 1.4, 6: 0.2, 7: 0.3, 8: 0.4}  # two of warm-up are left out
    _write(local, [5], times, {"comm/dp_replicate/weights_bytes": 4000})
    found = [
        slow_network.result("10 Gb/s", name, folder, OPTIONS)
        | {"bits_per_second": 1e10, "round_trip_seconds": 0.0}
        for name, folder in (("every_step", every), ("rmmc, 2% syncs", local))
    ]
    first, second = found
    assert (first["sync_rate"], first["step_seconds"], first["dense_bytes_of_a_sync"]) == (1.0, 1.0, 1000)
    assert second["sync_rate"] == pytest.approx(1 / 6) and second["dense_bytes_of_a_sync"] == 4000
    assert second["median_local_step_seconds"] == 0.2 and second["median_logged_step_seconds"] == 0.4
    assert second["step_seconds"] == pytest.approx((4 * 0.2 + 0.4 + 1.4) / 6)
    assert second["collectives_of_a_local_step"] == 1
    table = slow_network.markdown(found)
    assert f"| {1 / second['step_seconds']:.2f}x | 1.20x |" in table, "beside the paper's projection"
    # The paper's 12 s for what a ring of two sends, and its round trip, to our local step as to its own.
    rate, round_trip = slow_network.wan_of(found)
    assert rate == pytest.approx(8 * 1000 / (12.0 * 0.2 / 3.414))
    assert round_trip == pytest.approx(0.05 * 0.2 / 3.414)
