"""The benchmark scripts, end to end on a CPU with a toy shape; their figures are not looked at."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import (
    harness,
    observed,
    ours,
    peers,
    step,
    sync_beside,
    sync_cells,
    sync_quality,
    sync_report,
    synthetic,
    throughput,
)

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--device", "cpu", "--tiny", "--seq-len", "32", "--warmup", "1", "--steps", "8", "--lr", "1e-3"]


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # From another folder, and without an installed package: the scripts find the checkout themselves.
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / name), *TINY, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_step_has_a_cell_for_each_choice_and_tells_what_is_absent(tmp_path: Path) -> None:
    asked = ["--model", "qwen3-8b", "--seq-len", "16", "32", "--methods", "forge-eager"]
    absent = "galore-eager" if step.missing("galore", "cpu") else "adalomo-eager"
    done = run_script("step.py", *asked, absent, "--forge-kernel", "portable", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    cells = {cell["name"]: cell for cell in json.loads((tmp_path / "step.json").read_text())["cells"]}
    assert set(cells) == {f"{arm} {size}" for arm in ("forge-eager", absent) for size in (16, 32)}
    for size in (16, 32):
        assert cells[f"{absent} {size}"]["absent"] in (tmp_path / "step.md").read_text()
        cell = cells[f"forge-eager {size}"]
        assert cell["trained"] and cell["tokens_per_step"] == size and cell["model"] == "qwen3-8b"
    with pytest.raises(SystemExit):
        step.main(["--methods", "some-eager"])


def test_a_busy_card_is_counted_once_where_streams_overlap() -> None:
    assert observed.union_length([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0
    assert observed.union_length([]) == 0.0


@pytest.mark.parametrize("peer", [peer for peer in peers.PEERS if peer not in peers.GPU_ONLY])
def test_installed_peers_train(peer: str) -> None:
    if reason := peers.missing(peer, "cpu"):
        pytest.skip(reason)
    model = ours.build_llama(tiny=True, seq_len=16, device="cpu")
    train = ours.TrainStep(model, peers.build_peer(peer, model, lr=1e-3))
    batch = synthetic.token_pool(512, 1, 16)[0]
    losses = [float(train(*batch)) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_step_writes_its_report_and_shows_that_the_methods_train(tmp_path: Path) -> None:
    done = run_script("step.py", "--methods", "adamw-fused-eager", "native-eager", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "step.json").read_text())
    assert [cell["name"] for cell in report["cells"]] == ["adamw-fused-eager", "native-eager"]
    for cell in report["cells"]:
        assert cell["trained"] and cell["last_loss"] < cell["first_loss"]
        assert cell["timed_steps"] == len(cell["step_ms"]) == 8
        assert cell["states_gib"] == pytest.approx(2 * cell["weights_gib"], rel=1e-3)
    # One update, two implementations: bf16 rounding apart, they see the same losses.
    ours, theirs = (cell["losses"] for cell in report["cells"])
    assert ours == pytest.approx(theirs, abs=0.05)
    assert report["machine"]["torch"] == torch.__version__
    assert "| native-eager |" in (tmp_path / "step.md").read_text()
    assert (tmp_path / "step.png").stat().st_size > 0


def test_zoo_goes_through_a_shape_with_experts(tmp_path: Path) -> None:
    done = run_script("zoo.py", "--cells", "qwen3-30B-A3B:32:eager+recomputed", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = json.loads((tmp_path / "zoo.json").read_text())["cells"]
    assert cell["tokens_per_second"] > 0 and cell["last_loss"] > 0
    done = run_script("zoo.py", "--cells", "qwen3-8B:32:fast", "--out", str(tmp_path))
    assert done.returncode == 1 and "qwen3-8B:32:fast" in done.stderr


def test_throughput_runs_arms_in_turn(tmp_path: Path) -> None:
    arms = ["ours:none:native", "ours:full:torch-fused"]
    done = run_script("throughput.py", "--no-compile", "--arms", *arms, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "throughput.json").read_text())["cells"]
    assert [cell["name"] for cell in cells] == arms
    assert all(cell["trained"] and cell["tokens_per_second"] > 0 for cell in cells)


def test_peer_trains_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="the peer is no dependency of ours")
    done = run_script("peer_torchtitan.py", "--attention", "sdpa", "--no-compile", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["trained"]


def test_sync_quality_compares_cells_and_goes_on_where_it_stopped(tmp_path: Path, capsys) -> None:
    tiny = ["--mode=threads", "--replicas=2", "--steps=4", "--batch=1", "--warmup=1", "--seeds=3"]
    far = ["--thresholds", "--cell", "far", "policy=scheduled", "interval=4", "rank_fraction=0.25"]
    arguments = [*tiny, *far, "-o", str(tmp_path)]
    assert sync_quality.main(arguments) == 0
    every, scheduled = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert every["cell"] == "every_step" and every["sync_rate"] == 1.0 and every["finished"]
    assert scheduled["sync_rate"] == 0.25 and 0 < scheduled["gib"] < every["gib"]
    assert scheduled["loss_above_every_step"] > -1 and "| far | 3 |" in capsys.readouterr().out
    assert (tmp_path / "results.png").stat().st_size > 0
    cell = tmp_path / "cells" / "far_seed3.json"
    stamp = cell.stat().st_mtime_ns
    assert sync_quality.main(arguments) == 0 and cell.stat().st_mtime_ns == stamp
    other = [word.replace("interval=4", "interval=2") for word in arguments]
    assert sync_quality.main(other) == 0 and cell.stat().st_mtime_ns != stamp, "a name is not all of a cell"
    assert sync_quality.main([*arguments, "--steps", "5", "--cell-seconds", "1e-6"]) == 1
    assert "stopped after 0 steps" in (tmp_path / "results.md").read_text()
    assert sync_quality.main([*arguments, "--steps", "6", "--seconds", "0"]) == 1
    told = (tmp_path / "results.md").read_text()
    assert "Without a result: every_step (seed 3): not begun" in told and "far (seed 3): not begun" in told


def stuck(size: dict[str, Any], sync: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    if sync["policy"] == "scheduled":
        time.sleep(600)
    return sync_beside.train_threads(size, sync, options)


def test_cells_that_are_cut_off_are_named_and_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--size=tiny", "--beside=1", "--replicas=2", "--batch=1", "--steps=2", "-o", str(tmp_path)]
    words += ["--thresholds", "--cell", "far", "policy=scheduled", "interval=2", "--cell", "next"]
    options = sync_quality.parser().parse_args([*words, "policy=rmmc"])
    options.device, options.seed = "cpu", 0
    every, *others = sync_beside.of_seed(options, 0)
    beside = sync_beside.Beside(sync_quality.SIZES["tiny"], options)
    try:
        (result,) = beside.go([every])
        assert result["finished"] and not beside.missing
        sync_report.write([result], tmp_path)
        assert sync_report.exit_code(tmp_path) == 0
        monkeypatch.setattr(sync_beside, "train_threads", stuck)
        monkeypatch.setattr(sync_beside, "RESERVE", 0.0)
        beside._end = time.monotonic() + beside._longest + 2
        results = beside.go([every, *others])
    finally:
        beside.close()
    assert results == [result]
    assert {name: why.split(",")[0].split(" at")[0] for name, why in beside.missing.items()} == {
        "far (seed 0)": "cut off", "next (seed 0)": "not begun",
    }  # fmt: skip
    sync_report.write(results, tmp_path, beside.missing)
    assert "far (seed 0): cut off at the end of --seconds" in (tmp_path / "results.md").read_text()
    assert sync_report.exit_code(tmp_path) == 1


def test_a_cell_of_other_text_is_not_taken_for_done(tmp_path: Path) -> None:
    options = sync_quality.parser().parse_args(["-o", str(tmp_path), "--corpus", "one.jsonl"])
    options.seed = 0
    sync = {"policy": "every_step"}
    result = {"finished": True, "losses": [1.0], "validation_loss": 1.0, "syncs": [], "sync": sync}
    path = sync_cells.cell_file("every_step", options)
    path.parent.mkdir()
    path.write_text(json.dumps({"settings": sync_cells.settings_of(options), **result}))
    assert sync_cells.done("every_step", sync, options)
    for corpus in (Path("two.jsonl"), None):
        options.corpus = corpus
        assert sync_cells.done("every_step", sync, options) is None


def test_sync_quality_runs_cells_beside_each_other_and_matches_their_rate(tmp_path: Path, capsys) -> None:
    options = ["--size=tiny", "--beside=2", "--replicas=2", "--batch=2", "--warmup=1", "--steps=30"]
    options += ["--tune", "1e-2", "3e-2", "--tune-steps=3", "--seconds=900", "-o", str(tmp_path)]
    assert sync_quality.main([*options, "--thresholds=0.4", "--match=0.4"]) == 0
    cells = {c["cell"]: c for c in json.loads((tmp_path / "results.json").read_text())["cells"]}
    assert all(cell["finished"] and cell["steps"] == 30 for cell in cells.values())
    rate = cells["rmmc 0.4"]["sync_rate"]
    (schedule,) = (cell for name, cell in cells.items() if name.startswith("scheduled"))
    assert 0 < rate < 1 and schedule["sync_rate"] == pytest.approx(rate, rel=0.4)
    told = capsys.readouterr().out
    assert "30 steps of each of up to 3 cells" in told and "rate 0.03" in told
    assert "The best, 0.03, is the highest that was tried: 0.09 may be better." in told


@pytest.mark.parametrize(
    ("arm", "told"),
    [
        ("theirs:none:native", "theirs:none:native"),
        ("ours:some:native", "none, selective, full"),
        ("ours:none:sdpa", "native, torch-fused"),
        ("torchtitan:none:native", "flex, varlen, sdpa"),
        ("ours:none:native:fsdp", "'fsdp'"),
    ],
)
def test_wrong_arm_is_named(arm: str, told: str) -> None:
    with pytest.raises(ValueError, match=arm) as error:
        throughput.command_of(arm, [])
    assert told in str(error.value)


def test_peer_arm_becomes_its_command_line() -> None:
    command = throughput.command_of("torchtitan:full:flex:fsdp:nograph", ["--steps", "3"])
    assert command[1].endswith("peer_torchtitan.py")
    assert command[2:] == [
        "--ac",
        "full",
        "--attention",
        "flex",
        "--fsdp",
        "--no-cuda-graphs",
        "--steps",
        "3",
    ]


def test_failed_cell_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    write = (
        "import sys, json; json.dump({'median_ms': 1.0, 'tokens_per_second': 2.0}, open(sys.argv[-1], 'w'))"
    )
    cells = [
        harness.Cell("broken", [sys.executable, "-c", "raise SystemExit('no such kernel')"]),
        harness.Cell("stuck", [sys.executable, "-c", "import time; time.sleep(60)"]),
        harness.Cell("good", [sys.executable, "-c", write]),
    ]
    broken, stuck, good = harness.run_cells(cells, tmp_path, timeout=3, budget=100)
    assert "exit code 1" in broken["error"] and "no such kernel" in broken["error"]
    assert "within 3 s" in stuck["error"]
    assert "error" not in good and good["median_ms"] == 1.0
    (late,) = harness.run_cells(cells[2:], tmp_path, timeout=3, budget=0)
    assert late["error"] == "not run: out of time"


@pytest.mark.parametrize("losses", [[2.0, 2.1], [2.0, float("nan")], [float("inf"), 1.0]])
def test_method_that_does_not_train_is_not_called_trained(losses: list[float]) -> None:
    args = step._parser().parse_args([])
    result = harness.write_result(
        args, arm="x", step_ms=[3.0, 1.0, 2.0], tokens_per_step=4, peaks={}, losses=losses, extra={}
    )
    assert not result["trained"]
    assert result["median_ms"] == 2.0 and result["tokens_per_second"] == 2000.0


def test_losses_are_compared_on_one_batch() -> None:
    # Pool of 3, batches 0 1 2 0 1: the newest loss on batch 0 is the fourth.
    assert step._last_of_first_batch([9, 8, 7, 6, 5], 3) == 6


def test_step_compares_an_arm_with_the_baseline_of_its_own_tokens() -> None:
    cells = [
        {"method": method, "model": "llama3-8b", "seq_len": tokens, "ac": "none", "median_ms": ms}
        for method, tokens, ms in (
            ("forge-graph", 512, 60.0),
            ("adamw-fused-compiled", 4096, 370.0),
            ("adamw-fused-compiled", 512, 80.0),
            ("forge-graph", 4096, 333.0),
            ("forge-graph", 1024, 90.0),
        )
    ]
    failed = {"name": "adamw-fused-compiled 1024", "error": "out of memory"}
    found = [step._ratio(cell, [failed, *cells]) for cell in [*cells, failed]]
    assert found == [0.75, 1.0, 1.0, 0.9, None, None]


def test_methods_are_not_forwarded_to_a_cell() -> None:
    argv = ["--steps", "3", "--methods", "native-eager", "native-graph", "--tiny"]
    assert step._without(argv, "--methods") == ["--steps", "3", "--tiny"]


def test_tokens_are_random_and_labels_follow() -> None:
    pool = synthetic.token_pool(1000, 2, 16)
    assert len(pool) == synthetic.POOL_SIZE
    for tokens, labels in pool:
        assert tokens.shape == labels.shape == (2, 16)
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        assert int(tokens.min()) > 0
    assert not torch.equal(pool[0][0], pool[1][0])
    assert torch.equal(pool[0][0], synthetic.token_pool(1000, 2, 16)[0][0])


def test_ratio_takes_medians_over_rounds_of_arms_that_trained() -> None:
    def outcome(name: str, rate: float, trained: bool = True) -> dict[str, object]:
        return {"name": name, "tokens_per_second": rate, "trained": trained}

    outcomes = [
        outcome("ours:none:native", 100.0),
        outcome("torchtitan:none:sdpa", 90.0),
        outcome("torchtitan:none:flex", 1e9, trained=False),
        outcome("ours:none:native", 300.0),
        outcome("torchtitan:none:sdpa", 110.0),
    ]
    assert "2.000x" in throughput._ratio(outcomes)
    assert throughput._ratio(outcomes[:1]) == ""
