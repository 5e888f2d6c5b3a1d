"""Hugging Face's files of byte-level byte-pair vocabularies, read into tiktoken's terms.

`tokenizer.json` describes a whole pipeline. What of it decides ids is read or, by name, refused: a
tokenizer that is nearly right trains a model that is wrong everywhere.

The `tokenizers` library merges listed *pairs*, tiktoken any neighbours whose union is a token. For the files
that training and conversion make these are the same; `_check_merges` refuses files for which they are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from titanforge.data.tokenizers.vocabulary import (
    DOCUMENT_BEGINS,
    DOCUMENT_ENDS,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    QWEN_PATTERN,
    TokenizerFileError,
    Vocabulary,
)

Pair = tuple[bytes, bytes]

_WHOLE_PATTERNS = (GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN)
_CLASS_PATTERNS = {"GPT2Tokenizer": (GPT2_PATTERN, False), "Qwen2Tokenizer": (QWEN_PATTERN, True)}
"""Class in tokenizer_config.json -> how its vocab.json and merges.txt want text split, and NFC."""


def read_tokenizer_json(path: str, content: bytes, verified: bool) -> tuple[Vocabulary, bytes]:
    """The vocabulary of a tokenizer.json (bos and eos from tokenizer_config.json beside it if need be), and
    the bytes that identify it. Raises TokenizerFileError."""
    settings = _parse(path, content)
    model = settings.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise TokenizerFileError(f"data.tokenizer: {path}: no model.vocab in it; not a tokenizer.json?")
    _check_model(path, model)
    normalize = _normalization(path, settings.get("normalizer"))
    pattern = _pattern(path, settings.get("pre_tokenizer"))
    added = settings.get("added_tokens") or []
    for token in added:
        if not token["content"].strip():
            raise _lacks(path, f"the added token {token['content']!r}, white space that text turns into")
    specials = {token["content"]: int(token["id"]) for token in added}
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    vocabulary = _assemble(
        path,
        "bpe",
        pattern,
        normalize,
        model["vocab"],
        merges,
        specials,
        whole_words=bool(model.get("ignore_merges")),
        verified=verified,
    )
    return vocabulary, content


def read_vocab_and_merges(path: str, content: bytes, verified: bool) -> tuple[Vocabulary, bytes]:
    """The vocabulary of vocab.json with merges.txt beside it, as GPT-2 and Qwen published them, and the bytes
    that identify it. Raises TokenizerFileError, FileNotFoundError."""
    folder = Path(path).parent
    beside = folder / "merges.txt"
    if not beside.is_file():
        raise FileNotFoundError(f"data.tokenizer: {path} needs merges.txt beside it")
    name = str(_config(folder).get("tokenizer_class", "GPT2Tokenizer")).removesuffix("Fast")
    if name not in _CLASS_PATTERNS:
        raise _lacks(path, f"the splitting of text by {name} (tokenizer_config.json); use its tokenizer.json")
    pattern, normalize = _CLASS_PATTERNS[name]
    merges_content = beside.read_bytes()
    lines = merges_content.decode("utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    vocab = _parse(path, content)
    added = folder / "added_tokens.json"
    specials = _parse(str(added), added.read_bytes()) if added.is_file() else {}
    # GPT-2's one special token is an ordinary entry that no merge makes.
    specials |= {token: vocab[token] for token in (*DOCUMENT_ENDS, *DOCUMENT_BEGINS) if token in vocab}
    vocabulary = _assemble(
        path, "bpe", pattern, normalize, vocab, merges, specials, whole_words=False, verified=verified
    )
    return vocabulary, content + merges_content


def _parse(path: str, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise TokenizerFileError(f"data.tokenizer: {path}: not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise TokenizerFileError(f"data.tokenizer: {path}: a JSON object is expected")
    return parsed


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return _parse(str(path), path.read_bytes()) if path.is_file() else {}


def _lacks(path: str, what: str) -> TokenizerFileError:
    return TokenizerFileError(
        f"data.tokenizer: {path} asks for {what}, which titanforge does not have. "
        "Supported: byte-level BPE as of GPT-2, Llama 3 and Qwen."
    )


# --- the parts of a pipeline ------------------------------------------------------------------------------


def _check_model(path: str, model: dict[str, Any]) -> None:
    kind = model.get("type", "BPE")  # files of 2019 have no type
    if kind != "BPE" or not isinstance(model["vocab"], dict):
        raise _lacks(path, f"a model of type {kind}")
    if model.get("byte_fallback"):
        raise _lacks(path, "model.byte_fallback (a converted SentencePiece vocabulary)")
    if model.get("dropout"):
        raise _lacks(path, "model.dropout (random merges)")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _lacks(path, f"model.{key} = {model[key]!r}")


def _normalization(path: str, normalizer: dict[str, Any] | None) -> bool:
    """Whether text is to be brought to NFC."""
    if normalizer is None:
        return False
    if normalizer.get("type") == "Sequence":
        wanted = [_normalization(path, part) for part in normalizer["normalizers"]]
        return any(wanted)
    if normalizer.get("type") != "NFC":
        raise _lacks(path, f"the normalizer {normalizer.get('type')}")
    return True


def _pattern(path: str, pre_tokenizer: dict[str, Any] | None) -> str:
    """The one regular expression that the pre-tokenizers amount to."""
    if pre_tokenizer is None:
        raise _lacks(path, "no pre_tokenizer (ByteLevel is expected)")
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    kinds = [part.get("type") for part in parts]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise _lacks(path, f"the pre_tokenizer {' + '.join(map(str, kinds))}")
    byte_level = parts[-1]
    if byte_level.get("add_prefix_space", True):
        raise _lacks(path, "pre_tokenizer ByteLevel with add_prefix_space")
    if len(parts) == 1:
        if not byte_level.get("use_regex", True):
            raise _lacks(path, "pre_tokenizer ByteLevel without its pattern (use_regex = false) or a Split")
        return GPT2_PATTERN
    split = parts[0]
    if byte_level.get("use_regex", True):
        raise _lacks(path, "pre_tokenizer Split and then ByteLevel's own pattern (use_regex = true)")
    if split.get("behavior") != "Isolated" or split.get("invert"):
        raise _lacks(path, f"pre_tokenizer Split with behavior {split.get('behavior')}, or inverted")
    pattern = split.get("pattern", {}).get("Regex")
    if pattern is None:
        raise _lacks(path, "pre_tokenizer Split by a plain string")
    if pattern in _WHOLE_PATTERNS:
        return pattern
    # tiktoken drops what the pattern leaves over, Split keeps it as pieces of its own.
    return rf"{pattern}|(?:(?!{pattern})[\s\S])+"


# --- ids and merges ---------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _spell(path: str, token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        raise _lacks(path, f"the token {token!r}, not spelt in ByteLevel's alphabet") from None


def _assemble(
    path: str,
    family: str,
    pattern: str,
    normalize: bool,
    vocab: dict[str, int],
    merges: list[tuple[str, ...]],
    specials: dict[str, int],
    *,
    whole_words: bool,
    verified: bool,
) -> Vocabulary:
    """`whole_words`: a word that is a token is taken as it is, whether or not merging would make it."""
    spelt = {_spell(path, token): number for token, number in vocab.items() if token not in specials}
    missing = [byte for byte in range(256) if bytes([byte]) not in spelt]
    if missing:
        raise _lacks(path, f"a vocabulary without {len(missing)} of the 256 bytes (first: {missing[0]})")
    ranks = {bytes([byte]): byte for byte in range(256)}
    pairs: list[Pair] = []
    for number, pair in enumerate(merges, start=1):
        if len(pair) != 2:
            raise TokenizerFileError(f"data.tokenizer: {path}: merge {number} is not a pair: {pair}")
        left, right = (_spell(path, token) for token in pair)
        if not {left, right, left + right} <= spelt.keys():
            raise TokenizerFileError(
                f"data.tokenizer: {path}: merge {number} ({pair[0]!r}, {pair[1]!r}) joins or makes what is "
                "no token"
            )
        pairs.append((left, right))
        ranks.setdefault(left + right, len(ranks))
    unmerged = {token: number for token, number in spelt.items() if token not in ranks}
    if not verified:
        _check_merges(path, pairs, ranks, unmerged, whole_words)
    ids = np.array([spelt[token] for token in ranks], np.int32)
    everything = {**vocab, **specials}
    config = _config(Path(path).parent)
    eos = _choose(DOCUMENT_ENDS, config, "eos_token", specials)
    if eos is None:
        raise TokenizerFileError(
            f"data.tokenizer: {path}: no token to close a document with: neither one of "
            f"{', '.join(DOCUMENT_ENDS)} among its added tokens nor eos_token in tokenizer_config.json"
        )
    bos = _choose(DOCUMENT_BEGINS, config, "bos_token", specials) or eos
    return Vocabulary(
        family=family,
        pattern=pattern,
        ranks=ranks,
        specials=specials,
        bos_id=everything[bos],
        eos_id=everything[eos],
        normalize=normalize,
        ids=ids,
        unmerged=unmerged,
    )


def _choose(known: tuple[str, ...], config: dict, key: str, specials: dict[str, int]) -> str | None:
    token = config.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    return next((name for name in (*known, token) if name in specials), None)


def _check_merges(
    path: str, pairs: list[Pair], ranks: dict[bytes, int], unmerged: dict[bytes, int], whole_words: bool
) -> None:
    """Raise unless merging any neighbours that make a token (tiktoken) is merging the listed pairs.

    It is if the earlier merges take the token's bytes to a listed pair (trained vocabularies: then no text
    leaves another pair of its parts side by side), or, where whole words need no merges, if every way to
    split a token in two tokens is listed (vocabularies converted from rank files).
    """
    if unmerged and whole_words:
        raise _lacks(path, f"{len(unmerged)} tokens that no merge makes (ignore_merges)")
    listed = set(pairs)
    last = -1
    for pair in pairs:
        rank = ranks[pair[0] + pair[1]]
        if rank < last:
            raise _lacks(path, f"merges that come back to the token {pair[0] + pair[1]!r} later on")
        last = rank
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        if whole_words and all(
            split in listed for split in splits if split[0] in ranks and split[1] in ranks
        ):
            continue
        parts = _merge_below(token, rank, ranks)
        if len(parts) != 2 or (parts[0], parts[1]) not in listed:
            raise _lacks(path, f"merges that do not take {token!r} to a listed pair")


def _merge_below(token: bytes, limit: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The parts that merges of rank below `limit` leave of `token`, lowest rank first, from the left."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        candidates = [ranks.get(parts[i] + parts[i + 1], limit) for i in range(len(parts) - 1)]
        best = min(candidates, default=limit)
        if best >= limit:
            return parts
        at = candidates.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
