"""The order of the documents in each pass over a dataset, computed place by place.

No shuffled list is ever stored: a keyed permutation answers "which document comes k-th in pass p" in a few
microseconds, the same on every machine, rank, and library version, for any number of documents.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8


def mix64(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): a bijection of 64-bit integers that looks random."""
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


class Permutation:
    """A permutation of 0 … size−1 chosen by `key`.

    A balanced Feistel network on the next power of four, walked until it lands below `size` (Black and
    Rogaway 2002, "cycle walking"): fewer than four walks on average.
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [mix64(key + i) for i in range(_ROUNDS)]

    def __call__(self, place: int) -> int:
        half, mask = self._half, (1 << self._half) - 1
        while True:
            left, right = place >> half, place & mask
            for key in self._keys:
                left, right = right, left ^ (mix64(key ^ right) & mask)
            place = left << half | right
            if place < self.size:
                return place


class DocumentOrder:
    """`order(p, k)`: the document that comes k-th in pass p, of `size` documents.

    With `blocks` (bounds int64 [n + 1] and how many fit in memory: `Source.blocks`) the blocks are shuffled,
    then the documents within each window of that many neighbours, so that a reader needs few blocks at a
    time.
    """

    def __init__(
        self, size: int, seed: int, shuffle: bool, blocks: tuple[np.ndarray, int] | None = None
    ) -> None:
        self.size = size
        self._seed, self._shuffle = seed & _MASK64, shuffle
        self._blocks = blocks
        # Streams of one process are at most a pass or two apart.
        self._pass = lru_cache(maxsize=4)(self._make_pass)

    def __reduce__(self) -> tuple[type[DocumentOrder], tuple]:
        return DocumentOrder, (self.size, self._seed, self._shuffle, self._blocks)

    def __call__(self, pass_: int, place: int) -> int:
        if not self._shuffle:
            return place
        return self._pass(pass_)(place)

    def _make_pass(self, pass_: int) -> Permutation | _WindowedPermutation:
        key = mix64(mix64(self._seed) ^ pass_)
        if self._blocks is None:
            return Permutation(self.size, key)
        return _WindowedPermutation(*self._blocks, key)


class _WindowedPermutation:
    def __init__(self, bounds: np.ndarray, window: int, key: int) -> None:
        blocks = len(bounds) - 1
        shuffle = Permutation(blocks, key)
        order = np.fromiter((shuffle(i) for i in range(blocks)), np.int64, blocks)
        self._document = bounds[order]  # first document of each block, in shuffled order
        self._place = np.concatenate([[0], np.cumsum(bounds[order + 1] - bounds[order])])
        self._window_place = self._place[np.append(np.arange(0, blocks, window), blocks)]
        self._within = lru_cache(maxsize=4)(self._make_window)
        self._key = key

    def _make_window(self, window: int) -> Permutation:
        size = int(self._window_place[window + 1] - self._window_place[window])
        return Permutation(size, mix64(self._key ^ mix64(window + 1)))

    def __call__(self, place: int) -> int:
        window = int(np.searchsorted(self._window_place, place, side="right")) - 1
        start = int(self._window_place[window])
        place = start + self._within(window)(place - start)
        block = int(np.searchsorted(self._place, place, side="right")) - 1
        return int(self._document[block]) + place - int(self._place[block])
