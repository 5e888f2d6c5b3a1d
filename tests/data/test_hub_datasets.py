"""Datasets that Hugging Face's library streams: real local ones, under the rules that hold for files."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from collections import Counter

import pytest
import torch

from tests.data.corpus import loader, ranks, rows, step, texts, write_jsonl
from tests.data.local_hub import serve_dataset
from tests.data.test_sources import parquet
from titanforge.data import (
    DataError,
    DataExhausted,
    SourceSpec,
    build_tokenizer,
    build_validation_loader,
    merge_states,
)
from titanforge.data.sources import open_source
from titanforge.data.split import is_held_out


@pytest.fixture(scope="module", autouse=True)
def hub(tmp_path_factory):
    """The library's cache in a temporary folder, and no attempt to reach the hub."""
    patch = pytest.MonkeyPatch()
    import datasets
    import huggingface_hub

    folder = tmp_path_factory.mktemp("hf")
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    yield
    patch.undo()


DOCUMENTS = [f"d{i:03}" + "x" * (i * 13 % 40) if i % 11 else "" for i in range(230)]
SHARDS = [DOCUMENTS[:100], DOCUMENTS[100:130], DOCUMENTS[130:]]


@pytest.fixture(scope="module", params=["parquet", "json", "saved"])
def folder(request, tmp_path_factory) -> str:
    """The same documents in three uneven shards, or as `save_to_disk` leaves them."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "saved":
        import datasets

        datasets.Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(str(path))
        return str(path)
    for i, shard in enumerate(SHARDS):
        if request.param == "parquet":
            parquet(path / f"{i}.parquet", shard)
        else:
            write_jsonl(path / f"{i}.jsonl", shard)
    return str(path)


def hf(path: str, **changes):
    return loader(path, dataset="huggingface", shuffle_window=8, **changes)


def hf_ranks(path: str, world: int, **changes):
    return ranks(path, world, dataset="huggingface", shuffle_window=8, **changes)


def documents_of(tokens: bytes) -> list[str]:
    return [part.decode() for part in tokens.split(b"\0")]


@pytest.mark.parametrize("streams", [1, 2, 3, 12])  # fewer, as many, and more than the shards
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_hands_out_every_document_once(folder, streams, shuffle):
    one = hf(folder, num_streams=streams, shuffle=shuffle, seq_len=8, global_batch_size=streams * 2)
    text: dict[int, bytes] = dict.fromkeys(range(streams), b"")
    for _ in range(2 * sum(len(d) + 1 for d in DOCUMENTS) // (streams * 2 * 8) + 40):
        samples = [row for _ in range(one.plan.micro_batches) for row in rows(next(one))]
        for i, (tokens, *_) in enumerate(samples):
            text[i % streams] += bytes(t if t < 256 else 0 for t in tokens)
    found = Counter(d for each in text.values() for d in documents_of(each)[:-1])
    assert set(found) == set(filter(None, DOCUMENTS))
    if streams == 1:
        first = documents_of(text[0])[: len(set(found))]
        assert Counter(first) == Counter(filter(None, DOCUMENTS))
        assert (first == list(filter(None, DOCUMENTS))) != shuffle or "saved" in folder


@pytest.mark.parametrize("streams", [2, 5, 12])
@pytest.mark.parametrize("world", [2, 3])
def test_global_batch_is_the_same_for_every_number_of_ranks(folder, world, streams):
    one, many = [hf(folder, num_streams=streams)], hf_ranks(folder, world, num_streams=streams)
    for _ in range(10):
        assert step(one) == step(many)


@pytest.mark.parametrize("streams", [2, 12])
def test_resume_again_and_again_on_other_layouts(folder, streams):
    layouts = [(1, 24), (2, 24), (3, 12), (4, 48), (1, 2), (5, 20), (2, 4)]
    settings = {"num_streams": streams, "validation_fraction": 0.1}
    reference = hf(folder, global_batch_size=2, **settings)
    state, largest_epoch = None, 0
    for world, size in layouts * 2:
        loaders = hf_ranks(folder, world, global_batch_size=size, **settings)
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
        for _ in range(3):
            expected = sum((step([reference]) for _ in range(size // 2)), Counter())
            assert step(loaders) == expected
        state = merge_states([each.state_dict() for each in loaders])
        assert torch.equal(state["streams"], reference.state_dict()["streams"])
        largest_epoch = max(largest_epoch, loaders[0].epoch)
    assert all(isinstance(value, int | torch.Tensor) for value in state.values())
    assert largest_epoch >= 1, "the test must cross the end of an epoch"


def test_workers_change_nothing(folder):
    if "json" in folder:
        pytest.skip("two of the three kinds are enough for spawned processes")
    reference, helped = hf(folder), hf(folder, num_workers=2)
    for _ in range(6):
        assert step([helped]) == step([reference])
    state = merge_states([helped.state_dict()])
    helped.close()
    resumed = hf(folder)
    resumed.load_state_dict(state)
    assert step([resumed]) == step([reference])


def test_training_and_validation_share_no_document(folder):
    held = {text for text in DOCUMENTS if text and is_held_out(text, 0.3)}
    one = hf(folder, validation_fraction=0.3, num_streams=4, seq_len=64)
    trained = set()
    for _ in range(20):
        for tokens, *_ in step([one]).elements():
            trained |= set(documents_of(bytes(t if t < 256 else 0 for t in tokens))[1:-1])
    assert len(trained) > 50 and not trained & held
    settings = {
        "dataset": "huggingface",
        "dataset_path": folder,
        "text_key": "text",
        "tokenizer": build_tokenizer("byte"),
        "seq_len": 16,
        "local_batch_size": 2,
        "document_mask": True,
        "validation_fraction": 0.3,
    }
    text = b""
    many = [build_validation_loader(**settings, dp_rank=rank, dp_world=3) for rank in range(3)]
    assert len({len(each) for each in many}) == 1
    labels = sum((batch.labels != -100).sum().item() for each in many for batch in each)
    assert labels == sum(map(len, held))
    for batch in build_validation_loader(**settings, dp_rank=0, dp_world=1):
        for tokens, *_ in rows(batch):
            text += bytes(t if t < 256 else 0 for t in tokens)
    assert set(filter(None, documents_of(text))) == held


def test_without_repeat_the_end_is_named(folder):
    one = hf(folder, repeat=False, num_streams=1, global_batch_size=2)
    seen = 0
    with pytest.raises(DataExhausted, match=r"huggingface \(.*\), train ended: .*data\.repeat = false"):
        while True:
            seen += next(one).tokens.numel()
    assert seen > sum(len(d) + 1 for d in DOCUMENTS if d) - 40


def test_more_streams_than_documents_is_no_trap(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["first document", "", "second"])
    seen = set()
    for tokens, *_ in step([hf(str(tmp_path), num_streams=12, global_batch_size=12)]):
        seen.add(bytes(t for t in tokens if t < 256)[:1])
    assert seen == {b"f", b"s"}
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 5)
    with pytest.raises(DataError, match=r"no text for stream \d+ of 2 in \d+ epochs"):
        next(hf(str(tmp_path), num_streams=2, global_batch_size=2))


def test_what_cannot_be_read_is_named_in_a_worker_too(tmp_path):
    for i, shard in enumerate(SHARDS):
        write_jsonl(tmp_path / f"{i}.jsonl", shard)
    with open(tmp_path / "1.jsonl", "a") as file:
        file.write('{"text": "cut off')
    where = r"huggingface \(.*\), train, shard 1 of 3 \(.*1\.jsonl\), document \d+: cannot be read: .*JSON"
    counts = []
    for workers in (0, 1):
        one = hf(str(tmp_path), num_streams=1, global_batch_size=2, shuffle=False, num_workers=workers)
        counts.append(0)
        with pytest.raises(DataError, match=where):
            while True:
                next(one)
                counts[-1] += 1
    assert counts[0] == counts[1] > 10
    (tmp_path / "1.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": None}) + "\n")
    with pytest.raises(DataError, match=r"shard 1 of 3 .*document 1: field 'text' .*holds no string: None"):
        one = hf(str(tmp_path), num_streams=3, global_batch_size=6)
        while True:
            next(one)


def test_mistakes_are_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no split 'test' \(data\.split\); there: train|data\.split"):
        open_source("huggingface", folder, "text", split="test")
    with pytest.raises(DataError, match=r"no (column|field) 'body' \(data\.text_key\)"):
        next(hf(folder, text_key="body"))
    with pytest.raises(FileNotFoundError, match=r"/no/such/folder': no such folder, and no id on the"):
        open_source("huggingface", "/no/such/folder", "text")
    with pytest.raises(FileNotFoundError, match=r"huggingface \(.*\), train: "):
        open_source("huggingface", str(tmp_path), "text")


@pytest.mark.parametrize("dataset", ["c4", "fineweb", "fineweb-edu", "openwebtext"])
def test_without_a_network_the_way_out_is_named(dataset):
    with pytest.raises(DataError, match=rf"{dataset} \(.*/.*hub cannot be reached.*download_assets\.py"):
        open_source(dataset, None, "text")


def test_a_named_dataset_from_a_local_copy(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", texts(20))
    source = open_source("c4", str(tmp_path), "text")
    assert source.name == f"c4 ({tmp_path}), train"
    assert [text for shard in range(source.num_shards) for text in source.read_shard(shard, 0)] == texts(20)


def test_a_source_survives_the_way_to_a_worker_and_knows_its_data(folder, tmp_path):
    source = open_source("huggingface", folder, "text")
    again = pickle.loads(pickle.dumps(source))
    for shard in range(source.num_shards):
        assert list(again.read_shard(shard, 3)) == list(source.read_shard(shard, 0))[3:]
    one = hf(folder)
    step([one])
    write_jsonl(tmp_path / "0.jsonl", DOCUMENTS[:50])
    with pytest.raises(ValueError, match=r"training\.dataset"):
        hf(str(tmp_path)).load_state_dict(merge_states([one.state_dict()]))
    with pytest.raises(ValueError, match=r"data\.shuffle_window"):
        loader(folder, dataset="huggingface", shuffle_window=9).load_state_dict(
            merge_states([one.state_dict()])
        )


def test_a_stream_and_files_in_one_mix(folder, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", texts(60))
    mix = [SourceSpec("huggingface", folder, 2.0, name="streamed"), SourceSpec("jsonl", path, 1.0)]
    one, two = [loader(None, sources=mix)], ranks(None, 2, sources=mix)
    for _ in range(5):
        assert step(one) == step(two)
    state = merge_states([each.state_dict() for each in two])
    resumed = loader(None, sources=mix)
    resumed.load_state_dict(state)
    assert step([resumed]) == step(one)
    assert set(one[0].source_tokens()) == {"streamed", "a"}


BY_NAME = """
import json
from collections import Counter
from tests.data.corpus import loader, ranks, step
from titanforge.data import build_tokenizer, build_validation_loader, merge_states
from titanforge.data.sources import open_source
if __name__ == "__main__":
    settings = {"dataset": "c4", "num_streams": 2, "global_batch_size": 4, "validation_fraction": 0.3}
    one, two = [loader(None, **settings)], ranks(None, 2, **settings)
    for _ in range(5):
        assert step(one) == step(two)
    resumed = loader(None, **{**settings, "num_workers": 1})
    resumed.load_state_dict(merge_states([each.state_dict() for each in two]))
    for _ in range(30):
        assert step([resumed]) == step(one)
    print(one[0].plan.mix.sides[0].source.name, one[0].epoch)
    source = open_source("c4_validation", None, "text")
    print(list(source.read_shard(0, 8)))
    held = dict(dataset="c4", dataset_path=None, text_key="text", tokenizer=build_tokenizer("byte"),
                seq_len=16, local_batch_size=2, dp_rank=0, dp_world=1, document_mask=True,
                validation_fraction=0.3)
    print(len(build_validation_loader(**held, steps=3)))
    for attempt in (
        lambda: build_validation_loader(**held),
        lambda: open_source("c4", None, "text", subset="xx"),
        lambda: open_source("huggingface", "owner/none", "text"),
    ):
        try:
            attempt()
        except (ValueError, FileNotFoundError) as error:
            print(type(error).__name__, " ".join(str(error).split()))
