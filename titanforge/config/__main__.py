"""Print the merged configuration: ``python -m titanforge.config [--section.key value ...]``.

With ``--check`` first: nothing but what is wrong with it, for WORLD_SIZE ranks (default 1).
With ``--markdown`` alone: the reference page, docs/config.md.
"""

from __future__ import annotations

import os
import sys

from titanforge.config.loader import read_config
from titanforge.config.reference import reference_markdown
from titanforge.config.schema import ConfigError
from titanforge.config.validation import validate_config
from titanforge.config.writer import to_toml


def main(argv: list[str]) -> int:
    """Print the merged configuration as TOML; 0 on success, 2 on a configuration error."""
    if argv == ["--markdown"]:
        print(reference_markdown(), end="")
        return 0
    only_check = argv[:1] == ["--check"]
    try:
        loaded = read_config(argv[1:] if only_check else argv)
        if only_check:  # the kind of device changes warnings alone, and those are the run's to print
            validate_config(loaded.config, int(os.environ.get("WORLD_SIZE", "1")), "cuda")
            return 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(to_toml(loaded.config), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
