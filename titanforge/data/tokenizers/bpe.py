"""Byte-pair tokenizers from tiktoken rank files on disk. Nothing is downloaded.

A rank file holds one `base64(token bytes) rank` a line. It names neither the splitting pattern nor the
special tokens; the number of ranks tells the family (`FAMILIES`).
"""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from titanforge.data.tokenizers.base import well_formed

# tiktoken's regular expressions and merges recurse: they overflow the stack, or take quadratic time, on
# long inputs and on long runs without a break. Both limits are in characters.
CHUNK = 100_000
LONGEST_RUN = 25_000


@dataclass(frozen=True)
class Family:
    """How one published vocabulary splits text, and the special tokens that follow its ranks."""

    name: str
    pattern: str
    specials: tuple[str, ...]
    bos: str
    eos: str
    normalize: bool = False
    """Unicode NFC before splitting."""


_LLAMA3_SPECIALS = (
    "begin_of_text",
    "end_of_text",
    "reserved_special_token_0",
    "reserved_special_token_1",
    "finetune_right_pad_id",
    "step_id",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
    "image",
    *(f"reserved_special_token_{i}" for i in range(2, 246)),
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

FAMILIES = {
    128_000: Family(
        name="llama3",
        pattern=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
        specials=tuple(f"<|{name}|>" for name in _LLAMA3_SPECIALS),
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
    ),
    151_643: Family(
        name="qwen",
        pattern=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
        specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
        # Qwen has no token that opens a text.
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        normalize=True,
    ),
}
"""Number of ranks -> family."""


class BPETokenizer:
    """A tiktoken vocabulary of one of the `FAMILIES`, loaded from a rank file.

    Raises ValueError if the file is not a rank file, or of no known family.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        content = Path(path).read_bytes()
        ranks = _parse_ranks(path, content)
        family = FAMILIES.get(len(ranks))
        if family is None:
            known = ", ".join(f"{family.name} ({count})" for count, family in FAMILIES.items())
            raise ValueError(f"data.tokenizer: {path} holds {len(ranks)} ranks; known vocabularies: {known}")
        specials = {token: len(ranks) + i for i, token in enumerate(family.specials)}
        self._encoding = tiktoken.Encoding(
            family.name, pat_str=family.pattern, mergeable_ranks=ranks, special_tokens=specials
        )
        self._normalize = family.normalize
        self.name = f"{family.name}-{hashlib.blake2b(content, digest_size=6).hexdigest()}"
        self.vocab_size = len(ranks) + len(specials)
        self.bos_id = specials[family.bos]
        self.eos_id = specials[family.eos]

    def __reduce__(self) -> tuple[type[BPETokenizer], tuple[str]]:
        # A worker process reads the file again: cheaper than to send a hundred thousand ranks.
        return BPETokenizer, (self.path,)

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        text = well_formed(text)
        if self._normalize:
            text = unicodedata.normalize("NFC", text)
        # With nothing disallowed and nothing allowed, special tokens' names are ordinary text.
        ids = [np.array(self._encoding.encode_ordinary(piece), np.int32) for piece in _pieces(text)]
        return np.concatenate(ids) if ids else np.empty(0, np.int32)

    def decode(self, ids: list[int]) -> str:
        parts = (
            self._encoding.decode_single_token_bytes(i) if 0 <= i < self.vocab_size else "\ufffd".encode()
            for i in ids
        )
        return b"".join(parts).decode("utf-8", errors="replace")


def _parse_ranks(path: str, content: bytes) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"data.tokenizer: {path}, line {number}: not a tiktoken rank file (base64 token, space, "
                "rank). SentencePiece models and tokenizer.json are not supported."
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"data.tokenizer: {path}: the ranks are not 0 … {len(ranks) - 1}; truncated file?")
    return ranks


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces that tiktoken can take, cut where every family's pattern cuts anyway if possible."""
    start = 0
    while len(text) - start > CHUNK:
        end = _safe_cut(text, start, start + CHUNK)
        yield from _bounded_runs(text[start:end])
        start = end
    if start < len(text):
        yield from _bounded_runs(text[start:])


def _safe_cut(text: str, start: int, end: int) -> int:
    """The last place in (start, end] between a newline and something that is not white space.

    No alternative of the patterns matches across it: newlines only ever close a match. Without such a
    place, `end`.
    """
    cut = end
    while (cut := text.rfind("\n", start, cut)) >= 0:
        if not text[cut + 1].isspace():
            return cut + 1
    return end


def _bounded_runs(chunk: str) -> Iterator[str]:
    """`chunk`, cut additionally wherever a run of white space, or of anything else, gets too long."""
    longest = max(map(len, chunk.split()), default=0)
    if longest <= LONGEST_RUN and len(chunk) - sum(map(len, chunk.split())) <= LONGEST_RUN:
        yield chunk
        return
    start = 0
    for run in re.finditer(r"\s+|\S+", chunk):
        for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            yield chunk[start:cut]
            start = cut
    yield chunk[start:]
