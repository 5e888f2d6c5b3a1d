"""Line numbers of the keys in a TOML text, which the standard parser does not keep."""

from __future__ import annotations

import re

_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_DOTTED_KEY = re.compile(rf"{_KEY}(?:\s*\.\s*{_KEY})*")
_ONE_KEY = re.compile(_KEY)


def _split(dotted: str) -> list[str]:
    return [part.strip("\"'") for part in _ONE_KEY.findall(dotted)]


def _scan_value(text: str, depth: int, quote: str) -> tuple[int, str]:
    """Walk over (part of) a value; return the bracket depth and the open multi-line quote after it."""
    i = 0
    while i < len(text):
        if quote:
            if text[i] == "\\" and quote[0] == '"':
                i += 2
                continue
            if text.startswith(quote, i):
                i += len(quote)
                quote = ""
                continue
        elif text[i] == "#":
            break
        elif text[i] in "\"'":
            quote = text[i] * 3 if text.startswith(text[i] * 3, i) else text[i]
            i += len(quote)
            continue
        else:
            depth += (text[i] in "[{") - (text[i] in "]}")
        i += 1
    return depth, quote if len(quote) == 3 else ""


def key_lines(text: str) -> dict[str, int]:
    """Map each dotted path and each section of a valid TOML text to its 1-based line.

    The n-th table of an array of tables is ``name[n]``. What stands inside an
    inline table or a multi-line array is not listed; ``line_of`` gives it the
    line of the key that it belongs to.
    """
    lines: dict[str, int] = {}
    array_sizes: dict[str, int] = {}
    prefix = ""
    depth, quote = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if depth or quote:
            depth, quote = _scan_value(line, depth, quote)
            continue
        line = line.strip()
        if line.startswith("["):
            is_array = line.startswith("[[")
            match = _DOTTED_KEY.match(line.lstrip("[").lstrip())
            assert match is not None, f"not a TOML header: {line}"
            prefix = ".".join(_split(match.group()))
            if is_array:
                index = array_sizes.get(prefix, 0)
                array_sizes[prefix] = index + 1
                lines.setdefault(prefix, number)
                prefix = f"{prefix}[{index}]"
            lines.setdefault(prefix, number)
            prefix += "."
            continue
        match = _DOTTED_KEY.match(line)
        if match is None:  # blank or comment
            continue
        lines.setdefault(prefix + ".".join(_split(match.group())), number)
        depth, quote = _scan_value(line[match.end() :], 0, "")
    return lines


def line_of(lines: dict[str, int], path: str) -> int | None:
    """Line of a path, else of the first thing below it, else of the nearest thing around it."""
    while path:
        if path in lines:
            return lines[path]
        below = [line for other, line in lines.items() if other.startswith(f"{path}.")]
        if below:
            return min(below)
        path = path[: path.rindex("[")] if path.endswith("]") else path.rpartition(".")[0]
    return None
