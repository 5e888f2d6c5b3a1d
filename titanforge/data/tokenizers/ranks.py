"""tiktoken rank files: one `base64(token bytes) rank` a line.

They name neither the splitting pattern nor the special tokens; the number of ranks tells the family.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from titanforge.data.tokenizers.vocabulary import (
    LLAMA3_PATTERN,
    QWEN_PATTERN,
    TokenizerFileError,
    Vocabulary,
)


@dataclass(frozen=True)
class Family:
    """How one published vocabulary splits text, and the special tokens that follow its ranks."""

    name: str
    pattern: str
    specials: tuple[str, ...]
    bos: str
    eos: str
    normalize: bool = False


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

FAMILIES = {
    128_000: Family(
        name="llama3",
        pattern=LLAMA3_PATTERN,
        specials=tuple(f"<|{name}|>" for name in _LLAMA3_SPECIALS),
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
    ),
    151_643: Family(
        name="qwen",
        pattern=QWEN_PATTERN,
        specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
        # Qwen has no token that opens a text.
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        normalize=True,
    ),
}
"""Number of ranks -> family."""


def read_rank_file(path: str, content: bytes) -> Vocabulary:
    """The vocabulary in a rank file. Raises TokenizerFileError if it is none, or of no known family."""
    ranks = _parse_ranks(path, content)
    family = FAMILIES.get(len(ranks))
    if family is None:
        known = ", ".join(f"{family.name} ({count})" for count, family in FAMILIES.items())
        raise TokenizerFileError(
            f"data.tokenizer: {path} holds {len(ranks)} ranks; known vocabularies: {known}. Others can be "
            "read as tokenizer.json, which says how text is split."
        )
    specials = {token: len(ranks) + i for i, token in enumerate(family.specials)}
    return Vocabulary(
        family=family.name,
        pattern=family.pattern,
        ranks=ranks,
        specials=specials,
        bos_id=specials[family.bos],
        eos_id=specials[family.eos],
        normalize=family.normalize,
    )


def _parse_ranks(path: str, content: bytes) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise TokenizerFileError(
                f"data.tokenizer: {path}, line {number}: not a tiktoken rank file (base64 token, space, "
                "rank). SentencePiece models are not supported."
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerFileError(
            f"data.tokenizer: {path}: the ranks are not 0 … {len(ranks) - 1}; truncated file?"
        )
    return ranks
