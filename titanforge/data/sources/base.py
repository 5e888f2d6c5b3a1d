"""What a source of documents offers: random access by number, in an order that only its content decides."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class Source(ABC):
    """Documents 0 … len−1. Picklable: worker processes get a copy of the index and open files on their
    own."""

    name: str
    """How error messages call it: the dataset and its path."""
    fingerprint: int
    """63 bits of the files' relative names, sizes and document counts: the identity of the numbering."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, document: int) -> str:
        """The text of a document. Raises DataError naming file and line if there is none."""

    @abstractmethod
    def where(self, document: int) -> str:
        """File and line (or row) of a document, for messages."""

    def blocks(self) -> tuple[np.ndarray, int] | None:
        """For sources that read documents in blocks: the blocks' bounds, int64 [blocks + 1], and how many
        blocks fit in memory at once. None if any document is read alone."""
        return None


class ShardedSource(ABC):
    """A source without random access: shards 0 … num_shards−1, each read from front to back. Picklable."""

    name: str
    """How error messages call it: the dataset and where it comes from."""
    fingerprint: int
    """63 bits that tell the shards apart from those of other data."""
    num_shards: int
    bounded: bool
    """Whether it lies on this machine, so that reading all of it is a matter of its size alone."""

    @abstractmethod
    def read_shard(self, shard: int, start: int) -> Iterator[str]:
        """The texts of a shard from number `start` on. May raise anything where one cannot be read."""

    @abstractmethod
    def where(self, shard: int, number: int) -> str:
        """Dataset, shard and number of a document, for messages."""


def fingerprint(entries: list[tuple[str, int, int]]) -> int:
    """63-bit hash of (name, bytes, documents) per file."""
    digest = hashlib.blake2b(repr(entries).encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def relative_names(paths: list[Path]) -> list[str]:
    """The files' names below their common folder: the same wherever the dataset lies."""
    parts = [path.parts for path in paths]
    shared = 0
    if parts:
        shortest = min(len(p) for p in parts) - 1
        while shared < shortest and len({p[shared] for p in parts}) == 1:
            shared += 1
    return ["/".join(p[shared:]) for p in parts]


class Opened(Generic[T]):
    """A few objects kept open or decoded, the least recently used dropped first. Pickles empty."""

    def __init__(self, make: Callable[[int], T], limit: int, weigh: Callable[[T], int] = lambda _: 1) -> None:
        self._make, self._limit, self._weigh = make, limit, weigh
        self._items: OrderedDict[int, T] = OrderedDict()
        self._weight = 0

    def get(self, key: int) -> T:
        if key in self._items:
            self._items.move_to_end(key)
            return self._items[key]
        item = self._make(key)
        self._items[key] = item
        self._weight += self._weigh(item)
        while self._weight > self._limit and len(self._items) > 1:
            _, old = self._items.popitem(last=False)
            self._weight -= self._weigh(old)
            if close := getattr(old, "close", None):
                close()
        return item
