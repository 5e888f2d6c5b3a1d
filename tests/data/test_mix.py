"""Weighted sources: shares of tokens, the same batches on any layout, exact resuming, and ends by name."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.data.corpus import loader, ranks, rows, step, write_jsonl
from tests.data.test_sources import parquet
from titanforge.data import (
    DataError,
    DataExhausted,
    SourceSpec,
    build_tokenizer,
    build_validation_loader,
    merge_states,
)

WEIGHTS = (6.0, 3.0, 1.0)


def documents(letter: str, count: int, length: int) -> list[str]:
    return ["" if i % 17 == 5 else f"{letter}{i:04}" + letter * (i * 7 % length) for i in range(count)]


@pytest.fixture(scope="module")
def specs(tmp_path_factory) -> list[SourceSpec]:
    """Three sources of different kinds, sizes, and lengths of documents."""
    folder = tmp_path_factory.mktemp("mix")
    a = write_jsonl(folder / "a.jsonl", documents("a", 90, 40))
    b = parquet(folder / "b.parquet", documents("b", 40, 300), name="body")
    (folder / "c").mkdir()
    for i, text in enumerate(documents("c", 12, 20)):
        (folder / "c" / f"{i:02}.txt").write_text(text)
    return [
        SourceSpec("jsonl", a, WEIGHTS[0]),
        SourceSpec("parquet", b, WEIGHTS[1], text_key="body", name="books"),
        SourceSpec("text", str(folder / "c"), WEIGHTS[2]),
    ]


def share(counts: Counter) -> list[float]:
    """Share of each source's letter among all tokens but digits and eos."""
    letters = [sum(n * row[0].count(ord(letter)) for row, n in counts.items()) for letter in ("a", "b", "c")]
    return [n / sum(letters) for n in letters]


def test_tokens_follow_the_weights_in_the_run_and_from_its_first_steps_on(specs):
    one = loader(None, sources=specs, num_streams=64, global_batch_size=64, seq_len=64)
    early = sum((step([one]) for _ in range(2)), Counter())
    # Streams begin apart: not all with the heaviest source.
    assert all(part > 0.02 for part in share(early)) and share(early)[0] < 0.85
    one = loader(None, sources=specs, num_streams=8, global_batch_size=64, seq_len=64)
    for _ in range(62):
        step([one])
    tokens = one.source_tokens()
    assert list(tokens) == ["a", "books", "c"]
    total = sum(tokens.values())
    assert total == 62 * 64 * 64
    for n, weight in zip(tokens.values(), WEIGHTS):
        assert abs(n / total - weight / sum(WEIGHTS)) < 0.05
    # In every stream the weights hold to within documents and the head start.
    taken = one.state_dict()["streams"][:, 7::3].double()
    ahead = taken / torch.tensor(WEIGHTS)
    assert (ahead.max(dim=1).values - ahead.min(dim=1).values).max() < 8000


@pytest.mark.parametrize("streams", [5, 12])
@pytest.mark.parametrize("world", [2, 3])
def test_global_batch_is_the_same_for_every_number_of_ranks(specs, world, streams):
    one, many = (
        [loader(None, sources=specs, num_streams=streams)],
        ranks(None, world, sources=specs, num_streams=streams),
    )
    for _ in range(12):
        assert step(one) == step(many)
    together = Counter()
    for each in many:
        together.update(each.source_tokens())
    assert together == Counter(one[0].source_tokens())


