"""One rank that cannot read its data stops all of them, soon, and says which rank, file and line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.distributed_harness import run_torchrun
from tests.trainer.runs import argv, train_each, training_lines, write_corpus

BROKEN_LINE = 24


def _corpus_with_a_broken_line(path: Path) -> Path:
    """With two streams and no shuffling, even lines are the second rank's; too many to read at the start."""
    text = "some words in a document that fills a good part of a sequence of sixty-four tokens"
    records = [json.dumps({"text": text})] * 600
    records[BROKEN_LINE - 1] = '{"text": "torn in the mid'
    path.write_text("\n".join(records) + "\n")
    return path


def _two_streams(folder: Path, corpus: Path, **more) -> list[str]:
    return argv(
        folder,
        corpus,
        training__steps=1000,
        training__local_batch_size=1,
        parallelism__data_parallel_replicate_degree=2,
        data__num_streams=2,
        data__shuffle=False,
        data__validation_fraction=0,
        **more,
    )


def test_a_broken_record_under_torchrun(tmp_path):
    corpus = _corpus_with_a_broken_line(tmp_path / "corpus.jsonl")
    begin = time.monotonic()
    ended = run_torchrun(["train.py", *_two_streams(tmp_path / "run", corpus)], 2, timeout=120)
    assert ended.returncode == 1
    where = f"{corpus}, line {BROKEN_LINE}: not a JSON object"
    assert f"error: rank 1 cannot read the data: {where}" in ended.stderr  # its own log
    assert f"error: rank 1 failed while loading data: DataError: {where}" in ended.stderr  # the first rank's
    assert 'train.py", line' not in ended.stderr, "no traceback of ours"
    # torchrun's own time to start and to end is in here; the collective timeout is 100 s and more.
    assert time.monotonic() - begin < 90
    # Everything before the broken record was trained on, and its step was not begun by any rank.
    assert 5 <= training_lines(tmp_path / "run")[-1]["step"] <= BROKEN_LINE // 2 * 2


def test_the_same_in_a_worker_and_data_that_end(tmp_path):
    broken = _corpus_with_a_broken_line(tmp_path / "corpus.jsonl")
    short = write_corpus(tmp_path / "short.jsonl", documents=20)
    saving = {"checkpoint__enable": True, "checkpoint__interval": 1000}
    in_worker, in_process, exhausted = train_each(
        2,
        [
            _two_streams(tmp_path / "worker", broken, training__dataloader__num_workers=1),
            _two_streams(tmp_path / "process", broken),
            _two_streams(tmp_path / "short", short, data__repeat=False, **saving),
        ],
    )
    for (code_0, told_0), (code_1, told_1) in (in_worker, in_process):
        assert (code_0, code_1) == (1, 1)
        assert told_0.count("\n") == 1 and told_0.startswith("error: rank 1 failed while loading data: ")
        assert f"{broken}, line {BROKEN_LINE}" in told_0 and f"{broken}, line {BROKEN_LINE}" in told_1
    assert [line["loss"] for line in training_lines(tmp_path / "worker")] == pytest.approx(
        [line["loss"] for line in training_lines(tmp_path / "process")], rel=0
    ), "what workers load ahead must not bring the error forward"
    assert [code for code, _ in exhausted] == [1, 1]
    told = exhausted[0][1]
    assert "DataExhausted" in told or "cannot read the data" in told
    assert str(short) in told and "data.repeat" in told
    # What was trained is saved, and goes on once the data does; where nothing was, nothing is.
    done = training_lines(tmp_path / "short")[-1]["step"]
    assert [folder.name for folder in (tmp_path / "short/checkpoint").iterdir()] == [f"step-{done}"]
    short_of_data, goes_on = train_each(
        2,
        [
            _two_streams(tmp_path / "short", short, data__repeat=False, **saving),
            [*_two_streams(tmp_path / "short", short, **saving), f"--training.steps={done + 2}"],
        ],
    )
    assert [code for code, _ in short_of_data] == [1, 1] and [code for code, _ in goes_on] == [0, 0]
    assert [line["step"] for line in training_lines(tmp_path / "short")] == list(range(1, done + 3))
    assert [line["resumed_from"] for line in training_lines(tmp_path / "short") if "resumed_from" in line]


def test_no_checkpoint_ties_a_corrected_dataset_to_the_broken_one(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("not JSON\n" * 5000)
    ((told,),) = train_each(1, [argv(tmp_path / "run", corpus, checkpoint__enable=True)])
    assert told[0] == 1 and "line 1" in told[1]
    assert not (tmp_path / "run" / "checkpoint").exists()
