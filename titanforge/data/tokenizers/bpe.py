"""Byte-pair tokenizers from files on disk, run by tiktoken. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import unicodedata
from pathlib import Path

import numpy as np
import tiktoken

from titanforge.data.tokenizers.base import well_formed
from titanforge.data.tokenizers.huggingface import read_tokenizer_json, read_vocab_and_merges
from titanforge.data.tokenizers.pieces import pieces
from titanforge.data.tokenizers.ranks import read_rank_file


class BPETokenizer:
    """The vocabulary of a tiktoken rank file, a tokenizer.json, or a vocab.json with its merges.txt.

    Args:
        path: the file; of the pair, vocab.json.
        verified: the merges of this file have been looked through already (a second or two for a large one).

    Raises TokenizerFileError (a ValueError) if the file is broken or asks for what is not available.
    """

    def __init__(self, path: str, verified: bool = False) -> None:
        self.path = path
        content = Path(path).read_bytes()
        if path.endswith(".json"):
            read = read_vocab_and_merges if Path(path).name == "vocab.json" else read_tokenizer_json
            vocabulary, content = read(path, content, verified)
        else:
            vocabulary = read_rank_file(path, content)
        self._encoding = tiktoken.Encoding(
            vocabulary.family,
            pat_str=vocabulary.pattern,
            mergeable_ranks=vocabulary.ranks,
            special_tokens={},
        )
        self._ids = vocabulary.ids
        self._normalize = vocabulary.normalize
        names = {token.encode(): number for token, number in vocabulary.specials.items()}
        self._outside = {number: token for token, number in {**vocabulary.unmerged, **names}.items()}
        ranks = len(vocabulary.ranks)
        ids = np.arange(ranks) if self._ids is None else self._ids
        self._rank_of = None if self._ids is None else {int(number): i for i, number in enumerate(ids)}
        self._ranks = ranks
        self.name = f"{vocabulary.family}-{hashlib.blake2b(content, digest_size=6).hexdigest()}"
        self.vocab_size = 1 + max(int(ids.max()), *self._outside)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id

    def __reduce__(self) -> tuple[type[BPETokenizer], tuple[str, bool]]:
        # A worker process reads the file again: cheaper than to send a hundred thousand ranks.
        return BPETokenizer, (self.path, True)

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        text = well_formed(text)
        if self._normalize:
            text = unicodedata.normalize("NFC", text)
        # tiktoken knows of no special tokens here, so their names are ordinary text.
        ranks = [np.array(self._encoding.encode_ordinary(piece), np.int32) for piece in pieces(text)]
        joined = np.concatenate(ranks) if ranks else np.empty(0, np.int32)
        return joined if self._ids is None else self._ids[joined]

    def decode(self, ids: list[int]) -> str:
        return b"".join(map(self._token_bytes, ids)).decode("utf-8", errors="replace")

    def _token_bytes(self, number: int) -> bytes:
        if number in self._outside:
            return self._outside[number]
        rank = number if self._rank_of is None else self._rank_of.get(number, -1)
        if 0 <= rank < self._ranks:
            return self._encoding.decode_single_token_bytes(rank)
        return "\ufffd".encode()
