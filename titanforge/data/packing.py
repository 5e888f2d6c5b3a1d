"""Packing documents into sequences, and what a model is told about their boundaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from titanforge.data.errors import DataError, DataExhausted
from titanforge.data.lanes import Lane
from titanforge.data.order import mix64
from titanforge.data.tokenizers import Tokenizer

_MASK64 = (1 << 64) - 1
IGNORED = -100
"""Label of a token whose prediction is not counted."""


class Batch(NamedTuple):
    """One micro-batch, int64 [B, T] each."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """The next token of the same document; −100 after a document's last, and in padding."""
    positions: torch.Tensor
    """0 at each document's first token in the sequence (with document_mask; else 0 … T−1)."""
    document_ids: torch.Tensor
    """0, 1, … in order of the documents in the sequence (with document_mask; else 0)."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        return Batch(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))

    def pin_memory(self) -> Batch:
        return Batch(*(tensor.pin_memory() for tensor in self))


class Sample(NamedTuple):
    """One packed sequence and the token after it."""

    tokens: np.ndarray
    """int32 [T + 1]"""
    starts: np.ndarray
    """bool [T + 1]: a document's first token; never predicted from the one before."""


def make_batch(tokens: np.ndarray, starts: np.ndarray, document_mask: bool) -> Batch:
    """The batch of stacked samples: `tokens` int32 [B, T + 1], `starts` bool [B, T + 1]."""
    inputs = tokens[:, :-1].astype(np.int64)
    labels = np.where(starts[:, 1:], IGNORED, tokens[:, 1:]).astype(np.int64)
    positions = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int64), inputs.shape).copy()
    documents = np.zeros_like(positions)
    if document_mask:
        inner = starts[:, :-1].copy()
        inner[:, 0] = False  # what a sequence begins with is document 0, be it a document's start or not
        documents = np.cumsum(inner, axis=1, dtype=np.int64)
        positions -= np.maximum.accumulate(np.where(inner, positions, 0), axis=1)
    return Batch(*map(torch.from_numpy, (inputs, labels, positions, documents)))


class StreamState(NamedTuple):
    """Where a stream stands: all that is needed to go on with it."""

    epoch: int = 0
    document: int = 0
    """In the lane that `source` numbers: where that lane stands."""
    offset: int = 0
    """First token of that document (with its eos) not yet used."""
    ordinal: int = 0
    """Number of the next sample in the stream."""
    mix: tuple[int, ...] = ()
    """Of a mix: the number of the source under way, then for each source epoch, document, and tokens taken
    from it."""

    @property
    def row(self) -> list[int]:
        return [*self[:4], *self.mix]

    @classmethod
    def from_row(cls, row: list[int]) -> StreamState:
        return cls(*row[:4], mix=tuple(row[4:]))


def state_width(num_sources: int) -> int:
    """Integers in the state of a stream over this many sources."""
    return 4 if num_sources == 1 else 5 + 3 * num_sources


_HEAD_START = 1000.0
"""Tokens: the scale of how far apart streams begin in a mix."""


def _head_start(seed: int, stream: int, source: int) -> int:
    """Exponentially distributed tokens, the same on every machine."""
    uniform = (mix64(mix64(mix64(seed & _MASK64) ^ stream) ^ source) + 1) / 2.0**64
    return round(-math.log(uniform) * _HEAD_START)


