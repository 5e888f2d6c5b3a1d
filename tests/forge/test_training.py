"""forge.enable in whole runs of train.py: resuming, crossing over, stopping, and what is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.runs import (
    argv,
    assert_same_checkpoint,
    assert_same_steps,
    column,
    distance,
    greatest_difference,
    train_all,
    train_each,
    write_corpus,
)

FORGE = {"forge__enable": True, "forge__clip": "lagged"}
ROUNDED = {
    "training__dtype": "bfloat16",
    "optimizer__state_dtype": "int8",
    "optimizer__master_weights": "stochastic_rounding",
}


def run(folder: Path, corpus: Path, steps: int, **more: Any) -> list[str]:
    keys: dict[str, Any] = {
        "training__steps": steps,
        "training__local_batch_size": 2,
        "training__global_batch_size": 4,
        "training__max_norm": 0.5,
        "lr_scheduler__total_steps": 6,
        "checkpoint__enable": True,
        "data__validation_fraction": 0,
    }
    return argv(folder, corpus, **(keys | more))


def test_a_run_in_pieces_is_the_whole_run(tmp_path: Path) -> None:
    """With lagged clipping that acts (its held norm is in the checkpoint), two micro-batches, two recipes."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=16)
    runs = []
    for name, recipe in (("plain", {}), ("rounded", ROUNDED)):
        more = FORGE | recipe
        runs += [run(tmp_path / name / "whole", corpus, 6, **more)]
        runs += [run(tmp_path / name / "pieces", corpus, steps, **more) for steps in (2, 6)]
    train_all(1, runs)
    for name in ("plain", "rounded"):
        whole, pieces = tmp_path / name / "whole", tmp_path / name / "pieces"
        assert_same_steps(pieces, whole)
        assert_same_checkpoint(pieces / "checkpoint" / "step-6", whole / "checkpoint" / "step-6")
        assert min(column(whole, "grad_norm")) > 0.5  # clipping had something to do
        assert set(column(whole, "nonfinite_tiles")) == {0}


def test_fused_and_unfused_runs_agree_and_cross_over(tmp_path: Path) -> None:
    """Without clipping, which the two do differently."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=16)
    free: dict[str, Any] = {"training__max_norm": 0}
    forge = {"forge__enable": True}
    train_all(
        1,
        [
            run(tmp_path / "fused", corpus, 6, **free, **forge),
            run(tmp_path / "plain", corpus, 6, **free),
            run(tmp_path / "across", corpus, 2, **free, **forge),
            run(tmp_path / "across", corpus, 4, **free),
            run(tmp_path / "across", corpus, 6, **free, **forge),
        ],
    )
    for name in ("fused", "across"):
        assert greatest_difference(tmp_path / name, tmp_path / "plain") < 1e-4
        assert greatest_difference(tmp_path / name, tmp_path / "plain", "grad_norm") < 1e-3
        step = Path("checkpoint") / "step-6"
        assert distance(tmp_path / name / step, tmp_path / "plain" / step) < 1e-4


def test_a_step_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=16)
    burst: dict[str, Any] = {"optimizer__lr": 1e30, "training__max_norm": 0, "lr_scheduler__warmup_steps": 0}
    (((code, error),),) = train_each(1, [run(tmp_path / "run", corpus, 6, forge__enable=True, **burst)])
    assert code == 76
    assert "is not finite" in error
    assert "but fused ones whose own gradient was finite" in error


def test_a_dry_run_says_what_the_run_says_of_switches(tmp_path: Path, capfd: Any) -> None:
    from train import main

    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=16)
    for name, merged in (("adamw", True), ("dobb", False)):
        words = run(tmp_path / name, corpus, 1, **FORGE, forge__keep_logits=True, optimizer__name=name)
        assert main([*words, "--job.dry_run"]) == 0
        planned = capfd.readouterr().out.splitlines()
        assert main(words) == 0
        began = [line.removeprefix("  ") for line in capfd.readouterr().out.splitlines()]
        lines = [line for line in planned if "multiplied as one" in line or "keep_logits" in line]
        assert len(lines) == 1 + merged
        assert "forge.keep_logits = true has no effect: the head joins" in lines[-1]
        at = began.index(lines[0])
        assert began[at : at + len(lines)] == lines


def test_the_plan_is_printed(tmp_path: Path, capfd: Any) -> None:
    from train import main

    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=16)
    assert main([*run(tmp_path / "run", corpus, 1, **FORGE), "--job.dry_run"]) == 0
    printed = capfd.readouterr().out
    assert "forge: 100.0 % of" in printed
    assert "2 micro-batches" in printed
    assert "gradients             0.000 GiB" in printed
