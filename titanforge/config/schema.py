"""The keys of ``sections`` as data: dotted path, type, default, documentation.

Everything that lists, checks or prints keys (loader, validation, reference)
asks here, so that ``sections`` stays the only place where a key is written.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from titanforge.config.sections import JobConfig


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one line that names the key and the way out."""


@dataclass(frozen=True)
class Key:
    """One configuration key, e.g. ``training.dataloader.num_workers``."""

    path: str
    annotation: Any
    default: Any
    doc: str

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]


@functools.cache
def field_docs(section_class: type) -> dict[str, str]:
    """Map each field of a section class to the string literal that stands below it."""
    (node,) = ast.parse(inspect.getsource(section_class)).body
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for statement, following in itertools.pairwise(node.body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


@functools.cache
def type_hints(section_class: type) -> dict[str, Any]:
    """Annotations of a section class as real types (its module postpones them)."""
    return typing.get_type_hints(section_class)


def list_item(annotation: Any) -> Any | None:
    """The item type of a list annotation, else None."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is list else None


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Split ``X | None`` into (X, True); anything else is (annotation, False)."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        assert len(members) == 1, f"sections: only 'X | None' unions are understood, not {annotation}"
        return members[0], True
    return annotation, False


def describe_type(annotation: Any) -> str:
    """How a type reads in help and errors, e.g. ``float or none``."""
    inner, optional = without_none(annotation)
    item = list_item(inner)
    if typing.get_origin(inner) is Literal:
        text = "one of " + ", ".join(show(choice) for choice in typing.get_args(inner))
    elif item is not None:
        text = "list of tables" if dataclasses.is_dataclass(item) else f"list of {describe_type(item)}"
    else:
        text = "string" if inner is str else str(inner.__name__)
    return f"{text} or none" if optional else text


def show(value: Any) -> str:
    """A value as TOML would write it; None reads ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also forbids a raw DEL character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        set_fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return show({name: item for name, item in set_fields.items() if item is not None})
    if isinstance(value, dict):
        if not value:
            return "{}"
        return "{ " + ", ".join(f"{name} = {show(item)}" for name, item in value.items()) + " }"
    return repr(value)


def walk_keys(section_class: type = JobConfig, prefix: str = "") -> Iterator[Key]:
    """Every leaf key of a section class, in the order of ``sections``."""
    defaults = section_class()
    docs = field_docs(section_class)
    for field in dataclasses.fields(section_class):
        annotation = type_hints(section_class)[field.name]
        if dataclasses.is_dataclass(annotation):
            yield from walk_keys(typing.cast(type, annotation), f"{prefix}{field.name}.")
        else:
            default = getattr(defaults, field.name)
            yield Key(f"{prefix}{field.name}", annotation, default, docs.get(field.name, ""))


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every leaf key of the configuration by dotted path."""
    return {key.path: key for key in walk_keys()}


@functools.cache
def all_sections() -> tuple[str, ...]:
    """Dotted names of the sections, nested ones too, in order of appearance."""
    return tuple(dict.fromkeys(key.section for key in all_keys().values()))


def get_value(config: JobConfig, path: str) -> Any:
    """Read a dotted path."""
    return functools.reduce(getattr, path.split("."), config)


def set_value(config: JobConfig, path: str, value: Any) -> None:
    """Write a dotted path."""
    section, _, leaf = path.rpartition(".")
    setattr(functools.reduce(getattr, section.split("."), config), leaf, value)


def refusal(config: JobConfig, path: str, why: str) -> ConfigError:
    """The error for a key whose value cannot run: key, value, reason and way out on one line."""
    return ConfigError(f"{path} = {show(get_value(config, path))}: {why}")


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like ``word``, or None when none is like it."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def nearest_key(path: str) -> str | None:
    """The valid dotted name most like ``path``, whatever its section.

    The last word counts three times the section: a key put into the wrong
    section (``training.lr``) is a more common slip than a wrong word. Nested
    sections come after outer ones, so that it is answered with ``optimizer.lr``.
    """
    section, _, leaf = path.rpartition(".")

    def likeness(key: Key) -> float:
        leaf_ratio = difflib.SequenceMatcher(None, leaf, key.leaf).ratio()
        section_ratio = difflib.SequenceMatcher(None, section, key.section).ratio()
        if section_ratio < 0.6:  # another word, not a misspelt one: chance letters in common say nothing
            section_ratio = 0.0
        return 0.75 * leaf_ratio + 0.25 * section_ratio - 0.05 * max(0, key.path.count(".") - path.count("."))

    best = max(all_keys().values(), key=likeness)
    return best.path if likeness(best) >= 0.5 else None