class Stream:
    """Stream `index`: packs the documents of its lanes, one per source, back to back.

    A document is its tokens and eos; a sample is the next `seq_len` tokens. When a document ends, the next
    one comes from the source with the least tokens taken for its weight, so that every stream has the mix
    of the weights to within a document. Streams begin with head starts drawn from `seed`, such that the
    first source has the odds of the weights (exponential variables with rates w: the smallest is that of
    source s with probability w_s).

    Raises DataExhausted at the first sample that the data does not fill. With `to_the_end` it reads the
    lanes that are left until all have ended, and fills that sample, if it has begun, with uncounted eos
    tokens; there are no head starts then.
    """

    def __init__(
        self,
        index: int,
        lanes: Sequence[Lane],
        weights: Sequence[float],
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        seed: int = 0,
        to_the_end: bool = False,
        state: StreamState | None = None,
    ) -> None:
        self._lanes, self._weights = lanes, weights
        self._tokenizer, self._seq_len, self._to_the_end = tokenizer, seq_len, to_the_end
        self._tokens = [0] * len(lanes)
        self._head_start = [0 if to_the_end else _head_start(seed, index, s) for s in range(len(lanes))]
        self._source, self._offset, self._ordinal = 0, 0, 0
        self._ended: set[int] = set()
        if state is not None:
            self._restore(state)
        self._current: np.ndarray | None = None
        self.bytes_read = 0
        """UTF-8 bytes of the documents begun."""
        self.tokens_read = 0
        """Their tokens, without eos."""

    def _restore(self, state: StreamState) -> None:
        self._offset, self._ordinal = state.offset, state.ordinal
        if state.mix:
            self._source = state.mix[0]
            for s, lane in enumerate(self._lanes):
                lane.epoch, lane.document, self._tokens[s] = state.mix[1 + 3 * s : 4 + 3 * s]
        else:
            self._lanes[0].epoch, self._lanes[0].document = state.epoch, state.document

    @property
    def state(self) -> StreamState:
        lane, mix = self._lanes[self._source], ()
        if len(self._lanes) > 1:
            positions = [(each.epoch, each.document, n) for each, n in zip(self._lanes, self._tokens)]
            mix = (self._source, *(number for position in positions for number in position))
        return StreamState(lane.epoch, lane.document, self._offset, self._ordinal, mix)

    @property
    def tokens_taken(self) -> list[int]:
        """Tokens (eos included) that the samples have taken of each source."""
        return self._tokens

    def next_sample(self) -> Sample:
        """The sample of number `state.ordinal`; then the state is that of the next one."""
        length, eos = self._seq_len, self._tokenizer.eos_id
        tokens = np.full(length + 1, eos, np.int32)
        starts = np.zeros(length + 1, bool)
        filled = 0
        while filled < length:
            try:
                document = self._load()
            except DataExhausted:
                if not (self._to_the_end and filled):
                    raise
                starts[filled:] = True  # every padding token a document of its own: nothing predicts it
                break
            starts[filled] = self._offset == 0
            taken = document[self._offset : self._offset + length - filled]
            tokens[filled : filled + len(taken)] = taken
            filled += len(taken)
            self._offset += len(taken)
            self._tokens[self._source] += len(taken)
            if self._offset == len(document):
                self._lanes[self._source].advance()
                self._offset, self._current = 0, None
        if self._current is None:
            starts[length] = True
        else:
            tokens[length] = self._current[self._offset]
        self._ordinal += 1
        return Sample(tokens, starts)

    def _load(self) -> np.ndarray:
        """The current document's tokens and eos, int32 [n]; the next one with text if none is begun."""
        while self._current is None:
            if not self._offset:
                self._source = self._draw()
            lane = self._lanes[self._source]
            try:
                text = lane.load()
            except DataExhausted:
                self._ended.add(self._source)
                if not self._to_the_end or len(self._ended) == len(self._lanes):
                    raise
                continue
            self._current = self._tokenize(text, lane)
        return self._current

    def _draw(self) -> int:
        """The source that has given the least for its weight; the first of equals."""
        left = [s for s in range(len(self._lanes)) if s not in self._ended] or [0]
        return min(left, key=lambda s: (self._tokens[s] + self._head_start[s]) / self._weights[s])

    def _tokenize(self, text: str, lane: Lane) -> np.ndarray:
        try:
            tokens = np.append(self._tokenizer.encode_array(text), np.int32(self._tokenizer.eos_id))
        except Exception as error:
            raise DataError(f"{lane.where()}: cannot be tokenized: {error}") from error
        if self._offset >= len(tokens):
            raise DataError(
                f"{lane.where()}: {len(tokens)} tokens, but the position to resume from "
                f"is token {self._offset} of this document: the data has changed since the checkpoint"
            )
        self.bytes_read += len(text.encode("utf-8", "replace"))
        self.tokens_read += len(tokens) - 1
        return tokens
