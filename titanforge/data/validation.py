"""The validation loader: a fixed, finite set of sequences, the same number of batches on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from titanforge.data.errors import DataExhausted
from titanforge.data.lanes import Lane
from titanforge.data.packing import Batch, Sample, Stream, make_batch
from titanforge.data.tokenizers import Tokenizer


class ValidationLoader:
    """Iterate it as often as wanted: always the same batches, [local_batch_size, T] each.

    The documents are packed in the order of their source into one row of sequences, several sources mixed by
    their weights; sequence i goes to rank
    i mod dp_world. The last sequence, and ranks with fewer sequences than others, are filled up with tokens
    whose labels are not counted, so each token counts once whatever the number of ranks. A rank keeps its
    packed sequences in memory (5 bytes a token).
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        weights: Sequence[float],
        tokenizer: Tokenizer,
        seq_len: int,
        local_batch_size: int,
        dp_rank: int,
        dp_world: int,
        steps: int,
        document_mask: bool,
        name: str,
    ) -> None:
        stream = Stream(0, lanes, weights, tokenizer, seq_len, to_the_end=True)
        limit = None if steps < 0 else steps * local_batch_size * dp_world
        mine: list[Sample] = []
        count = 0
        while count != limit:
            try:
                sample = stream.next_sample()
            except DataExhausted:
                break
            if count % dp_world == dp_rank:
                mine.append(sample)
            count += 1
        if not count:
            raise ValueError(
                f"validation: no text held out of {name}. Raise "
                "data.validation_fraction, set validation.dataset, or validation.enable = false."
            )
        batches = -(-count // (local_batch_size * dp_world))
        padding = Sample(np.full(seq_len + 1, tokenizer.eos_id, np.int32), np.ones(seq_len + 1, bool))
        mine += [padding] * (batches * local_batch_size - len(mine))
        self._samples, self._local_batch_size = mine, local_batch_size
        self._document_mask = document_mask
        self.bytes_per_token = stream.bytes_read / stream.tokens_read
        """UTF-8 bytes per token of the text read: loss / this = nats per byte (1 with the byte tokenizer)."""

    def __len__(self) -> int:
        return len(self._samples) // self._local_batch_size

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self._samples), self._local_batch_size):
            rows = self._samples[first : first + self._local_batch_size]
            yield make_batch(
                np.stack([row.tokens for row in rows]),
                np.stack([row.starts for row in rows]),
                self._document_mask,
            )
