"""The keyed permutation, whole and in windows of blocks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from titanforge.data.order import DocumentOrder, Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_every_key_gives_a_permutation(size):
    for key in (0, 1, 2**64 - 1):
        shuffle = Permutation(size, key)
        assert sorted(map(shuffle, range(size))) == list(range(size))


def test_places_are_uniform_and_passes_differ():
    """Chi-square of "document d comes first", over seeds and over passes; 4 degrees of freedom, p = 1e-4."""
    for orders in ([(seed, 0) for seed in range(2000)], [(7, pass_) for pass_ in range(2000)]):
        first = [DocumentOrder(5, seed, True)(pass_, 0) for seed, pass_ in orders]
        counts = np.bincount(first, minlength=5)
        assert ((counts - 400) ** 2 / 400).sum() < 23.5


def test_neighbours_are_separated():
    order = DocumentOrder(10_000, 1, True)
    places = np.array([order(0, k) for k in range(10_000)])
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.05


def test_large_sizes_need_no_list():
    order = DocumentOrder(10**12, 1, True)
    assert len({order(0, k) for k in range(100)}) == 100


def test_blocks_are_visited_a_window_at_a_time():
    bounds = np.cumsum([0, *([3, 0, 10, 7, 5] * 20)])
    order = DocumentOrder(int(bounds[-1]), 5, True, (bounds, 4))
    documents = [order(2, k) for k in range(len(np.arange(bounds[-1])))]
    assert sorted(documents) == list(range(bounds[-1]))
    blocks = np.searchsorted(bounds, documents, side="right") - 1
    # From the first document of a block to its last, few others are begun.
    for block in set(blocks.tolist()):
        (places,) = np.nonzero(blocks == block)
        assert len(set(blocks[places[0] : places[-1] + 1].tolist())) <= 4
    assert [order(3, k) for k in range(20)] != documents[:20]
    again = pickle.loads(pickle.dumps(order))
    assert [again(2, k) for k in range(50)] == documents[:50]


def test_no_shuffle_is_the_order_of_the_source():
    assert [DocumentOrder(4, 1, False)(9, k) for k in range(4)] == [0, 1, 2, 3]
