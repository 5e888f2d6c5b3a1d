"""One seed checkpoint, trained on every layout: the same losses, validation losses and samples."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.runs import (
    argv,
    column,
    distance,
    greatest_difference,
    lines,
    train_all,
    training_lines,
    write_corpus,
)

LAYOUTS = {  # name: processes, replicas, shards
    "single": (1, 1, 1),
    "replicas": (2, 2, 1),
    "fsdp": (2, 1, 2),
    "hsdp": (4, 2, 2),
}
GLOBAL_BATCH = 16


def _run(tmp: Path, corpus: Path, layout: str, accumulation: int) -> list[str]:
    processes, replicas, shards = LAYOUTS[layout]
    return argv(
        tmp / f"{layout}_{accumulation}",
        corpus,
        training__steps=10,
        optimizer__lr=2e-3,
        training__global_batch_size=GLOBAL_BATCH,
        training__local_batch_size=GLOBAL_BATCH // (processes * accumulation),
        parallelism__data_parallel_replicate_degree=replicas,
        parallelism__data_parallel_shard_degree=shards,
        checkpoint__enable=True,
        checkpoint__initial_load_path=tmp / "seed" / "checkpoint",
        checkpoint__initial_load_model_only=True,  # made with another seed, so that it is seen to be loaded
        validation__enable=True,
        validation__freq=5,
        validation__steps=-1,
        validation__local_batch_size=3,
        validation__sample_prompts=["alpha", "return the"],
        validation__sample_tokens=6,
        validation__sample_temperature=0.0,
        data__validation_fraction=0.2,
    )


def test_one_seed_checkpoint_gives_the_same_run_on_every_layout(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=400)
    seed = argv(
        tmp_path / "seed", corpus, checkpoint__enable=True, checkpoint__create_seed_checkpoint=True,
        debug__seed=7, data__validation_fraction=0.2,
    )  # fmt: skip
    for processes in (1, 2, 4):
        layouts = [name for name, layout in LAYOUTS.items() if layout[0] == processes]
        runs = [_run(tmp_path, corpus, layout, many) for layout in layouts for many in (1, 4)]
        train_all(processes, [seed, *runs] if processes == 1 else runs)

    wanted = tmp_path / "single_1"
    valid = [b - a for a, b in zip([0, *column(wanted, "tokens_seen")], column(wanted, "tokens_seen"))]
    assert max(valid) - min(valid) > 20, "the number of counted labels varies, or nothing is shown here"
    assert column(wanted, "loss")[-1] < column(wanted, "loss")[0] - 0.5, "it learns"
    for layout in LAYOUTS:
        for accumulation in (1, 4):
            folder = tmp_path / f"{layout}_{accumulation}"
            assert greatest_difference(folder, wanted) < 1e-5, folder.name
            assert column(folder, "tokens_seen") == column(wanted, "tokens_seen")
            assert greatest_difference(folder, wanted, "grad_norm") < 1e-4, folder.name
            assert distance(folder / "checkpoint/step-10", wanted / "checkpoint/step-10") < 1e-4
            _assert_same_evaluations(folder, wanted)


def _assert_same_evaluations(folder: Path, wanted: Path) -> None:
    ours, theirs = ([line for line in lines(f) if "validation_loss" in line] for f in (folder, wanted))
    assert [line["step"] for line in ours] == [5, 10]
    for mine, other in zip(ours, theirs, strict=True):
        assert abs(mine["validation_loss"] - other["validation_loss"]) < 1e-5, folder.name
        assert mine["validation_tokens"] == other["validation_tokens"] > 0
    # Neither the samples nor the evaluation may be counted as training.
    assert len(training_lines(folder)) == 10
    samples = [
        [(line["step"], line["prompt"], line["text"]) for line in lines(f, "samples.jsonl")]
        for f in (folder, wanted)
    ]
    assert samples[0] == samples[1] and len(samples[0]) == 4
