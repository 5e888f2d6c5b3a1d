"""Checks of single values that a caller hands over, with messages that name them."""

from __future__ import annotations

import math
import numbers


def check_integer(name: str, value: object, low: int, end: int | None = None) -> None:
    """Raises TypeError for no integer, ValueError for one that is not in [low, end)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, not {shown(value)}")
    if int(value) < low or (end is not None and int(value) >= end):
        most = "" if end is None else f" and less than {end}"
        raise ValueError(f"{name} = {value}: must be {low} or more{most}")


def check_number(name: str, value: object) -> None:
    """Raises TypeError for no number, ValueError for one that is negative or not finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {shown(value)}")
    if not (math.isfinite(value) and float(value) >= 0):
        raise ValueError(f"{name} = {value}: must be 0 or more, and finite")


def check_switch(name: str, value: object) -> None:
    """Raises TypeError for what is neither True nor False: the word "false" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")


def check_choice(name: str, value: object, valid: tuple[str, ...]) -> None:
    """Raises ValueError for what is not one of the valid words."""
    if value not in valid:
        raise ValueError(f"{name} = {value!r}: must be one of {', '.join(valid)}")


def shown(value: object) -> str:
    """A value in a message: its type, and itself where that is short."""
    name = type(value).__qualname__
    if isinstance(value, (str, int, float)):
        return f"{name} {value!r}"
    return "None" if value is None else name
