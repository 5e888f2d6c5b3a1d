"""Configuration: one dataclass per TOML section, a loader, checks across sections, and a reference.

Imports nothing else of titanforge and no torch, so that a wrong job file is
reported at once.
"""

from __future__ import annotations

from titanforge.config.loader import LoadedConfig, load_config, read_config
from titanforge.config.reference import format_help, reference_markdown
from titanforge.config.schema import ConfigError
from titanforge.config.sections import JobConfig
from titanforge.config.validation import validate_config
from titanforge.config.writer import to_flat_dict, to_toml

__all__ = [
    "ConfigError",
    "JobConfig",
    "LoadedConfig",
    "format_help",
    "load_config",
    "read_config",
    "reference_markdown",
    "to_flat_dict",
    "to_toml",
    "validate_config",
]
