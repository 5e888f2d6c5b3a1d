"""What one stream reads of one source: its share of the documents, epoch after epoch, from any position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from titanforge.data.errors import DataError, DataExhausted
from titanforge.data.order import Permutation, mix64
from titanforge.data.sources.base import ShardedSource

_TURN_BITS = 40
"""A place in a shard takes the lower bits of a position's document, the shard's turn the rest."""
_MASK64 = (1 << 64) - 1


class Documents(Protocol):
    """Numbered documents; `read` gives None for one to pass over."""

    def __len__(self) -> int: ...
    def read(self, place: int) -> str | None: ...
    def where(self, place: int) -> str: ...


class Lane(Protocol):
    """The position is `epoch` and `document`, both plain ints that may be set before the first `load`."""

    epoch: int
    document: int

    def load(self) -> str:
        """The text at the position, after moving it over documents to pass over, and into the next epoch.

        Raises DataExhausted if there is no more and the source does not repeat, DataError naming the place
        of what cannot be read.
        """
        ...

    def advance(self) -> None:
        """Move to the next document."""
        ...

    def where(self) -> str:
        """The place of the document that was loaded last."""
        ...


def _ended(name: str, index: int, num_streams: int, held: str) -> DataExhausted:
    return DataExhausted(
        f"{name} ended: stream {index} cannot be filled further, and data.repeat = false. Set "
        f"data.repeat = true, or train for fewer steps (data.num_streams = {num_streams}, {held})."
    )


class ListLane:
    """Every num_streams-th document of a numbered source in the order of each pass.

    An epoch is one pass over the documents, or, with fewer documents than streams, as many as give every
    stream one. `document` counts within the stream's own list of the epoch.
    """

    def __init__(
        self,
        name: str,
        documents: Documents,
        order: Callable[[int, int], int],
        index: int,
        num_streams: int,
        repeat: bool,
    ) -> None:
        self.epoch, self.document = 0, 0
        self._name, self._documents, self._order = name, documents, order
        self._index, self._num_streams, self._repeat = index, num_streams, repeat
        self._passes = -(-num_streams // len(documents)) if repeat else 1
        dealt = len(documents) * self._passes
        self._length = max(0, -(-(dealt - index) // num_streams))
        self._place = 0

    def load(self) -> str:
        passed_over = 0
        while True:
            if self.document >= self._length or (self.epoch and not self._repeat):
                if not self._repeat:
                    held = f"{len(self._documents)} documents"
                    raise _ended(self._name, self._index, self._num_streams, held)
                self.epoch, self.document = self.epoch + 1, 0
            if passed_over > 3 * self._length:
                raise DataError(
                    f"{self._name}: no text in three passes over the {self._length} documents of stream "
                    f"{self._index} of {self._num_streams}. Lower data.num_streams or "
                    "data.validation_fraction."
                )
            turn = self._index + self.document * self._num_streams
            pass_, turn = divmod(turn, len(self._documents))
            self._place = self._order(self.epoch * self._passes + pass_, turn)
            text = self._documents.read(self._place)
            if text is not None:
                return text
            self.document, passed_over = self.document + 1, passed_over + 1

    def advance(self) -> None:
        self.document += 1

    def where(self) -> str:
        return self._documents.where(self._place)


class ShardLane:
    """A stream's shards of a source that can only be read shard by shard, from front to back.

    In each epoch the shards are shuffled and dealt to the streams as documents are elsewhere. With fewer
    shards than streams, the streams that meet in a shard take its documents in turn, another share each
    epoch. Documents are shuffled within windows of `window` of the stream's own in the shard: any position
    can be found again by reading the shard up to its window.

    Args:
        keep: whether a document is to be read, or passed over.
    """

    def __init__(
        self,
        source: ShardedSource,
        keep: Callable[[str], bool],
        index: int,
        num_streams: int,
        *,
        seed: int,
        shuffle: bool,
        window: int,
        repeat: bool,
    ) -> None:
        self.epoch, self.document = 0, 0
        self._source, self._keep = source, keep
        self._index, self._num_streams = index, num_streams
        self._seed, self._shuffle, self._window, self._repeat = seed & _MASK64, shuffle, window, repeat
        shards = source.num_shards
        self._turns = len(range(index, shards, num_streams)) or 1
        sharing = -(-(num_streams - index % shards) // shards)
        self._parts = sharing if shards < num_streams else 1
        self._held: tuple[int, int, int] | None = None
        """Epoch, turn and window of what `_texts` holds."""
        self._texts: list[str | None] = []
        self._reader: Iterator[str] = iter(())
        self._read_from: tuple[int, int, int] | None = None
        """Epoch, turn, and the window that `_reader` would give next."""
        self._number = 0

    def load(self) -> str:
        empty_epochs = -1  # the epoch under way had text before the position, or has not begun
        while True:
            turn, place = divmod(self.document, 1 << _TURN_BITS)
            if turn >= self._turns or (self.epoch and not self._repeat):
                if not self._repeat:
                    held = f"{self._source.num_shards} shards"
                    raise _ended(self._source.name, self._index, self._num_streams, held)
                empty_epochs += 1
                if empty_epochs > 2 + self._parts:
                    raise DataError(
                        f"{self._source.name}: no text for stream {self._index} of {self._num_streams} in "
                        f"{empty_epochs} epochs. Lower data.num_streams or data.validation_fraction."
                    )
                self.epoch, self.document = self.epoch + 1, 0
                continue
            window, within = divmod(place, self._window)
            texts = self._read_window(turn, window)
            if within >= len(texts):
                self.document = (turn + 1) << _TURN_BITS
                continue
            if self._shuffle:
                within = Permutation(len(texts), self._key(turn, window))(within)
            self._number = self._number_of(window * self._window + within)
            text = texts[within]
            if text is not None:
                return text
            self.document += 1

    def advance(self) -> None:
        self.document += 1

    def where(self) -> str:
        return self._source.where(self._shard(self.document >> _TURN_BITS), self._number)

    def _shard(self, turn: int) -> int:
        shards = self._source.num_shards
        place = (self._index + turn * self._num_streams) % shards
        if not self._shuffle:
            return place
        return Permutation(shards, mix64(mix64(self._seed) ^ self.epoch))(place)

    def _part(self) -> int:
        return (self._index // self._source.num_shards + self.epoch) % self._parts if self._parts > 1 else 0

    def _number_of(self, place: int) -> int:
        return place * self._parts + self._part()

    def _key(self, turn: int, window: int) -> int:
        key = mix64(self._seed ^ mix64(self.epoch))
        for value in (self._shard(turn), self._part(), window):
            key = mix64(key ^ mix64(value))
        return key

    def _read_window(self, turn: int, window: int) -> list[str | None]:
        """The texts of one window (fewer at the shard's end), None where one is to be passed over."""
        if self._held == (self.epoch, turn, window):
            return self._texts
        shard = self._shard(turn)
        number = window * self._window * self._parts
        self._held, self._texts = None, []
        texts: list[str | None] = []
        end = number + self._window * self._parts
        try:
            if self._read_from != (self.epoch, turn, window):
                self._reader = self._source.read_shard(shard, number)
            while number < end:
                text = next(self._reader, None)
                if text is None:
                    break
                if number % self._parts == self._part():
                    texts.append(text if text and self._keep(text) else None)
                number += 1
        except DataError:
            raise
        except Exception as error:
            where = self._source.where(shard, number)
            raise DataError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error
        self._read_from = (self.epoch, turn, window + 1)
        self._held, self._texts = (self.epoch, turn, window), texts
        return texts