"""


def test_by_name_from_a_hub(tmp_path):
    """C4's own layout (a subset of compressed JSON Lines), over HTTP from a hub on this machine."""

    def compressed(rows: list[str]) -> bytes:
        return gzip.compress("".join(json.dumps({"text": row, "url": "x"}) + "\n" for row in rows).encode())

    card = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/c4-train.*.json.gz}
  - {split: validation, path: en/c4-validation.*.json.gz}
---
"""
    files = {
        "README.md": card.encode(),
        "en/c4-validation.00000-of-00001.json.gz": compressed([f"validation {i}" for i in range(10)]),
    }
    for shard in range(3):
        rows = [f"row {i} of shard {shard}" for i in range(40)]
        files[f"en/c4-train.{shard:05}-of-00003.json.gz"] = compressed(rows)
    script = tmp_path / "by_name.py"
    script.write_text(BY_NAME)
    with serve_dataset("allenai/c4", files) as endpoint:
        environment = {
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": os.getcwd(),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=150
        )
    assert done.returncode == 0, done.stderr[-3000:]
    name, validation, batches, endless, subset, missing = done.stdout.splitlines()
    assert name.startswith("c4 (allenai/c4), en, train ") and int(name.split()[-1]) >= 1
    assert validation == "['validation 8', 'validation 9']"
    assert batches == "3"
    assert endless.startswith(
        "ValueError validation.steps = -1: c4 (allenai/c4), en, train would be read to its"
    )
    assert subset.startswith(
        "ValueError c4 (allenai/c4), xx, train: BuilderConfig 'xx' not found. Available: ['en']"
    )
    assert missing.startswith("FileNotFoundError huggingface (owner/none), train: ")
