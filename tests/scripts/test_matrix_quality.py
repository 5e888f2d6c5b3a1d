"""The quality run of the matrix optimizers: toy arms, alone and beside each other, its text, its budget."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.bench import matrix_arms, matrix_quality, matrix_quality_report, python_text
from scripts.bench.matrix_arms import Places, Run, fits
from scripts.bench.peak_rates import at_edge, best_rate, beyond, losses_of_rates, next_rate
from tests.trainer.runs import write_corpus


def test_arms_share_data_and_each_has_the_best_of_as_many_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--tiny", "--steps", "6", "--further", "1", "--out", str(tmp_path)]
    words += ["--corpus", str(write_corpus(tmp_path / "corpus.jsonl"))]
    assert matrix_quality.main([*words, "--arms", "adamw", "dobb-16"]) == 0, capsys.readouterr().out
    plan = json.loads((tmp_path / "plan.json").read_text())
    tried = losses_of_rates(plan["probes"])
    assert plan["lrs"] == {arm: best_rate(losses) for arm, losses in tried.items()}
    # Of two rates one is at an edge, so a third beyond it was tried.
    assert [sorted(losses)[1] / sorted(losses)[0] for losses in tried.values()] == pytest.approx([2, 2])
    assert {arm: len(losses) for arm, losses in tried.items()} == {"adamw": 3, "dobb-16": 3}
    best = at_edge(tried["adamw"])
    told = (tmp_path / "matrix_quality.md").read_text()
    assert (f"adamw: {best}" in told) == bool(best)
    assert f"{tried['dobb-16'][1e-2]:.4f}" in told
    report = json.loads((tmp_path / "matrix_quality.json").read_text())
    assert set(report["arms"]) == {"adamw", "dobb-16"} and [p["ahead"] for p in report["order"]] == [
        "dobb-16"
    ]
    first = {arm: one["first_loss"] for arm, one in report["arms"].items()}
    assert first["adamw"] == first["dobb-16"], "the same weights and the same first batch"
    for one in report["arms"].values():
        assert one["trained_steps"] == 6 and one["tokens"] == 6 * 64
        assert one["validation_loss"] < one["first_loss"] - 0.2, "it learns"
    assert (tmp_path / "matrix_quality.png").stat().st_size > 0

    capsys.readouterr()  # goes on: what is done stays, and stays in the table
    assert matrix_quality.main([*words, "--arms", "adamw"]) == 0
    told = capsys.readouterr().out
    assert "[adamw] done before" in told and "[probe" not in told
    assert "| dobb-16 |" in (tmp_path / "matrix_quality.md").read_text()
    with pytest.raises(SystemExit, match=r"other settings \(seed\)"):
        matrix_quality.main([*words, "--seed", "2"])
    (tmp_path / "other.jsonl").write_text((tmp_path / "corpus.jsonl").read_text().replace("a", "e"))
    for left in (plan, {"settings": plan["settings"]}):  # the second: cut off while rates were tried
        (tmp_path / "plan.json").write_text(json.dumps(left))
        with pytest.raises(SystemExit, match=r"other settings \(text_sha256\)"):
            matrix_quality.main([*words, "--corpus", str(tmp_path / "other.jsonl")])
    (tmp_path / "corpus.jsonl").rename(tmp_path / "moved.jsonl")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert matrix_quality.main([*words, "--arms", "adamw", "--corpus", str(tmp_path / "moved.jsonl")]) == 0


def test_text_is_of_installed_packages_without_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("one", "two"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "same.py").write_text("same = 1\n" * 100)
        (tmp_path / package / f"{package}.py").write_text(f"{package} = 1\n" * 100)
        (tmp_path / package / "latin.py").write_bytes("# é\n".encode("latin-1") * 200)
        (tmp_path / package / "short.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(python_text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "one")})
    told = python_text.write_corpus(tmp_path / "corpus.jsonl", 1 << 20)
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert sorted(text.split()[0] for text in texts) == ["one", "same", "two"]
    assert told == {"documents": 3, "bytes": sum(map(len, texts))}


def test_runs_beside_each_other_end_or_are_stopped_and_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--device", "cpu", "--tiny", "--devices", "1", "--out", str(tmp_path)]
    words += ["--corpus", str(write_corpus(tmp_path / "corpus.jsonl"))]
    options = matrix_quality.parser().parse_args(words)
    options.in_process, options.end = False, time.perf_counter() + 1e3
    options.batch, options.seq_len, options.validation_steps = 2, 32, 2
    places = Places(options)
    places.make(["rmnp", "adamw"])
    try:
        ended = places.run(
            [Run("rmnp", "rmnp", 1e-2, 6, "rmnp", "arm"), Run("warm", "adamw", 1e-2, 2, "adamw", "warm")]
        )
        assert {name: one["finished"] for name, one in ended.items()} == {"rmnp": True, "warm": True}
        assert ended["rmnp"]["trained_steps"] == 6
        monkeypatch.setattr(matrix_arms, "GRACE", 300.0)  # of a machine that may be busy with other tests
        for seconds in (4, 30, 200):
            options.end = time.perf_counter() + seconds
            found = places.run([Run("adamw", "adamw", 1e-2, 10**6, "adamw", "arm")])
            if found or "STOPPED before its first step" not in capsys.readouterr().out:
                break
    finally:
        places.close(kill=True)
    assert not found["adamw"]["finished"] and found["adamw"]["trained_steps"] > 0
    assert "of 1000000 steps" in (told := capsys.readouterr().out) and "STOPPED" in told


def test_a_device_is_shared_while_runs_are_beside_each_other() -> None:
    runs = {
        "first": {"span": (0.0, 10.0), "trained_steps": 11},  # alone for 4 s, two for 4, three for 2
        "second": {"span": (4.0, 12.0), "trained_steps": 5},
        "third": {"span": (8.0, 10.0), "trained_steps": 3},
    }
    own = matrix_quality.own_seconds(runs)
    assert own == pytest.approx(
        {"first": (4 + 2 + 2 / 3) / 10, "second": (2 + 2 / 3 + 2) / 4, "third": 2 / 3 / 2}
    )


def test_steps_fit_into_the_time_that_is_left() -> None:
    seconds = {"adamw": 0.1, "muon": 0.2, "dion-1": 0.5}
    devices = dict.fromkeys(seconds, 0)
    fits = matrix_quality.steps_that_fit
    assert fits(seconds, 90.0, evaluated=30, devices=devices) == 100  # 90 / 0.8, less a third of 30
    assert fits(seconds, 90.0, evaluated=0, devices={**devices, "dion-1": 1}) == 180
    with pytest.raises(SystemExit, match="--seconds"):
        fits(seconds, 5.0, evaluated=30, devices=devices)


def test_memory_that_is_not_there_is_refused() -> None:
    runs = {name: {"reserved_gib": 8.0} for name in "abc"}
    assert "26 of 40 GiB" in fits(runs, 40 << 30)
    with pytest.raises(SystemExit, match="--batch"):
        fits(runs, 25 << 30)


def test_the_order_of_pairs_counts_finished_arms_alone() -> None:
    losses = {"adamw": 3.0, "muon": 2.9, "dobb-16": 2.8, "dion-1-16": 3.1}
    results = {arm: {"validation_loss": loss, "finished": arm != "muon"} for arm, loss in losses.items()}
    found = {(p["ahead"], p["behind"]): p["here"] for p in matrix_quality_report.order(results)}
    assert found == pytest.approx(
        {("dobb-16", "adamw"): 0.2, ("dobb-16", "dion-1-16"): 0.3, ("adamw", "dion-1-16"): 0.1}
    )


def test_a_search_goes_beyond_an_edge_and_else_between_the_best_two() -> None:
    """On a parabola in log rate, from wherever it begins."""

    def loss(rate: float) -> float:
        return math.log2(rate / 1e-3) ** 2 if rate < 2e-2 else math.nan

    for first in ([1e-4, 2e-4], [1e-2, 2e-2, 4e-2], [5e-4, 1.5e-3]):
        losses = {rate: loss(rate) for rate in first}
        for _ in range(6):
            rate = next_rate(losses)
            assert rate is not None and rate not in losses
            losses[rate] = loss(rate)
        assert 0.75e-3 < best_rate(losses) < 1.3e-3, losses
    assert next_rate({1e-3: 1.0}) is None
    assert next_rate(dict.fromkeys((1e-3, 2e-3), math.nan)) == pytest.approx(5e-4)


def test_a_rate_beyond_the_best_is_named_where_the_best_is_at_an_edge() -> None:
    assert beyond({1e-3: 2.0, 2e-3: 3.0, 4e-3: 2.5}) == pytest.approx(5e-4)
    assert beyond({1e-3: 4.0, 3e-3: 3.0}) == pytest.approx(9e-3)
    assert beyond({1e-3: 4.0, 2e-3: 3.0, 4e-3: 3.5}) is None and beyond({1e-3: 4.0}) is None
    diverged = {1e-3: float("nan"), 2e-3: 3.0, 4e-3: float("nan")}
    assert best_rate(diverged) == 2e-3 and beyond(diverged) is None
    assert beyond(dict.fromkeys((1e-3, 2e-3), float("nan"))) is None
    assert "lowest" in at_edge({1e-3: 2.0, 2e-3: 3.0}) and "0.0005" in at_edge({1e-3: 2.0, 2e-3: 3.0})
    assert "highest" in at_edge({1e-3: 3.0, 2e-3: 2.0}) and not at_edge({1e-3: 3.0})


def test_an_idle_process_gives_back_its_semaphores_and_one_that_is_busy_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "places.py"
    script.write_text(
        "from scripts.bench.beside import Place\n"
        "if __name__ == '__main__':\n"
        "    idle, busy, failed, ended = [Place() for _ in range(4)]\n"
        "    idle.submit(exec, 'import multiprocessing as m; m.kept = m.Lock()').result()\n"
        "    busy.submit(exec, 'import time; time.sleep(600)')\n"
        "    hang = 'import threading as t, time; t.Thread(target=time.sleep, args=(600,)).start(); 1 / 0'\n"
        "    print(repr(failed.submit(exec, hang).exception()))\n"
        "    ended.submit(exec, 'import os; os._exit(1)').exception()\n"
        "    starting = Place()\n"
        "    starting.submit(exec, 'import time; time.sleep(600)')\n"
        "    for place in (starting, idle, busy, failed, ended):\n"
        "        place.close(kill=True)\n"
    )
    root = Path(matrix_quality.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0 and "ZeroDivisionError" in ran.stdout, ran.stderr
    assert "leaked" not in ran.stderr
