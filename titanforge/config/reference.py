"""Help text and docs/config.md, made from ``sections`` so that they cannot go stale.

``python -m titanforge.config --markdown`` prints the Markdown page (``make docs`` writes it).
"""

from __future__ import annotations

import dataclasses
import textwrap
import typing

from titanforge.config import schema
from titanforge.config.sections import JobConfig
from titanforge.config.theirs import FOREIGN_KEYS

_USAGE = """\
usage: torchrun [...] train.py [--job.config_file FILE.toml] [--section.key value ...]

The command line wins over the file, the file over the defaults. Write --section.key value or
--section.key=value; a switch alone (--compile.enable) means true; lists are a,b or a TOML array;
none unsets a key that may be unset."""


def _table_keys(key: schema.Key) -> list[schema.Key]:
    """The keys of one table of a list of tables; empty for any other key."""
    item = schema.list_item(schema.without_none(key.annotation)[0])
    if item is None or not dataclasses.is_dataclass(item):
        return []
    return list(schema.walk_keys(typing.cast(type, item), f"{key.path}[]."))


def _described_keys(section: str) -> list[schema.Key]:
    keys = [key for key in schema.all_keys().values() if key.section == section]
    return [entry for key in keys for entry in (key, *_table_keys(key))]


def format_help(width: int = 100) -> str:
    """Every key with its type, default and documentation, as plain text."""
    lines = [_USAGE]
    for section in schema.all_sections():
        lines += ["", f"[{section}]"]
        for key in _described_keys(section):
            lines.append(
                f"  --{key.path}  ({schema.describe_type(key.annotation)}; {schema.show(key.default)})"
            )
            lines += textwrap.wrap(key.doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def reference_markdown() -> str:
    """The page docs/config.md."""
    lines = [
        "# Configuration reference",
        "",
        "<!-- Generated from titanforge/config/sections/ by `make docs`: edit that instead. -->",
        "",
        "A run is described by a TOML file (`--job.config_file`); any key can be overridden on the command",
        "line as `--section.key value` or `--section.key=value`. The command line wins over the file, the",
        "file over the defaults below. A switch alone (`--compile.enable`) means true, lists are `a,b` or a",
        "TOML array, and `none` unsets a key that may be unset. `python -m titanforge.config [...]` prints",
        "the merged result.",
    ]
    for section in schema.all_sections():
        lines += [
            "",
            f"## [{section}]",
            "",
            "| key | type | default | meaning |",
            "| --- | --- | --- | --- |",
        ]
        for key in _described_keys(section):
            name = key.path.removeprefix(f"{section}.")
            kind = schema.describe_type(key.annotation).replace("|", "\\|")
            doc = key.doc.replace("|", "\\|")
            lines.append(f"| `{name}` | {kind} | `{schema.show(key.default)}` | {doc} |")
    lines += [
        "",
        "## Keys of torchtitan that titanforge lacks",
        "",
        "Job files written for torchtitan load here. Of the keys below, one that is switched off is ignored",
        "with a warning and one that is switched on is refused.",
        "",
        "| key | instead |",
        "| --- | --- |",
        *(
            f"| `{path}` | {foreign.instead.replace('|', chr(92) + '|')} |"
            for path, foreign in FOREIGN_KEYS.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def undocumented_keys() -> list[str]:
    """Keys without a documentation string (a test wants this empty)."""
    return [
        entry.path
        for key in schema.walk_keys(JobConfig)
        for entry in (key, *_table_keys(key))
        if not entry.doc
    ]
