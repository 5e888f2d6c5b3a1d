"""The global batch depends on the step alone; resuming repeats and loses nothing."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
import torch

from tests.data.corpus import SEQ_LEN, loader, ranks, rows, step, texts, write_jsonl
from titanforge.data import DataError, DataExhausted, build_tokenizer, merge_states
from titanforge.data.dealing import rank_samples, worker_of
from titanforge.data.order import DocumentOrder


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "a.jsonl", texts())


def by_the_rule(documents: list[str], *, seed: int, streams: int, samples: int, shuffle: bool) -> list[tuple]:
    """(tokens, labels) of samples 0, 1, … straight from the rule: whole streams, no state, no skipping."""
    documents = [text for text in documents if text]
    order = DocumentOrder(len(documents), seed, shuffle)
    passes = -(-streams // len(documents))
    need = -(-samples // streams) * SEQ_LEN + 1
    cut = []
    for s in range(streams):
        tokens, first, epoch = [], [], 0
        while len(tokens) < need:
            dealt = [order(epoch * passes + p, k) for p in range(passes) for k in range(len(documents))]
            for number in dealt[s::streams]:
                document = [*documents[number].encode(), 257]
                tokens += document
                first += [True] + [False] * (len(document) - 1)
            epoch += 1
        cut.append((tokens, first))
    result = []
    for i in range(samples):
        tokens, first = cut[i % streams]
        begin = i // streams * SEQ_LEN
        labels = [-100 if first[j + 1] else tokens[j + 1] for j in range(begin, begin + SEQ_LEN)]
        result.append((tuple(tokens[begin : begin + SEQ_LEN]), tuple(labels)))
    return result


@pytest.mark.parametrize("streams", [1, 7, 12, 100])  # 100: more streams than documents
@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_follow_the_order_rule(path, streams, shuffle):
    expected = by_the_rule(texts(), seed=3, streams=streams, samples=48 * 24, shuffle=shuffle)
    one = loader(path, num_streams=streams, shuffle=shuffle)
    for t in range(48):
        got = Counter((tokens, labels) for tokens, labels, _, _ in step([one]).elements())
        assert got == Counter(expected[t * 24 : (t + 1) * 24])
    # Several epochs were walked, unless there was no time for them.
    assert one.epoch > 1 or streams == 100


@pytest.mark.parametrize("world", [2, 3, 4, 6])
@pytest.mark.parametrize("streams", [5, 12])
def test_global_batch_is_the_same_for_every_number_of_ranks(path, world, streams):
    one, many = [loader(path, num_streams=streams)], ranks(path, world, num_streams=streams)
    for _ in range(12):
        assert step(one) == step(many)


@pytest.mark.parametrize("streams", [12, 64])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_rank_and_a_worker_touch_few_streams(world, streams):
    size = 24
    touched = [set() for _ in range(world)]
    for t in range(50):
        dealt = [rank_samples(t * size, size, streams, rank, world) for rank in range(world)]
        assert sorted(np.concatenate(dealt)) == list(range(t * size, (t + 1) * size))
        for rank in range(world):
            touched[rank] |= set((dealt[rank] % streams).tolist())
    assert max(map(len, touched)) == -(-streams // world) if streams % world == 0 else True
    for mine in touched:
        owners = worker_of(np.array(sorted(mine)), streams, world, 2)
        if len(mine) > 1 and streams % world == 0:
            assert abs((owners == 0).sum() - (owners == 1).sum()) <= 1


def test_resume_again_and_again_on_other_layouts(path):
    """Every stop is a fresh set of loaders of another shape; the run as a whole is the uninterrupted one."""
    layouts = [(1, 24), (2, 24), (3, 12), (4, 48), (1, 2), (6, 12), (2, 8), (5, 20), (1, 24), (2, 4)]
    reference = loader(path, global_batch_size=2)
    state, largest_epoch = None, 0
    for world, size in layouts * 3:
        loaders = ranks(path, world, global_batch_size=size)
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
        for _ in range(3):
            expected = sum((step([reference]) for _ in range(size // 2)), Counter())
            assert step(loaders) == expected
        state = merge_states([each.state_dict() for each in loaders])
        assert state == {**merge_states([reference.state_dict()]), "streams": state["streams"]}
        assert torch.equal(state["streams"], reference.state_dict()["streams"])
        largest_epoch = max(largest_epoch, loaders[0].epoch)
    assert largest_epoch >= 2, "the test must cross the end of epochs"


def test_a_resumed_loader_hands_out_identical_micro_batches(path):
    whole = loader(path)
    for _ in range(5 * 12):
        next(whole)
    state = merge_states([whole.state_dict()])
    assert all(isinstance(value, int | torch.Tensor) for value in state.values())
    resumed = loader(path)
    resumed.load_state_dict(state)
    for _ in range(24):
        for a, b in zip(next(whole), next(resumed), strict=True):
            assert a.dtype == torch.int64 and torch.equal(a, b)


def test_a_position_exists_only_between_steps(path):
    one = loader(path)
    next(one)
    with pytest.raises(RuntimeError, match="micro-batch 1 of 12"):
        one.state_dict()
    # Closed within a step, it begins that step again.
    one.close()
    assert one.state_dict()["samples"] == 0
    assert step([one]) == step([loader(path)])


def test_sequence_length_may_change_on_resume(path):
    one = loader(path)
    step([one])
    longer = loader(path, seq_len=2 * SEQ_LEN)
    longer.load_state_dict(merge_states([one.state_dict()]))
    # The second step begins every stream's sequence where the first one left it.
    begun = {tokens[:SEQ_LEN] for tokens, *_ in step([longer])}
    assert len(begun & {tokens for tokens, *_ in step([one])}) >= 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_streams": 6}, "data.num_streams is 6, in the checkpoint 12"),
        ({"seed": 4}, "debug.seed"),
        ({"shuffle": False}, "data.shuffle"),
        ({"validation_fraction": 0.1}, "data.validation_fraction differs"),
    ],
)
def test_resuming_in_another_order_is_refused(path, change, message):
    one = loader(path)
    step([one])
    with pytest.raises(ValueError, match=message):
        loader(path, **change).load_state_dict(merge_states([one.state_dict()]))


def test_resuming_on_other_data_is_refused(path, tmp_path):
    other = write_jsonl(tmp_path / "a.jsonl", [*texts(), "more"])
    with pytest.raises(ValueError, match=r"training\.dataset"):
        loader(other).load_state_dict(merge_states([loader(path).state_dict()]))
    # The same files elsewhere are the same data.
    (tmp_path / "moved").mkdir()
    moved = write_jsonl(tmp_path / "moved" / "a.jsonl", texts())
    loader(moved).load_state_dict(merge_states([loader(path).state_dict()]))


def test_merging_refuses_a_missing_or_late_rank(path):
    two = ranks(path, 2)
    step(two)
    with pytest.raises(RuntimeError, match="all data-parallel ranks"):
        merge_states([two[0].state_dict()])
    step(two[:1])
    with pytest.raises(RuntimeError, match="samples is 48 on rank 0 and 24 on rank 1"):
        merge_states([each.state_dict() for each in two])


def test_without_repeat_the_data_ends_with_an_error(path):
    one = loader(path, repeat=False, num_streams=1, global_batch_size=2)
    tokens = []
    with pytest.raises(DataExhausted, match=r"jsonl .*a\.jsonl.* ended.*data\.repeat"):
        while True:
            tokens += [t for row in rows(next(one)) for t in row[0]]
    total = sum(len(text) + 1 for text in texts() if text)
    assert total - 2 * SEQ_LEN < len(tokens) <= total
    with pytest.raises(DataExhausted):
        next(one)


def test_without_repeat_no_document_is_dealt_twice_to_fill_streams(path):
    with pytest.raises(DataExhausted, match=r"data\.num_streams = 1000"):
        step([loader(path, repeat=False, num_streams=1000, global_batch_size=1000)])


def test_more_streams_than_documents(tmp_path):
    """Two documents with text on 64 streams: every stream repeats one or both of them."""
    path = write_jsonl(tmp_path / "a.jsonl", ["first document", "", "second"])
    for shuffle in (True, False):
        seen = set()
        for tokens, *_ in step([loader(path, num_streams=64, global_batch_size=64, shuffle=shuffle)]):
            seen.add(bytes(t for t in tokens if t < 256))
        assert all(text.startswith((b"first document", b"second")) for text in seen)
        assert {text[:1] for text in seen} == {b"f", b"s"}


def test_a_broken_record_is_named_when_its_turn_comes(tmp_path):
    lines = [f'{{"text": "document {i} of the corpus"}}' for i in range(300)]
    lines[270] = '{"text": "cut off'
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines))
    one = loader(str(path), num_streams=1, shuffle=False, global_batch_size=2)
    done = 0
    with pytest.raises(DataError, match=r"broken\.jsonl, line 271: not a JSON object"):
        while True:
            next(one)
            done += 2
    # Everything up to it was handed out.
    before = sum(len(f"document {i} of the corpus") + 1 for i in range(270))
    assert before - 2 * SEQ_LEN <= done * SEQ_LEN <= before
    # Few documents for the number of streams: read at once, and refused at once.
    with pytest.raises(DataError, match="line 271"):
        loader(str(path), num_streams=12)


def test_a_data_set_without_text_is_refused(tmp_path):
    empty = write_jsonl(tmp_path / "empty.jsonl", [""] * 20)
    with pytest.raises(ValueError, match="no text to train on"):
        loader(empty)
    # Too many to read at start-up: found out, not looped over for ever.
    many = write_jsonl(tmp_path / "many.jsonl", [""] * 400)
    with pytest.raises(DataError, match="no text in three passes"):
        next(loader(many, num_streams=1, global_batch_size=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": 25}, "training.global_batch_size = 25"),
        ({"seq_len": 0}, "training.seq_len = 0"),
        ({"num_streams": 0}, "data.num_streams = 0"),
        ({"dp_rank": 1}, "rank 1 of 1"),
        ({"validation_fraction": 1.0}, "data.validation_fraction = 1.0"),
        ({"dataset": "pile"}, "training.dataset = 'pile': choose one of python_stdlib"),
        ({"dataset": "c4_test"}, "training.dataset = 'c4_test': those files are torchtitan's own"),
        ({"dataset": "huggingface", "dataset_path": None}, "'huggingface' needs training.dataset_path"),
        ({"shuffle_window": 0}, "data.shuffle_window = 0"),
        ({"dataset_path": None}, "needs training.dataset_path"),
        ({"dataset": "python_stdlib"}, "takes no path"),
        ({"prefetch_factor": 0}, "prefetch_factor = 0"),
    ],
)
def test_settings_out_of_range_name_their_key(path, change, message):
    with pytest.raises(ValueError, match=message):
        loader(path, **change)


def test_bytes_of_the_standard_library_come_fast_enough():
    """A training run on two CPU cores must not wait for its data."""
    one = loader(None, dataset="python_stdlib", seq_len=512, local_batch_size=8, global_batch_size=8)
    next(one)
    begin = time.perf_counter()
    for _ in range(100):
        next(one)
    assert 100 * 8 * 512 / (time.perf_counter() - begin) > 200_000
    assert one.plan.tokenizer.name == build_tokenizer("byte").name
