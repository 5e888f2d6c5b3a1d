"""Rules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from titanforge.optim.dion import Dion
from titanforge.optim.dobb.rule import Dobb
from titanforge.optim.elementwise import SGD, Adagrad, Adam, Adamax, AdamW, Lion, NAdam, RAdam, RMSprop
from titanforge.optim.matrix import LAMB, RMNP, Muon, Scion
from titanforge.optim.matrix_options import MatrixOptions
from titanforge.optim.rule import UpdateRule
from titanforge.optim.statistic import LARS, SM3, Adafactor, AdaLomo, AdamMini

RULES: dict[str, Callable[[float, bool, MatrixOptions], UpdateRule]] = {
    "sgd": lambda momentum, nesterov, matrix: SGD(use_momentum=momentum > 0, nesterov=nesterov),
    "adagrad": lambda momentum, nesterov, matrix: Adagrad(),
    "rmsprop": lambda momentum, nesterov, matrix: RMSprop(),
    "adam": lambda momentum, nesterov, matrix: Adam(),
    "adamw": lambda momentum, nesterov, matrix: AdamW(),
    "adamax": lambda momentum, nesterov, matrix: Adamax(),
    "nadam": lambda momentum, nesterov, matrix: NAdam(),
    "radam": lambda momentum, nesterov, matrix: RAdam(),
    "lion": lambda momentum, nesterov, matrix: Lion(),
    "lamb": lambda momentum, nesterov, matrix: LAMB(),
    "muon": lambda momentum, nesterov, matrix: Muon(matrix, nesterov),
    "scion": lambda momentum, nesterov, matrix: Scion(matrix),
    "rmnp": lambda momentum, nesterov, matrix: RMNP(matrix, nesterov),
    "dion": lambda momentum, nesterov, matrix: Dion(matrix, nesterov),
    "dobb": lambda momentum, nesterov, matrix: Dobb(matrix, nesterov),
    "adam_mini": lambda momentum, nesterov, matrix: AdamMini(),
    "adafactor": lambda momentum, nesterov, matrix: Adafactor(),
    "adalomo": lambda momentum, nesterov, matrix: AdaLomo(),
    "sm3": lambda momentum, nesterov, matrix: SM3(),
    "lars": lambda momentum, nesterov, matrix: LARS(),
}
"""Builders `(momentum, nesterov, matrix options) -> rule` by name: what changes a rule's form, not only a
number in it."""

NESTEROV_RULES = ("sgd", "muon", "rmnp", "dobb")


def build_rule(
    name: str,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    matrix: MatrixOptions | None = None,
    key: str = "optimizer.name",
) -> UpdateRule:
    """The rule called `name`, in any case, `-` as `_`.

    matrix: options of the rules of matrices; default: the defaults.
    key: configuration key that the name came from, for messages, also the rule's own.
    Raises ValueError for an unknown name, and for Nesterov where the rule has none.
    """
    known = name.lower().replace("-", "_")
    if known not in RULES:
        near = difflib.get_close_matches(known, RULES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{key} = {name!r} is no update rule; {hint}valid: {', '.join(sorted(RULES))}")
    if nesterov and known not in NESTEROV_RULES:
        raise ValueError(f"optimizer.nesterov = true has no effect on {key} = {name!r}; set it to false")
    rule = RULES[known](momentum, nesterov, matrix or MatrixOptions())
    rule.key = key
    return rule
