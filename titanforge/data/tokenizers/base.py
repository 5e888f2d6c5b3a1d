"""What every tokenizer offers."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to token ids and back. Text never turns into a special token, whatever it contains."""

    name: str
    """Names the vocabulary; part of the identity of a data position in a checkpoint."""
    vocab_size: int
    bos_id: int
    eos_id: int
    """Closes a document."""

    def encode(self, text: str) -> list[int]: ...

    def encode_array(self, text: str) -> np.ndarray:
        """Like `encode`, as int32 [n]; of any length of text."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Special tokens by their names; ids beyond the vocabulary as U+FFFD."""
        ...


def well_formed(text: str) -> str:
    """`text` with lone surrogates (JSON can spell them, UTF-8 cannot) replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
