"""`scripts/bench/rank_calls.py` on two processes of a CPU; its times are not looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts.bench import rank_calls
from tests.distributed_harness import run_distributed


def both_parts(rank: int, world_size: int, out: str) -> None:
    methods = ["--methods", "AdamW fused", "Dobb", "Muon"]
    few = ["--rules", "Muon", "--turns", "1", "--warmup", "1", "--steps", "2", "--batch", "1"]
    arguments = ["optimizer", "decision", "--device", "cpu", "--tiny", "--out", out]
    assert rank_calls.main([*arguments, *methods, *few]) == 0


def test_optimizer_calls_on_shards_and_the_decision_are_timed(tmp_path: Path) -> None:
    run_distributed(both_parts, 2, str(tmp_path))
    report = json.loads((tmp_path / "rank_calls.json").read_text())
    rows = {row["method"]: row for row in report["optimizer"]}
    assert list(rows) == ["AdamW fused", "Dobb", "Muon"]
    assert all(row["mean of 9, ms"] > 0 for row in rows.values())
    # Of two blocks: four matrices 64 x 64 and two 256 x 64 each; half of the momenta, in bf16, and of the
    # updates, on a CPU in fp32.
    values = 2 * (4 * 64 + 2 * 256) * 64
    assert rows["Muon"]["MB sent a step"] == pytest.approx((2 + 4) * values / 2 / 1e6)
    assert 0 < rows["Dobb"]["MB sent a step"] < rows["Muon"]["MB sent a step"] / 20
    assert rows["AdamW fused"]["MB sent a step"] == 0
    (decision,) = report["decision"]
    assert decision["layers"] == 8 and decision["decision from idle, ms"] > 0
    assert (tmp_path / "rank_calls.md").stat().st_size > 0


def test_what_it_cannot_measure_is_refused_in_words() -> None:
    with pytest.raises(SystemExit, match="several ranks are measured: torchrun"):
        rank_calls.main(["optimizer", "--device", "cpu", "--tiny"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device here: use --device cpu"):
            rank_calls.main(["optimizer"])
