"""Cutting long texts into pieces that tiktoken can take, where no token can reach across if possible."""

from __future__ import annotations

import re
from collections.abc import Iterator

# tiktoken's regular expressions and merges recurse: they overflow the stack, or take quadratic time, on
# long inputs and on long runs without a break. Both limits are in characters.
CHUNK = 100_000
LONGEST_RUN = 25_000


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces of at most CHUNK characters, cut where the patterns cut anyway if possible."""
    start = 0
    while len(text) - start > CHUNK:
        end = _safe_cut(text, start, start + CHUNK)
        yield from _bounded_runs(text[start:end])
        start = end
    if start < len(text):
        yield from _bounded_runs(text[start:])


def _safe_cut(text: str, start: int, end: int) -> int:
    """The last place in (start, end] before a space, or between a letter or digit and a newline, that white
    space does not precede. Without such a place, `end`.

    No alternative of the published patterns (GPT-2's and its descendants) matches across either: a space
    only ever opens a match or lies in a run of white space, and a newline only joins white space or
    punctuation before it. A piece that ends in no white space has none whose lookahead could see the cut.
    """
    for cut in (_last(text, " ", start, end, str.isspace), _last(text, "\n", start, end, _not_alphanumeric)):
        if cut is not None:
            return cut
    return end


def _not_alphanumeric(character: str) -> bool:
    return not (character.isalpha() or character.isdecimal())


def _last(text: str, character: str, start: int, end: int, barred) -> int | None:
    cut = end + 1
    while (cut := text.rfind(character, start + 1, cut)) >= 0:
        if not barred(text[cut - 1]):
            return cut
    return None


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
