"""Print the merged configuration: ``python -m titanforge.config [--section.key value ...]``.

With ``--markdown`` alone: the reference page, docs/config.md.
"""

from __future__ import annotations

import sys

from titanforge.config.loader import read_config
from titanforge.config.reference import reference_markdown
from titanforge.config.schema import ConfigError
from titanforge.config.writer import to_toml


def main(argv: list[str]) -> int:
    """Print the merged configuration as TOML; 0 on success, 2 on a configuration error."""
    if argv == ["--markdown"]:
        print(reference_markdown(), end="")
        return 0
    try:
        loaded = read_config(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(to_toml(loaded.config), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