def test_resume_again_and_again_on_other_layouts(specs):
    layouts = [(1, 24), (2, 24), (3, 12), (4, 48), (1, 2), (6, 12), (5, 20), (2, 4)]
    reference = loader(None, sources=specs, global_batch_size=2)
    state, largest_epoch = None, 0
    for world, size in layouts * 3:
        loaders = ranks(None, world, sources=specs, global_batch_size=size)
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
        for _ in range(3):
            expected = sum((step([reference]) for _ in range(size // 2)), Counter())
            assert step(loaders) == expected
        state = merge_states([each.state_dict() for each in loaders])
        assert torch.equal(state["streams"], reference.state_dict()["streams"])
        together = Counter()
        for each in loaders:
            together.update(each.source_tokens())
        assert together == Counter(reference.source_tokens())
        largest_epoch = max(largest_epoch, loaders[0].epoch)
    assert all(isinstance(value, int | torch.Tensor) for value in state.values())
    assert largest_epoch >= 2, "the test must cross the end of a source"


def test_workers_change_nothing(specs):
    reference, helped = loader(None, sources=specs), loader(None, sources=specs, num_workers=2)
    for _ in range(4):
        assert step([helped]) == step([reference])
    assert helped.source_tokens() == reference.source_tokens()
    state = merge_states([helped.state_dict()])
    helped.close()
    resumed = loader(None, sources=specs)
    resumed.load_state_dict(state)
    assert step([resumed]) == step([reference])


def test_every_document_of_an_epoch_comes_once_whatever_its_source(specs):
    """Until the first source repeats, nothing does."""
    one = loader(None, sources=specs, num_streams=1, global_batch_size=2, repeat=False, seq_len=8)
    text = b""
    with pytest.raises(DataExhausted):
        while True:
            for tokens, *_ in rows(next(one)):
                text += bytes(t if t < 256 else 0 for t in tokens)
    found = Counter(text.split(b"\0")[:-1])
    assert set(found.values()) == {1} and len(found) > 20
    everything = {*documents("a", 90, 40), *documents("b", 40, 300), *documents("c", 12, 20)}
    assert {each.decode() for each in found} <= everything


def test_the_source_that_ends_is_named(specs):
    one = loader(None, sources=specs, repeat=False, num_streams=1, global_batch_size=2)
    with pytest.raises(DataExhausted, match=r"jsonl \(.*a\.jsonl\) ended: .*data\.repeat = false"):
        while True:
            next(one)
    named = [specs[0], SourceSpec("jsonl", specs[0].path, 50.0, name="again")]
    one = loader(None, sources=named, repeat=False, num_streams=1, global_batch_size=2)
    with pytest.raises(DataExhausted, match=r"^again: jsonl \(.*ended"):
        while True:
            next(one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:2], "another number or kind of sources"),
        (lambda s: [s[1], s[0], s[2]], "training.dataset"),
        (lambda s: [SourceSpec("jsonl", s[0].path, 5.0), *s[1:]], r"data\.sources \(weights\)"),
        (lambda s: (), "another number or kind of sources"),
    ],
)
def test_resuming_with_another_mix_is_refused(specs, change, message):
    one = loader(None, sources=specs)
    step([one])
    other = loader(specs[0].path, sources=change(specs))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(merge_states([one.state_dict()]))


def test_mistakes_are_named_under_their_source(specs, tmp_path):
    def build(*sources):
        return loader(None, sources=sources)

    with pytest.raises(FileNotFoundError, match=r"data\.sources\[1\]\.path = '/no/such'"):
        build(specs[0], SourceSpec("jsonl", "/no/such"))
    with pytest.raises(ValueError, match=r"data\.sources\[0\]\.dataset = 'pile': choose one of"):
        build(SourceSpec("pile"))
    with pytest.raises(ValueError, match=r"data\.sources\[1\]\.weight = 0"):
        build(specs[0], SourceSpec("python_stdlib", weight=0))
    with pytest.raises(ValueError, match=r"data\.sources\[1\]\.name: 'a' is the name of data\.sources\[0\]"):
        build(specs[0], specs[0])
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "fine"}\n{"txt": "not"}\n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 2: no field 'text'"):
        build(specs[0], SourceSpec("jsonl", str(path)))


def test_validation_reads_the_held_out_text_of_every_source_by_weight(specs):
    settings = {
        "dataset": "jsonl",
        "dataset_path": None,
        "text_key": "text",
        "tokenizer": build_tokenizer("byte"),
        "seq_len": 16,
        "local_batch_size": 2,
        "dp_rank": 0,
        "dp_world": 1,
        "document_mask": True,
    }

    def texts_of(sources, fraction, **changes):
        loader_ = build_validation_loader(
            **{**settings, "sources": sources, "validation_fraction": fraction, **changes}
        )
        counts = Counter(row for batch in loader_ for row in rows(batch))
        return b"".join(
            bytes(t if t < 256 else 0 for t in row[0]) for batch in loader_ for row in rows(batch)
        ), counts

    whole, _ = texts_of(specs, 0.0, held_out_only=False)
    everything = {*documents("a", 90, 40), *documents("b", 40, 300), *documents("c", 12, 20)} - {""}
    assert {text.decode() for text in whole.split(b"\0")} - {""} == everything
    some, _ = texts_of(specs, 0.0, held_out_only=False, steps=8)
    assert {text[:1] for text in some.split(b"\0")} >= {b"a", b"b", b"c"}
    held, counts = texts_of(specs, 0.3)
    held_out = {text.decode() for text in held.split(b"\0")} - {""}
    train = loader(None, sources=specs, validation_fraction=0.3, seq_len=16)
    trained = set()
    for _ in range(150):
        for tokens, *_ in step([train]).elements():
            text = bytes(t if t < 256 else 0 for t in tokens)
            trained |= {part.decode() for part in text.split(b"\0")[1:-1]} - {""}
    assert held_out < everything and len(held_out) > 10 and not trained & held_out
    split = [texts_of(specs, 0.3, dp_rank=rank, dp_world=3)[1] for rank in range(3)]
    counted = [
        Counter({row: n for row, n in c.items() if any(label != -100 for label in row[1])})
        for c in (counts, sum(split, Counter()))
    ]
    assert counted[0] == counted[1]
