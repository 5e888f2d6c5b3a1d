"""What each update rule reads of ``[optimizer]``, as far as checks before the start need to know.

The rules live in titanforge/optim, which this package may not import; a test holds the two together.
"""

from __future__ import annotations

_ADAM = frozenset({"beta1", "beta2", "eps"})

RULE_KEYS: dict[str, frozenset[str]] = {
    "adafactor": frozenset(),
    "adagrad": frozenset({"eps"}),
    "adalomo": frozenset({"eps"}),
    "adam": _ADAM,
    "adam_mini": _ADAM,
    "adamax": _ADAM,
    "adamw": _ADAM,
    "dion": frozenset({"momentum"}),
    "dobb": frozenset({"momentum", "nesterov"}),
    "lamb": _ADAM,
    "lars": frozenset({"momentum"}),
    "lion": frozenset({"beta1", "beta2"}),
    "muon": frozenset({"momentum", "nesterov"}),
    "nadam": _ADAM,
    "radam": _ADAM,
    "rmnp": frozenset({"momentum", "nesterov"}),
    "rmsprop": frozenset({"beta2", "eps"}),
    "scion": frozenset({"momentum"}),
    "sgd": frozenset({"momentum", "nesterov"}),
    "sm3": frozenset({"eps"}),
}
"""Rule → the keys it reads beside lr and weight_decay, which all read."""

MATRIX_RULES = frozenset({"dion", "dobb", "muon", "rmnp", "scion"})
"""Rules that take matrices alone and leave the other weights to ``[optimizer.scalar]``."""

FOLDING_RULES = frozenset({*MATRIX_RULES, "sgd"})
"""Rules that fold a gradient into their momentum before replicas talk, unless with Nesterov; others take
whole steps."""


def rule_name(name: str) -> str:
    """The name of a rule as the tables here write it: any case, ``-`` as ``_``."""
    return name.lower().replace("-", "_")
