"""Packing documents into sequences, and what a model is told about their boundaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from titanforge.data.errors import DataError, DataExhausted
from titanforge.data.tokenizers import Tokenizer

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


class Documents(Protocol):
    """Numbered documents; `read` gives None for one to pass over."""

    def __len__(self) -> int: ...
    def read(self, place: int) -> str | None: ...
    def where(self, place: int) -> str: ...


class StreamState(NamedTuple):
    """Where a stream stands: all that is needed to go on with it."""

    epoch: int = 0
    document: int = 0
    """Number in the stream's own list of the epoch."""
    offset: int = 0
    """First token of that document (with its eos) not yet used."""
    ordinal: int = 0
    """Number of the next sample in the stream."""


class Stream:
    """Stream `index` of `num_streams`: packs every num_streams-th document of the order, back to back.

    An epoch is one pass over the documents, or, with fewer documents than streams, as many as give every
    stream one. A document is its tokens and eos; a sample is the next `seq_len` tokens. Without `repeat`,
    `next_sample` raises DataExhausted at the first sample that the data does not fill; `pad_last` fills
    that one, if it has begun, with uncounted eos tokens.
    """

    def __init__(
        self,
        index: int,
        num_streams: int,
        documents: Documents,
        order: Callable[[int, int], int],
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        name: str,
        repeat: bool = True,
        pad_last: bool = False,
        state: StreamState | None = None,
    ) -> None:
        self.index, self.name = index, name
        self._num_streams, self._documents, self._order = num_streams, documents, order
        self._tokenizer, self._seq_len = tokenizer, seq_len
        self._repeat, self._pad_last = repeat, pad_last
        self._passes = -(-num_streams // len(documents)) if repeat else 1
        dealt = len(documents) * self._passes
        self._length = max(0, -(-(dealt - index) // num_streams))
        self._epoch, self._document, self._offset, self._ordinal = state or StreamState()
        self._current: np.ndarray | None = None
        self.bytes_read = 0
        """UTF-8 bytes of the documents begun."""
        self.tokens_read = 0
        """Their tokens, without eos."""

    @property
    def state(self) -> StreamState:
        return StreamState(self._epoch, self._document, self._offset, self._ordinal)

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
                if not (self._pad_last and filled):
                    raise
                starts[filled:] = True  # every padding token a document of its own: nothing predicts it
                break
            starts[filled] = self._offset == 0
            taken = document[self._offset : self._offset + length - filled]
            tokens[filled : filled + len(taken)] = taken
            filled += len(taken)
            self._offset += len(taken)
            if self._offset == len(document):
                self._document, self._offset, self._current = self._document + 1, 0, None
        if self._current is None:
            starts[length] = True
        else:
            tokens[length] = self._current[self._offset]
        self._ordinal += 1
        return Sample(tokens, starts)

    def _load(self) -> np.ndarray:
        """The current document's tokens and eos, int32 [n]; the next one with text if none is begun."""
        passed_over = 0
        while self._current is None:
            if self._document >= self._length or (self._epoch and not self._repeat):
                if not self._repeat:
                    raise DataExhausted(
                        f"{self.name} ended: sample {self._ordinal} of stream {self.index} cannot be filled, "
                        "and data.repeat = false. Set data.repeat = true, or train for fewer steps "
                        f"(data.num_streams = {self._num_streams}, {len(self._documents)} documents)."
                    )
                self._epoch, self._document = self._epoch + 1, 0
            if passed_over > 3 * self._length:
                raise DataError(
                    f"{self.name}: no text in three passes over the {self._length} documents of stream "
                    f"{self.index} of {self._num_streams}. Lower data.num_streams or "
                    "data.validation_fraction."
                )
            turn = self.index + self._document * self._num_streams
            pass_, turn = divmod(turn, len(self._documents))
            place = self._order(self._epoch * self._passes + pass_, turn)
            text = self._documents.read(place)
            if text is None:
                self._document, passed_over = self._document + 1, passed_over + 1
                continue
            self._current = self._tokenize(text, place)
        return self._current

    def _tokenize(self, text: str, place: int) -> np.ndarray:
        try:
            tokens = np.append(self._tokenizer.encode_array(text), np.int32(self._tokenizer.eos_id))
        except Exception as error:
            raise DataError(f"{self._documents.where(place)}: cannot be tokenized: {error}") from error
        if self._offset >= len(tokens):
            raise DataError(
                f"{self._documents.where(place)}: {len(tokens)} tokens, but the position to resume from "
                f"is token {self._offset} of this document: the data has changed since the checkpoint"
            )
        self.bytes_read += len(text.encode("utf-8", "replace"))
        self.tokens_read += len(tokens) - 1
        return tokens
