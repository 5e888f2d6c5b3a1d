"""Held-out text: apart from training by content, each token once, the same batches for all."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.data.corpus import loader, rows, step, texts, write_jsonl
from titanforge.data import build_tokenizer, build_validation_loader
from titanforge.data.split import is_held_out

FRACTION = 0.3


def validation(path, **changes):
    settings = {
        "dataset": "jsonl",
        "dataset_path": path,
        "text_key": "text",
        "tokenizer": build_tokenizer("byte"),
        "seq_len": 16,
        "local_batch_size": 2,
        "dp_rank": 0,
        "dp_world": 1,
        "document_mask": True,
        "validation_fraction": FRACTION,
    }
    return build_validation_loader(**{**settings, **changes})


def documents_in(batch_rows) -> set[bytes]:
    """Whole documents in rows that begin one: what stands between two ends."""
    found = set()
    for tokens, *_ in batch_rows:
        text = bytes(t if t < 256 else 0 for t in tokens)
        found |= set(text.split(b"\0")[1:-1])
    return found - {b""}


@pytest.fixture
def path(tmp_path) -> str:
    return write_jsonl(tmp_path / "a.jsonl", texts(200))


def test_held_out_by_content_whatever_the_order_and_the_neighbours():
    documents = texts(2000)
    held = [text for text in documents if is_held_out(text, FRACTION)]
    assert 500 < len(held) < 700
    assert {text for text in documents if is_held_out(text, 0.1)} < set(held)
    assert all(is_held_out(text + "\n", FRACTION) for text in held)
    assert not any(is_held_out(text, 0) for text in documents)


@pytest.mark.parametrize("streams", [12, 1])  # 1: so few that the split is made while reading
def test_training_and_validation_share_no_document(tmp_path, streams):
    documents = [f"document number {i}" for i in range(300)]
    documents += documents[::7]  # copies fall on the same side
    random.Random(0).shuffle(documents)
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    held = {text.encode() for text in documents if is_held_out(text, FRACTION)}
    train = loader(path, validation_fraction=FRACTION, num_streams=streams, seq_len=64)
    trained = set()
    while train.epoch < 2:
        trained |= documents_in(step([train]).elements())
    validated = documents_in(row for batch in validation(path, seq_len=64) for row in rows(batch))
    everything = {text.encode() for text in documents}
    # Documents cut by a sequence's end are not looked at, so not quite all are found.
    assert trained <= everything - held and len(trained) > 0.9 * len(everything - held)
    assert validated <= held and len(validated) > 0.5 * len(held)


@pytest.mark.parametrize("world", [2, 3, 7, 50])
def test_each_token_counts_once_and_all_ranks_have_as_many_batches(path, world):
    def counted(loaders):
        return Counter(
            (tokens, labels)
            for each in loaders
            for batch in each
            for tokens, labels, *_ in rows(batch)
            if any(label != -100 for label in labels)
        )

    one = validation(path)
    many = [validation(path, dp_rank=rank, dp_world=world) for rank in range(world)]
    assert counted([one]) == counted(many)
    assert len({len(each) for each in many}) == 1
    assert [len(list(each)) for each in many] == [len(many[0])] * world
    held = [text for text in texts(200) if text and is_held_out(text, FRACTION)]
    labels = sum(label != -100 for key in counted([one]).elements() for label in key[1])
    assert labels == sum(map(len, held))  # every byte and eos but each document's first


def test_batches_are_the_same_every_time_and_steps_limits_them(path):
    whole = validation(path)
    batches = [rows(batch) for batch in whole]
    assert [rows(batch) for batch in whole] == batches
    assert [rows(batch) for batch in validation(path, steps=3)] == batches[:3]
    assert len(validation(path, steps=10_000)) == len(batches)
    assert whole.bytes_per_token == 1.0


def test_a_dataset_of_its_own_is_taken_whole(path):
    loader_ = validation(path, held_out_only=False, validation_fraction=0.0)
    labels = sum((batch.labels != -100).sum().item() for batch in loader_)
    assert labels == sum(map(len, texts(200)))


def test_nothing_to_validate_on_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    with pytest.raises(ValueError, match=r"no text held out of jsonl .*a\.jsonl"):
        validation(path, validation_fraction=1e-9)
    with pytest.raises(ValueError, match=r"data\.validation_fraction = 0"):
        validation(path, validation_fraction=0)
    with pytest.raises(ValueError, match=r"validation\.steps = 0"):
        validation(path, steps=0)
