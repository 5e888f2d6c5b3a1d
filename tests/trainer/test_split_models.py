"""One seed checkpoint, trained by one process and with the model or its sequences split: the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import argv, column, distance, greatest_difference, lines, train_all, write_corpus

GLOBAL_BATCH, STEPS = 8, 7
LAYOUTS = {  # name: (ranks, degrees)
    "single": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "tp4": (4, {"tensor": 4}),
    "tp2_fsdp2": (4, {"tensor": 2}),
    "tp2_replicas2": (4, {"tensor": 2, "data_replicate": 2}),
    "cp2_ring": (2, {"context": 2}),
    "cp2_ulysses": (2, {"context": 2, "method": "ulysses"}),
    "cp4_ring": (4, {"context": 4}),
    "cp2_ring_fsdp2": (4, {"context": 2}),
    "cp2_ulysses_replicas2": (4, {"context": 2, "method": "ulysses", "data_replicate": 2}),
    "tp2_cp2": (4, {"tensor": 2, "context": 2}),
    "tp2_cp2_fsdp2": (8, {"tensor": 2, "context": 2}),
    # trained in test_pipeline.py
    "pp2_gpipe": (2, {"pipeline": 2, "schedule": "GPipe"}),
    "pp2": (2, {"pipeline": 2}),
    "pp2_interleaved": (2, {"pipeline": 2, "schedule": "Interleaved1F1B"}),
    "pp2_izb": (2, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}),
    "pp2_zbv": (2, {"pipeline": 2, "schedule": "ZBVZeroBubble"}),
    "tp2_pp2": (4, {"tensor": 2, "pipeline": 2}),
    "pp2_fsdp2": (4, {"pipeline": 2, "schedule": "Interleaved1F1B"}),
    "pp2_zbv_fsdp2": (4, {"pipeline": 2, "schedule": "ZBVZeroBubble"}),
    "pp2_replicas2": (4, {"pipeline": 2, "data_replicate": 2}),
    "cp2_pp2": (4, {"context": 2, "pipeline": 2}),
    "ep2_pp2": (4, {"pipeline": 2, "expert": 2}),
    "tp2_pp2_fsdp2": (8, {"tensor": 2, "pipeline": 2}),
}
# What a family adds to a layout is how its own matrices are cut, along the tensor axis and by FSDP beside it:
# tests/parallelisms/test_tensor_parallel.py shows that of every family.
CELLS = [
    *(("llama3", name) for name, (ranks, axes) in LAYOUTS.items() if ranks > 1 and "pipeline" not in axes),
    # Positions that are learnt are looked up by a rank's pieces of a sequence; heads of a width of their own.
    *(("gpt2", name) for name in ("tp2", "tp4", "cp2_ring")),
    *(("qwen3", name) for name in ("tp2", "tp2_fsdp2", "cp2_ulysses")),
]
KEYS = {
    "tensor": "parallelism__tensor_parallel_degree",
    "context": "parallelism__context_parallel_degree",
    "method": "parallelism__context_parallel_method",
    "data_replicate": "parallelism__data_parallel_replicate_degree",
    "pipeline": "parallelism__pipeline_parallel_degree",
    "expert": "parallelism__expert_parallel_degree",
    "schedule": "parallelism__pipeline_parallel_schedule",
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
    shared = degrees.get("tensor", 1) * degrees.get("context", 1) * degrees.get("pipeline", 1)
    degrees = {KEYS[axis]: value for axis, value in degrees.items()}
    keys = {
        "training__steps": STEPS,
        "optimizer__lr": 2e-3,
        "training__global_batch_size": GLOBAL_BATCH,
        "training__local_batch_size": GLOBAL_BATCH * shared // (2 * ranks),  # two micro-batches
        "checkpoint__enable": True,
        "checkpoint__initial_load_path": tmp / f"{family}_seed" / "checkpoint",
        "checkpoint__initial_load_model_only": True,
        "validation__enable": True,
        "validation__freq": STEPS,
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
    last = f"checkpoint/step-{STEPS}"
    assert distance(folder / last, wanted / last) < 10 * tolerance
    ours, theirs = ([line for line in lines(f) if "validation_loss" in line] for f in (folder, wanted))
    assert abs(ours[-1]["validation_loss"] - theirs[-1]["validation_loss"]) < tolerance, folder.name
    assert ours[-1]["validation_tokens"] == theirs[-1]["validation_tokens"] > 0
    texts = [[line["text"] for line in lines(f, "samples.jsonl")] for f in (folder, wanted)]
    assert texts[0] == texts[1] and len(texts[0]) == 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Everything that is compared below; runs of as many ranks share one launch."""
    tmp = tmp_path_factory.mktemp("split")
    corpus = write_corpus(tmp / "corpus.jsonl", documents=150)
    train_all(1, [make(tmp, corpus, f, *a) for f in FAMILIES for make, a in ((seed, ()), (run, ("single",)))])
    for ranks in (2, 4, 8):
        cells = [cell for cell in CELLS if LAYOUTS[cell[1]][0] == ranks]
        train_all(ranks, [run(tmp, corpus, family, layout) for family, layout in cells])
    return tmp


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_learns(trained, family):
    losses = column(trained / f"{family}_single", "loss")
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_training_equals_one_process(trained, family, layout):
    tolerance = 2e-5 if "context" in LAYOUTS[layout][1] else 1e-5
    assert_same_run(trained / f"{family}_{layout}", trained / f"{family}_single", tolerance)
