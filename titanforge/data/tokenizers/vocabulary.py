"""A byte-pair vocabulary as any of the file formats gives it, and the patterns that split text for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>")
"""Tokens that base models close a document with, whatever `eos_token` of a chat model says."""
DOCUMENT_BEGINS = ("<|begin_of_text|>",)


@dataclass(frozen=True)
class Vocabulary:
    """What tiktoken and a decoder need."""

    family: str
    pattern: str
    ranks: dict[bytes, int]
    """Token -> 0 … n−1 in the order of merging, the 256 bytes first."""
    specials: dict[str, int]
    """Added tokens -> id. Never made from text."""
    bos_id: int
    eos_id: int
    normalize: bool = False
    """Unicode NFC before splitting."""
    ids: np.ndarray | None = None
    """int32 [n]: rank -> id; None if they are the same."""
    unmerged: dict[bytes, int] = field(default_factory=dict)
    """Tokens that no merge makes -> id; for decoding only."""


class TokenizerFileError(ValueError):
    """A tokenizer file that is broken, or asks for what is not available; the message names file and part."""
