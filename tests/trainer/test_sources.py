"""Mixes and streamed datasets through train.py: resumed on other ranks, logged, and failing together."""

from __future__ import annotations

import json

import pytest

from tests.trainer.runs import argv, lines, train_all, train_each, write_corpus


@pytest.fixture
def mix(tmp_path) -> str:
    """One source of files and one that `datasets` streams, as the command line takes them."""
    folder = tmp_path / "streamed"
    folder.mkdir()
    for shard in range(3):
        write_corpus(folder / f"{shard}.jsonl", 20, seed=shard)
    files = write_corpus(tmp_path / "files.jsonl", seed=9)
    return (
        f'[{{dataset = "jsonl", path = "{files}", weight = 3}}, '
        f'{{dataset = "huggingface", path = "{folder}", name = "streamed"}}]'
    )


def test_a_mix_goes_on_on_other_ranks_and_its_sources_are_counted(tmp_path, mix):
    settings = {
        "data__sources": mix,
        "training__dataset": None,
        "training__local_batch_size": 1,
        "training__global_batch_size": 4,
        "checkpoint__enable": True,
        "checkpoint__interval": 3,
        "metrics__log_freq": 1,
        "validation__enable": True,
        "validation__freq": 3,
        "validation__steps": 2,
        "data__validation_fraction": 0.2,
    }

    def arguments(folder: str, steps: int) -> list[str]:
        made = argv(tmp_path / folder, "", **settings, training__steps=steps)
        return [each for each in made if not each.startswith("--training.dataset_path")]

    train_all(2, [arguments("whole", 6)])
    train_all(2, [arguments("parts", 3)])
    train_all(1, [arguments("parts", 6)])
    whole, parts = (
        [line for line in lines(tmp_path / name) if "source_tokens/streamed" in line]
        for name in ("whole", "parts")
    )
    counted = [(line["source_tokens/files"], line["source_tokens/streamed"]) for line in whole]
    assert [sum(pair) for pair in counted] == [4 * 64 * step for step in range(1, 7)]
    assert counted == [(line["source_tokens/files"], line["source_tokens/streamed"]) for line in parts]
    assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in whole], abs=1e-5)


def test_a_broken_shard_ends_every_rank_with_its_name(tmp_path):
    folder = tmp_path / "streamed"
    folder.mkdir()
    for shard in range(2):
        rows = [{"text": f"row {i} of shard {shard} " + "x" * 60} for i in range(40)]
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(folder / "1.jsonl", "a") as file:
        file.write('{"text": "cut')
    arguments = argv(
        tmp_path / "run",
        folder,
        training__dataset="huggingface",
        training__steps=200,
        data__num_streams=2,
        data__validation_fraction=0.0,
        training__local_batch_size=1,
    )
    (ranks,) = train_each(2, [arguments])
    assert [code for code, _ in ranks] == [1, 1]
    told = ranks[0][1]  # by the first rank, whichever failed
    assert "shard 1 of 2" in told and "1.jsonl" in told and "JSON parse error" in told
