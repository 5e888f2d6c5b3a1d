"""Write a merged configuration: as TOML that loads back to the same, and as flat names for dashboards."""

from __future__ import annotations

import dataclasses
from typing import Any

from titanforge.config import schema
from titanforge.config.sections import JobConfig


def to_toml(config: JobConfig) -> str:
    """The whole configuration as TOML text; ``load_config`` reads it back to an equal configuration.

    TOML has no null: a key that is None is left out when None is its default, else written as "none".
    """
    lines: list[str] = []
    for section in schema.all_sections():
        lines += ["", f"[{section}]"]
        tables: list[str] = []
        for key in schema.all_keys().values():
            if key.section != section:
                continue
            value = schema.get_value(config, key.path)
            item = schema.list_item(schema.without_none(key.annotation)[0])
            if item is not None and dataclasses.is_dataclass(item):
                for member in value:
                    tables += ["", f"[[{key.path}]]"]
                    tables += [
                        f"{name} = {schema.show(entry)}"
                        for name, entry in vars(member).items()
                        if entry is not None
                    ]
            elif value is not None:
                lines.append(f"{key.leaf} = {schema.show(value)}")
            elif key.default is not None:
                lines.append(f'{key.leaf} = "none"')
        lines += tables
    return "\n".join(lines[1:]) + "\n"


def to_flat_dict(config: JobConfig) -> dict[str, Any]:
    """Dotted name → value, with tables of lists as plain dicts (for W&B, JSON and the like)."""
    flat: dict[str, Any] = {}
    for path in schema.all_keys():
        value = schema.get_value(config, path)
        if isinstance(value, list):
            value = [dict(vars(item)) if dataclasses.is_dataclass(item) else item for item in value]
        flat[path] = value
    return flat
