"""Boundaries of documents, as the model is told about them."""

from __future__ import annotations

import pytest
import torch

from tests.data.corpus import loader, write_jsonl

EOS = 257


def only_batch(tmp_path, documents, **changes):
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    settings = {"num_streams": 1, "shuffle": False, "local_batch_size": 1, "global_batch_size": 1}
    return next(loader(path, **{**settings, "seq_len": 12, **changes}))


def test_masks_positions_and_ids_by_hand(tmp_path):
    batch = only_batch(tmp_path, ["ab", "c", "defghij"])
    a, b, c, d, e, f, g, h, i = b"abcdefghi"
    assert batch.tokens.tolist() == [[a, b, EOS, c, EOS, d, e, f, g, h, i, ord("j")]]
    assert batch.labels.tolist() == [[b, EOS, -100, EOS, -100, e, f, g, h, i, ord("j"), EOS]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5, 6]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2]]


def test_without_document_mask_only_the_labels_know_of_boundaries(tmp_path):
    masked = only_batch(tmp_path, ["ab", "c", "defghij"])
    batch = only_batch(tmp_path, ["ab", "c", "defghij"], document_mask=False)
    assert torch.equal(batch.tokens, masked.tokens) and torch.equal(batch.labels, masked.labels)
    assert batch.positions.tolist() == [list(range(12))]
    assert batch.document_ids.tolist() == [[0] * 12]


@pytest.mark.parametrize("length", [11, 12, 13, 24])
def test_a_boundary_at_the_end_of_a_sequence(tmp_path, length):
    """Document and eos end just before, at, or after the end of the first sequence."""
    path = write_jsonl(tmp_path / "a.jsonl", ["x" * length, "y" * 40])
    one = loader(
        path,
        num_streams=1,
        shuffle=False,
        seq_len=12,
        local_batch_size=1,
        global_batch_size=1,
        document_mask=True,
    )
    stream = [*b"x" * length, EOS, *b"y" * 40, EOS]
    starts = {length + 1}
    for ordinal in range(4):
        batch = next(one)
        begin = ordinal * 12
        assert batch.tokens[0].tolist() == stream[begin : begin + 12]
        assert batch.labels[0].tolist() == [
            -100 if j in starts else stream[j] for j in range(begin + 1, begin + 13)
        ]
        # A document that goes on from the sequence before starts at position 0 again.
        assert batch.positions[0, 0] == 0


def test_a_long_document_is_cut_without_loss(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(12 * 50))
    path = write_jsonl(tmp_path / "a.jsonl", [text])
    one = loader(path, num_streams=1, seq_len=12, local_batch_size=5, global_batch_size=5)
    tokens = torch.cat([next(one).tokens.flatten() for _ in range(10)])
    assert bytes(tokens.tolist()) == text.encode()
