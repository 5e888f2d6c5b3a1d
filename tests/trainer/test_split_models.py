"""One seed checkpoint, trained by one process and with the model or its sequences split: the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import argv, column, distance, greatest_difference, lines, train_all, write_corpus

GLOBAL_BATCH = 8
LAYOUTS = {  # name: (ranks, degrees)
    "single": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "tp4": (4, {"tensor": 4}),
    "tp2_fsdp2": (4, {"tensor": 2}),
    "tp2_replicas2": (4, {"tensor": 2, "data_replicate": 2}),
}
FAMILIES = {
    "llama3": {"model__n_heads": 4, "model__n_kv_heads": 4},
    "gpt2": {
        "model__name": "gpt2", "model__flavor": "debugmodel", "model__n_heads": 4, "model__n_kv_heads": None,
    },
    "qwen3": {
        "model__name": "qwen3", "model__flavor": "debugmodel", "model__n_heads": 4, "model__n_kv_heads": 4,
        "model__head_dim": 16,
    },
}  # fmt: skip


def run(tmp: Path, corpus: Path, family: str, layout: str, **overrides) -> list[str]:
    ranks, degrees = LAYOUTS[layout]
    degrees = {f"parallelism__{axis}_parallel_degree": degree for axis, degree in degrees.items()}
    if replicas := degrees.pop("parallelism__data_replicate_parallel_degree", None):
        degrees["parallelism__data_parallel_replicate_degree"] = replicas
    shared = degrees.get("parallelism__tensor_parallel_degree", 1)
    shared *= degrees.get("parallelism__context_parallel_degree", 1)
    keys = {
        "training__steps": 10,
        "optimizer__lr": 2e-3,
        "training__global_batch_size": GLOBAL_BATCH,
        "training__local_batch_size": GLOBAL_BATCH * shared // (2 * ranks),  # two micro-batches
        "checkpoint__enable": True,
        "checkpoint__initial_load_path": tmp / f"{family}_seed" / "checkpoint",
        "checkpoint__initial_load_model_only": True,
        "validation__enable": True,
        "validation__freq": 10,
        "validation__steps": -1,
        "validation__local_batch_size": 2,
        "validation__sample_prompts": ["alpha", "return the"],
        "validation__sample_tokens": 5,
        "validation__sample_temperature": 0.0,
        "data__validation_fraction": 0.1,
    }
    return argv(tmp / f"{family}_{layout}", corpus, **{**keys, **FAMILIES[family], **degrees, **overrides})


def seed(tmp: Path, corpus: Path, family: str) -> list[str]:
    return argv(
        tmp / f"{family}_seed", corpus, checkpoint__enable=True, checkpoint__create_seed_checkpoint=True,
        debug__seed=7, data__validation_fraction=0.1, **FAMILIES[family],
    )  # fmt: skip


def assert_same_run(folder: Path, wanted: Path, tolerance: float) -> None:
    assert greatest_difference(folder, wanted) < tolerance, folder.name
    assert column(folder, "tokens_seen") == column(wanted, "tokens_seen")
    assert greatest_difference(folder, wanted, "grad_norm") < 10 * tolerance, folder.name
    assert distance(folder / "checkpoint/step-10", wanted / "checkpoint/step-10") < 10 * tolerance
    ours, theirs = ([line for line in lines(f) if "validation_loss" in line] for f in (folder, wanted))
    assert abs(ours[-1]["validation_loss"] - theirs[-1]["validation_loss"]) < tolerance, folder.name
    assert ours[-1]["validation_tokens"] == theirs[-1]["validation_tokens"] > 0
    texts = [[line["text"] for line in lines(f, "samples.jsonl")] for f in (folder, wanted)]
    assert texts[0] == texts[1] and len(texts[0]) == 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_training_equals_one_process(tmp_path, ranks):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=150)
    train_all(
        1,
        [make(tmp_path, corpus, f, *a) for f in FAMILIES for make, a in ((seed, ()), (run, ("single",)))],
    )
    layouts = [name for name, (n, _) in LAYOUTS.items() if n == ranks]
    train_all(ranks, [run(tmp_path, corpus, family, layout) for family in FAMILIES for layout in layouts])
    for family in FAMILIES:
        wanted = tmp_path / f"{family}_single"
        assert column(wanted, "loss")[-1] < column(wanted, "loss")[0] - 0.3, "it learns"
        for layout in layouts:
            assert_same_run(tmp_path / f"{family}_{layout}", wanted, 1e-5)
