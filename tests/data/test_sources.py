"""Reading documents by number from real files, and naming what cannot be read."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.corpus import ranks, step, texts, write_jsonl
from titanforge.data import DataError
from titanforge.data.sources import open_source


def read_all(source) -> list[str]:
    return [source.read(i) for i in range(len(source))]


def test_standard_library_is_the_same_list_without_tests_and_packages():
    source = open_source("python_stdlib", None, "text")
    places = [source.where(i) for i in range(len(source))]
    assert len(places) > 200
    assert any(place.endswith("/json/decoder.py") for place in places)
    for part in ("/test/", "/tests/", "site-packages", "idlelib", "_sysconfigdata"):
        assert not any(part in place for place in places)
    assert sum(len(text) for text in read_all(source)) > 3_000_000
    assert source.fingerprint == open_source("python_stdlib", None, "text").fingerprint


def test_text_as_file_folder_and_glob(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.py", "sub/.hidden", ".git/config", "empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name == "empty.txt" else f"text of {name}")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    folder = read_all(open_source("text", str(tmp_path), ""))
    assert folder == ["text of a.md", "text of b.txt", "", "text of b.txt", "text of sub/c.py"]
    assert read_all(open_source("text", str(tmp_path / "b.txt"), "")) == ["text of b.txt"]
    assert len(open_source("text", str(tmp_path / "**" / "*.py"), "")) >= 1
    with pytest.raises(FileNotFoundError, match=r"training\.dataset_path = .*nothing"):
        open_source("text", str(tmp_path / "nothing-*.txt"), "")


def test_text_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"line one\nGr\xfc\xdfe\n")
    with pytest.raises(DataError, match=r"latin\.txt, line 2: not UTF-8 text"):
        open_source("text", str(path), "").read(0)


def test_jsonl_over_several_files_is_random_access(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ["three", "four"])
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n{"text": "two \\ud83d\\ude00"}')
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("not JSON")
    source = open_source("jsonl", str(tmp_path), "text")
    expected = ["one", "", "two 😀", "three", "four"]
    assert read_all(source) == expected
    assert [source.read(i) for i in (4, 0, 3)] == ["four", "one", "three"]
    assert source.where(4).endswith("b.jsonl, line 2")
    assert read_all(pickle.loads(pickle.dumps(source))) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", "not a JSON object"),
        ('"text"', "a JSON object is expected, this is str"),
        ('{"body": "x", "id": 1}', r"no field 'text' \(data\.text_key\); its fields: 'body', 'id'"),
        ('{"text": null}', r"field 'text' \(data\.text_key\) holds no string: None"),
        ("[" * 100_000, "not a JSON object"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"text": "good"}) + "\n" + line + "\n")
    source = open_source("jsonl", str(path), "text")
    assert source.read(0) == "good"
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 2: {message}"):
        source.read(1)


def test_a_file_that_shrinks_or_goes_is_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    source = open_source("jsonl", path, "text")
    os.truncate(path, 20)
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: the file has been shortened"):
        source.read(2)
    fresh = pickle.loads(pickle.dumps(source))
    os.remove(path)
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: No such file"):
        fresh.read(0)


def test_compressed_jsonl_says_what_to_do(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is compressed .*Parquet"):
        open_source("jsonl", str(path), "text")


def parquet(path, documents, rows_per_group=7, name="text", **columns) -> str:
    table = pa.table({"meta": [{"a": 1, "b": "x"}] * len(documents), name: documents, **columns})
    pq.write_table(table, path, row_group_size=rows_per_group)
    return str(path)


def test_parquet_reads_rows_and_row_groups(tmp_path):
    documents = texts(60)
    parquet(tmp_path / "a.parquet", documents[:40])
    parquet(tmp_path / "b.parquet", documents[40:], rows_per_group=100)
    source = open_source("parquet", str(tmp_path), "text")
    assert read_all(source) == documents
    assert source.where(41).endswith("b.parquet, row group 0, row 1")
    assert read_all(pickle.loads(pickle.dumps(source))) == documents
    bounds, window = source.blocks()
    assert bounds.tolist() == [0, 7, 14, 21, 28, 35, 40, 60] and window >= 1


def test_bad_parquet_is_named(tmp_path):
    path = parquet(tmp_path / "null.parquet", ["one", None])
    with pytest.raises(
        DataError, match=r"null\.parquet, row group 0, row 1: column 'text' .* no string: None"
    ):
        read_all(open_source("parquet", path, "text"))
    with pytest.raises(DataError, match=r"no column 'body' \(data\.text_key\); its columns: meta, text"):
        open_source("parquet", path, "body")
    path = parquet(tmp_path / "number.parquet", [1, 2])
    with pytest.raises(DataError, match="is of type int64, not string"):
        open_source("parquet", path, "text")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"broken\.parquet: not a readable Parquet file"):
        open_source("parquet", str(tmp_path / "broken.parquet"), "text")
    path = parquet(tmp_path / "flipped.parquet", ["word " * 2000 + str(i) for i in range(50)])
    content = bytearray(Path(path).read_bytes())
    content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)
    Path(path).write_bytes(content)
    with pytest.raises(DataError, match=r"flipped\.parquet, row group 0, row 0"):
        open_source("parquet", path, "text").read(0)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("streams", [1, 4])  # 1: documents in windows of row groups; 4: few documents, listed
def test_an_epoch_of_parquet_hands_out_every_row_once(tmp_path, streams, shuffle):
    documents = [f"row {i:03} of the table" for i in range(400)]
    path = parquet(tmp_path / "a.parquet", documents)
    loaders = ranks(
        path, 2, dataset="parquet", num_streams=streams, seq_len=21, global_batch_size=4, shuffle=shuffle
    )
    for _ in range(2):
        epoch = sum((step(loaders) for _ in range(100)), Counter())
        assert Counter(bytes(tokens[:-1]).decode() for tokens, *_ in epoch.elements()) == Counter(documents)
