"""Which documents are held out for validation, and reading one side of that split.

A document's own content decides, so the split does not depend on order, file names, or the rest of the data,
copies of one text fall on one side, and a larger fraction holds out a superset.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from titanforge.data.lanes import Lane, ListLane, ShardLane
from titanforge.data.order import DocumentOrder
from titanforge.data.sources import ShardedSource, Source
from titanforge.data.tokenizers.base import well_formed

# Below this many documents per stream the split is made at start-up, so that every stream has something to
# read. Above it, documents of the other side are passed over when their turn comes, and nothing is read
# ahead.
_FEW_PER_STREAM = 256
_VALIDATION_WINDOW = 256


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document is for validation: the hash of its text (but for white space around) < fraction."""
    if fraction <= 0:
        return False
    digest = hashlib.blake2b(well_formed(text).strip().encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def _is_trained_on(text: str, fraction: float) -> bool:
    return not is_held_out(text, fraction)


@dataclass(frozen=True)
class Walk:
    """How a run walks any of its sources."""

    seed: int
    num_streams: int
    shuffle: bool
    repeat: bool
    window: int
    """Documents shuffled together where a source can only be read in sequence."""


class TrainingDocuments:
    """The numbered documents to train on: places 0 … len−1; `read` gives None where nothing is to be read."""

    def __init__(self, source: Source, validation_fraction: float, num_streams: int) -> None:
        self.source, self.validation_fraction = source, validation_fraction
        self._chosen: np.ndarray | None = None
        if len(source) < _FEW_PER_STREAM * num_streams:
            chosen = [i for i in range(len(source)) if self._check(source.read(i)) is not None]
            if not chosen:
                raise ValueError(
                    f"{source.name}: no text to train on in its {len(source)} documents "
                    f"with data.validation_fraction = {validation_fraction}"
                )
            self._chosen = np.array(chosen, np.int64)

    def __len__(self) -> int:
        return len(self.source if self._chosen is None else self._chosen)

    def lanes(self, walk: Walk) -> Callable[[int], Lane]:
        """Stream -> what it reads; streams of one process share the order's tables."""
        # A subset's numbers are not the blocks'; it is small enough to do without.
        blocks = self.source.blocks() if self._chosen is None else None
        order = DocumentOrder(len(self), walk.seed, walk.shuffle, blocks)
        return lambda stream: ListLane(self.source.name, self, order, stream, walk.num_streams, walk.repeat)

    def _document(self, place: int) -> int:
        return place if self._chosen is None else int(self._chosen[place])

    def _check(self, text: str) -> str | None:
        return None if not text or is_held_out(text, self.validation_fraction) else text

    def read(self, place: int) -> str | None:
        text = self.source.read(self._document(place))
        return text if self._chosen is not None else self._check(text)

    def where(self, place: int) -> str:
        return self.source.where(self._document(place))


class TrainingShards:
    """The shards to train on; its length is their number."""

    def __init__(self, source: ShardedSource, validation_fraction: float) -> None:
        self.source, self.validation_fraction = source, validation_fraction

    def __len__(self) -> int:
        return self.source.num_shards

    def lanes(self, walk: Walk) -> Callable[[int], Lane]:
        keep = functools.partial(_is_trained_on, fraction=self.validation_fraction)
        return lambda stream: ShardLane(
            self.source,
            keep,
            stream,
            walk.num_streams,
            seed=walk.seed,
            shuffle=walk.shuffle,
            window=walk.window,
            repeat=walk.repeat,
        )


def training_side(
    source: Source | ShardedSource, validation_fraction: float, num_streams: int
) -> TrainingDocuments | TrainingShards:
    if isinstance(source, ShardedSource):
        return TrainingShards(source, validation_fraction)
    return TrainingDocuments(source, validation_fraction, num_streams)


class HeldOutDocuments:
    """The numbered documents to validate on; with fraction 1, all of the source."""

    def __init__(self, source: Source, fraction: float) -> None:
        self.source, self._fraction = source, fraction

    def __len__(self) -> int:
        return len(self.source)

    def read(self, place: int) -> str | None:
        text = self.source.read(place)
        return text if text and is_held_out(text, self._fraction) else None

    def where(self, place: int) -> str:
        return self.source.where(place)


def validation_lane(source: Source | ShardedSource, fraction: float) -> Lane:
    """The held-out documents of a source, once, in its own order; with fraction 1, all."""
    if isinstance(source, ShardedSource):
        keep = functools.partial(is_held_out, fraction=fraction)
        return ShardLane(source, keep, 0, 1, seed=0, shuffle=False, window=_VALIDATION_WINDOW, repeat=False)
    documents = HeldOutDocuments(source, fraction)
    order = DocumentOrder(len(documents), seed=0, shuffle=False)
    return ListLane(source.name, documents, order, 0, 1, repeat=False)
