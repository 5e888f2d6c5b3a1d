"""A loss or gradient that is not finite, on one rank or on all: no weight and no state takes it in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.distributed_harness import run_distributed, run_torchrun
from tests.trainer.runs import argv, lines, read_checkpoint, write_corpus
from titanforge.config import load_config
from titanforge.interruption import NonFiniteLoss
from titanforge.trainer import Trainer

BAD_STEP = 3


def _arguments(folder: Path, corpus: Path, mode: str, shard: bool, **more: Any) -> list[str]:
    return argv(
        folder,
        corpus,
        training__steps=6,
        training__nonfinite_loss=mode,
        training__global_batch_size=8,
        parallelism__data_parallel_replicate_degree=1 if shard else 2,
        **more,
    )


def _everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole weights, states and step count by name."""
    optimizer = trainer.optimizer.state_dict()
    named = dict(trainer.model.state_dict())
    named |= {f"{name}.{slot}": t for name, slots in optimizer["state"].items() for slot, t in slots.items()}
    named |= {"step": optimizer["step"]}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in named.items()}


def _poison(trainer: Trainer, rank: int, where: str) -> None:
    """NaN into the second micro-batch of step BAD_STEP on rank 1 alone: into the loss, or a gradient only."""
    calls = 0

    def after_a_block(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal calls
        calls += 1
        if rank != 1 or calls != (BAD_STEP - 1) * trainer.micro_batches + 2:
            return None
        if where == "loss":
            return output * float("nan")
        output.register_hook(lambda gradient: gradient * float("nan"))
        return None

    trainer.model.get_submodule("layers.1").register_forward_hook(after_a_block)


def _train_with_nan(rank: int, world_size: int, arguments: list[str], where: str) -> dict[str, Any]:
    trainer = Trainer(load_config(arguments), "cpu")
    _poison(trainer, rank, where)
    seen, message = [_everything(trainer)], ""
    train_step = trainer.train_step

    def watched() -> None:
        try:
            train_step()
        finally:
            seen.append(_everything(trainer))

    trainer.train_step = watched
    try:
        trainer.train()
    except NonFiniteLoss as stop:
        message = str(stop)
    trainer.close()
    return {"seen": seen, "message": message}


def _train_each_with_nan(rank: int, world_size: int, runs: list[tuple[list[str], str]]):
    return [_train_with_nan(rank, world_size, *run) for run in runs]


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


CASES = [
    ("native replicas loss", False, "loss", {}),
    ("native shards loss", True, "loss", {}),
    ("native replicas gradient", False, "gradient", {}),
    ("fused shards gradient", True, "gradient", {"optimizer__implementation": "fused"}),
    ("foreach replicas loss", False, "loss", {"optimizer__implementation": "foreach"}),
    ("master shards loss", True, "loss",
     {"training__dtype": "bfloat16", "optimizer__master_weights": "float32"}),
]  # fmt: skip


def test_nan_on_one_rank(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    runs = []
    for name, shard, where, more in CASES:
        runs.append((_arguments(tmp_path / name, corpus, "skip", shard, **more), where))
    stop = _arguments(tmp_path / "stop", corpus, "stop", True)
    # The host looks at step 5 only: steps 4 and 5 must not be applied either.
    late = _arguments(tmp_path / "late", corpus, "stop", False, metrics__log_freq=5)
    by_rank = run_distributed(_train_each_with_nan, 2, [*runs, (stop, "loss"), (late, "gradient")])

    for (name, _, where, _), one, other in zip(CASES, *by_rank):
        seen = one["seen"]
        assert len(seen) == 7, name
        assert all(_equal(a, b) for a, b in zip(seen, other["seen"])), f"{name}: ranks agree"
        for step in range(1, 7):
            assert _equal(seen[step - 1], seen[step]) == (step == BAD_STEP), f"{name}: step {step}"
        assert all(bool(value.isfinite().all()) for value in seen[-1].values()), name
        assert int(seen[-1]["step"]) == 5, "optimizer steps applied"
        logged = lines(tmp_path / name)
        assert [line["step"] for line in logged if line["grad_norm"] is None] == [BAD_STEP], name
        assert [line["skipped_steps"] for line in logged] == [0, 0, 1, 1, 1, 1], name
        assert [line["step"] for line in logged if line["loss"] is None] == [BAD_STEP] * (where == "loss"), (
            name
        )

    for folder, steps_done in (("stop", 3), ("late", 5)):
        results = [ranks[len(CASES) + ("stop", "late").index(folder)] for ranks in by_rank]
        for result in results:
            assert f"step {BAD_STEP} is not finite" in result["message"], folder
            assert len(result["seen"]) == steps_done + 1
            assert _equal(result["seen"][-1], result["seen"][BAD_STEP - 1]), "no weight or state changed"
            assert _equal(result["seen"][-1], results[0]["seen"][-1]), "ranks agree"


def test_a_diverging_run_ends_with_code_76_and_good_checkpoints(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    folder = tmp_path / "run"
    # A learning rate that no weight survives: real arithmetic, not an injected value.
    diverging = argv(
        folder,
        corpus,
        training__steps=20,
        optimizer__lr=1e18,
        lr_scheduler__warmup_steps=0,
        checkpoint__enable=True,
        checkpoint__interval=1,
    )
    ended = run_torchrun(["train.py", *diverging], 0, timeout=120)
    assert ended.returncode == 76, ended.stderr
    assert "Traceback" not in ended.stderr
    bad = len(lines(folder))
    assert f"error: the loss or gradient of step {bad} is not finite" in ended.stderr
    last = folder / f"checkpoint/step-{bad - 1}"
    saved = read_checkpoint(last)
    assert all(bool(t.isfinite().all()) for name, t in saved.items() if name.startswith("model."))
    assert not (folder / f"checkpoint/step-{bad}").exists()
