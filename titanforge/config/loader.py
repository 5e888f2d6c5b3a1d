"""Read the configuration: command line over TOML file over defaults.

Every mistake is one line that says where it stands (file and line, or the
command line), what stands there, and what would be right.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from titanforge.config import reference, schema
from titanforge.config.schema import ConfigError, show
from titanforge.config.sections import JobConfig
from titanforge.config.theirs import FOREIGN_KEYS, is_foreign_section
from titanforge.config.toml_lines import key_lines, line_of

try:
    import tomli
except ImportError:  # Python's own copy of the same parser
    import tomllib as tomli

logger = logging.getLogger(__name__)

COMMAND_LINE = "command line"
CONFIG_FILE_KEY = "job.config_file"

Where = Callable[[str], str]
"""Maps a dotted path to the place where it was written, e.g. ``a.toml:12``."""


@dataclass
class LoadedConfig:
    """A merged configuration and what its author should know about it."""

    config: JobConfig
    warnings: list[str] = field(default_factory=list)


def load_config(argv: list[str], *, default_file: str | None = None) -> JobConfig:
    """Merge defaults, the TOML file of ``--job.config_file`` and the command line, in rising precedence.

    Args:
        argv: arguments without the program's name, e.g. ``["--training.steps", "20"]``.
        default_file: TOML file to read when ``argv`` names none.

    Raises:
        ConfigError: unknown key, wrong type or word, unreadable file; one line each.
        SystemExit: after printing the help, when ``argv`` holds ``--help`` or ``-h``.
    """
    loaded = read_config(argv, default_file=default_file)
    if os.environ.get("RANK", "0") == "0":
        for warning in loaded.warnings:
            logger.warning(warning)
    return loaded.config


def read_config(argv: list[str], *, default_file: str | None = None) -> LoadedConfig:
    """Like ``load_config``, but hands the warnings over instead of logging them."""
    if "--help" in argv or "-h" in argv:
        print(reference.format_help())
        raise SystemExit(0)
    overrides = _split_arguments(argv)
    loaded = LoadedConfig(JobConfig())
    config_file = overrides.get(CONFIG_FILE_KEY, [default_file])[-1]
    if config_file is not None and config_file.lower() != "none":
        _apply_file(config_file, loaded)
        loaded.config.job.config_file = config_file
    for path, words in overrides.items():
        if path != CONFIG_FILE_KEY:
            _apply_override(path, words, loaded)
    return loaded


# --- the file ---------------------------------------------------------------------------------------------


def _apply_file(file: str, loaded: LoadedConfig) -> None:
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"{CONFIG_FILE_KEY} = {show(file)}: no such file (looked in {Path.cwd()})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{CONFIG_FILE_KEY} = {show(file)}: cannot be read: {error}") from None
    try:
        table = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        position = re.search(r"at line (\d+), column \d+", str(error))
        line = f":{position.group(1)}" if position else ""
        raise ConfigError(f"{file}{line}: not valid TOML: {error}") from None
    lines = key_lines(text)

    def where(path: str) -> str:
        line = line_of(lines, path)
        return f"{file}:{line}" if line else file

    _fill(loaded.config, table, "", where, loaded.warnings)


def _fill(instance: Any, table: dict[str, Any], prefix: str, where: Where, warnings: list[str]) -> None:
    """Write a TOML table into a section instance, descending into its sections."""
    hints = schema.type_hints(type(instance))
    for name, value in table.items():
        path = prefix + name
        if name not in hints:
            _refuse_or_ignore(path, value, where, warnings)
        elif dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise ConfigError(f"{where(path)}: {path} = {show(value)}: expected a section, [{path}]")
            _fill(getattr(instance, name), value, f"{path}.", where, warnings)
        else:
            setattr(instance, name, _convert(value, hints[name], path, where))


def _refuse_or_ignore(path: str, value: Any, where: Where, warnings: list[str]) -> None:
    """An unknown key raises; one of torchtitan's keys that we lack raises only when it is switched on."""
    foreign = FOREIGN_KEYS.get(path)
    if foreign is not None:
        written = f"{where(path)}: {path} = {show(value)}"
        if foreign.off is not None and value not in foreign.off:
            raise ConfigError(f"{written}: titanforge has no such key: {foreign.instead}")
        warnings.append(f"{written} has no effect: {foreign.instead}")
        return
    if isinstance(value, dict) and (value or is_foreign_section(path)):
        for name, item in value.items():
            _refuse_or_ignore(f"{path}.{name}", item, where, warnings)
        return
    raise ConfigError(_unknown(path, f" = {show(value)}", where))


def _unknown(path: str, written_value: str, where: Where) -> str:
    suggestion = schema.nearest_key(path)
    hint = f"did you mean {suggestion}?" if suggestion else "--help lists every key"
    return f"{where(path)}: unknown key {path}{written_value}: {hint}"


# --- the command line -------------------------------------------------------------------------------------


