"""Rules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from titanforge.optim.elementwise import SGD, Adagrad, Adam, Adamax, AdamW, Lion, NAdam, RAdam, RMSprop
from titanforge.optim.matrix import LAMB, Muon, Scion
from titanforge.optim.rule import UpdateRule
from titanforge.optim.statistic import LARS, SM3, Adafactor, AdaLomo, AdamMini

RULES: dict[str, Callable[[float, bool], UpdateRule]] = {
    "sgd": lambda momentum, nesterov: SGD(use_momentum=momentum > 0, nesterov=nesterov),
    "adagrad": lambda momentum, nesterov: Adagrad(),
    "rmsprop": lambda momentum, nesterov: RMSprop(),
    "adam": lambda momentum, nesterov: Adam(),
    "adamw": lambda momentum, nesterov: AdamW(),
    "adamax": lambda momentum, nesterov: Adamax(),
    "nadam": lambda momentum, nesterov: NAdam(),
    "radam": lambda momentum, nesterov: RAdam(),
    "lion": lambda momentum, nesterov: Lion(),
    "lamb": lambda momentum, nesterov: LAMB(),
    "muon": lambda momentum, nesterov: Muon(nesterov=nesterov),
    "scion": lambda momentum, nesterov: Scion(),
    "adam_mini": lambda momentum, nesterov: AdamMini(),
    "adafactor": lambda momentum, nesterov: Adafactor(),
    "adalomo": lambda momentum, nesterov: AdaLomo(),
    "sm3": lambda momentum, nesterov: SM3(),
    "lars": lambda momentum, nesterov: LARS(),
}
"""Builders `(momentum, nesterov) -> rule` by name: what changes a rule's form, not only a number in it."""

NESTEROV_RULES = ("sgd", "muon")


def build_rule(
    name: str, *, momentum: float = 0.9, nesterov: bool = False, key: str = "optimizer.name"
) -> UpdateRule:
    """The rule called `name`, in any case, `-` as `_`.

    key: configuration key that the name came from, for messages.
    Raises ValueError for an unknown name, and for Nesterov where the rule has none.
    """
    known = name.lower().replace("-", "_")
    if known not in RULES:
        near = difflib.get_close_matches(known, RULES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{key} = {name!r} is no update rule; {hint}valid: {', '.join(sorted(RULES))}")
    if nesterov and known not in NESTEROV_RULES:
        raise ValueError(f"optimizer.nesterov = true has no effect on {key} = {name!r}; set it to false")
    return RULES[known](momentum, nesterov)