def _split_arguments(argv: list[str]) -> dict[str, list[str]]:
    """Group arguments into key → words; of a repeated key the last one counts."""
    overrides: dict[str, list[str]] = {}
    words: list[str] | None = None
    for argument in argv:
        if argument.startswith("--"):
            name, has_value, value = argument[2:].partition("=")
            path = name.replace("-", "_")
            overrides.pop(path, None)
            words = overrides[path] = [value] if has_value else []
            if has_value:
                words = None
        elif words is None:
            raise ConfigError(
                f"{COMMAND_LINE}: {show(argument)} belongs to no key: write --section.key value"
                " (a job file goes to --job.config_file)"
            )
        else:
            words.append(argument)
    if overrides.get(CONFIG_FILE_KEY) == []:
        raise ConfigError(f"{COMMAND_LINE}: --{CONFIG_FILE_KEY} needs a value: the path of a TOML file")
    return overrides


def _apply_override(path: str, words: list[str], loaded: LoadedConfig) -> None:
    key = schema.all_keys().get(path)
    if key is None:
        if path in FOREIGN_KEYS:
            value = (
                [_toml_value(word) for word in words] if len(words) > 1 else _toml_value(*words or ["true"])
            )
            _refuse_or_ignore(path, value, lambda _: COMMAND_LINE, loaded.warnings)
            return
        if path in schema.all_sections():
            raise ConfigError(f"{COMMAND_LINE}: --{path} is a section: write --{path}.key value")
        raise ConfigError(
            _unknown(path, f" = {show(' '.join(words))}" if words else "", lambda _: COMMAND_LINE)
        )
    inner, _ = schema.without_none(key.annotation)
    item = schema.list_item(inner)
    value: Any
    if not words and inner is bool:
        value = True
    elif not words:
        expected = schema.describe_type(key.annotation)
        raise ConfigError(f"{COMMAND_LINE}: --{path} needs a value: expected {expected}")
    elif item is not None:
        value = _parse_list(path, words, item)
    elif len(words) > 1:
        raise ConfigError(
            f"{COMMAND_LINE}: --{path} takes one value, not {len(words)} ({show(' '.join(words))}): quote it"
        )
    else:
        value = _parse_word(words[0], inner)
    schema.set_value(loaded.config, path, _convert(value, key.annotation, path, lambda _: COMMAND_LINE))


def _parse_list(path: str, words: list[str], item: Any) -> Any:
    """A list from ``a,b``, ``a b``, or a TOML array such as ``[{pattern = "norm", lr = 1e-3}]``."""
    if len(words) == 1 and (words[0].lstrip().startswith("[") or dataclasses.is_dataclass(item)):
        try:
            return tomli.loads(f"value = {words[0]}")["value"]
        except tomli.TOMLDecodeError:
            raise ConfigError(f"{COMMAND_LINE}: {path} = {show(words[0])}: not a valid TOML array") from None
    if len(words) == 1:
        if words[0].lower() == "none":
            return None
        words = [word.strip() for word in words[0].split(",")] if words[0].strip() else []
    return [_parse_word(word, item) for word in words]


def _parse_word(word: str, annotation: Any) -> Any:
    """The value that a word spells, where it can; else the word, for ``_convert`` to refuse."""
    if annotation is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    if annotation in (int, float):
        try:
            return annotation(word)
        except ValueError:
            return word
    return word


def _toml_value(word: str) -> Any:
    """What a word means in TOML; a bare word is a string."""
    try:
        return tomli.loads(f"value = {word}")["value"]
    except tomli.TOMLDecodeError:
        return word


# --- types ------------------------------------------------------------------------------------------------


def _convert(value: Any, annotation: Any, path: str, where: Where) -> Any:
    """Check a value against a key's type and return it as that type.

    ``none`` (any case) means None where the type allows None. A float takes an
    integer; an int takes neither a bool nor a float.
    """
    inner, optional = schema.without_none(annotation)
    if optional and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    item = schema.list_item(inner)
    if item is not None and isinstance(value, list):
        return [_convert_item(member, item, f"{path}[{i}]", where) for i, member in enumerate(value)]
    if typing.get_origin(inner) is Literal:
        choices = typing.get_args(inner)
        if value in choices:
            return value
        word = schema.nearest(str(value), [str(choice) for choice in choices])
        hint = f"; did you mean {show(word)}?" if word else ""
        raise ConfigError(
            f"{where(path)}: {path} = {show(value)}: expected {schema.describe_type(annotation)}{hint}"
        )
    if inner is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
        raise ConfigError(f"{where(path)}: {path} = {value}: expected a finite number")
    if type(value) is inner:
        return value
    raise ConfigError(f"{where(path)}: {path} = {show(value)}: expected {schema.describe_type(annotation)}")


def _convert_item(member: Any, item: Any, path: str, where: Where) -> Any:
    if not dataclasses.is_dataclass(item):
        return _convert(member, item, path, where)
    if not isinstance(member, dict):
        raise ConfigError(f"{where(path)}: {path} = {show(member)}: expected a table")
    hints = schema.type_hints(typing.cast(type, item))
    for name in member:
        if name not in hints:
            word = schema.nearest(name, hints, cutoff=0.0)
            written = f"{path}.{name} = {show(member[name])}"
            raise ConfigError(f"{where(f'{path}.{name}')}: unknown key {written}: did you mean {word}?")
    values = {name: _convert(value, hints[name], f"{path}.{name}", where) for name, value in member.items()}
    return typing.cast(type, item)(**values)
