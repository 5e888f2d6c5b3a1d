"""Parameter groups from a rule alone, for use without a configuration."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Mapping

from torch import nn

from titanforge.optim.owners import note_owners
from titanforge.optim.param_groups import (
    ParamGroupSpec,
    RuleOptions,
    build_param_groups,
    matrix_parts,
    named_trainable_parameters,
)
from titanforge.optim.registry import build_rule
from titanforge.optim.rule import UpdateRule

DEFAULT_OPTIONS: Mapping[str, float] = {
    "lr": 8e-4,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "momentum": 0.9,
}
"""Those of `[optimizer]`, whose defaults are the same."""
SCALAR_WEIGHT_DECAY = 0.0
"""That of `[optimizer.scalar]`."""

_BELOW_ONE = ("beta1", "beta2", "momentum")


def groups_of_rule(
    model: nn.Module, rule: UpdateRule, options: Mapping[str, float] | None = None
) -> list[ParamGroupSpec]:
    """All trainable weights of a model by one rule, as the trainer would group them.

    A rule of matrices takes the 2-D and stacked weights of the blocks; embeddings, head, norms and biases go
    to AdamW, at the same learning rate and without weight decay, as under `[optimizer.scalar]`.

    rule: a rule, e.g. `build_rule("AdamW")`.
    options: of this rule: lr (peak), weight_decay, and those in its `option_names`; what is not stated is
        that of `DEFAULT_OPTIONS`. A rule carries none of these numbers (`build_rule`'s momentum decides its
        form alone). Norms, biases and embeddings get no weight decay.
    Raises TypeError where `rule` is no rule or a value no number, ValueError for an option that the rule has
    not, for a value out of range, and for a model with nothing to train.
    """
    if not isinstance(rule, UpdateRule):
        raise TypeError(f"an update rule is wanted, {not_a_rule(rule)}")
    values = {**DEFAULT_OPTIONS, **_checked(rule, {} if options is None else options)}
    scalar = None
    if rule.matrix_only:
        beside = {**DEFAULT_OPTIONS, "lr": values["lr"], "weight_decay": SCALAR_WEIGHT_DECAY}
        scalar = RuleOptions(build_rule("AdamW", key="optimizer.scalar.name"), beside)
    named, roles = named_trainable_parameters(model)
    main = RuleOptions(rule, values)
    groups = build_param_groups(named, main, scalar=scalar, roles=roles, parts=matrix_parts(model))
    return note_owners(model, groups)


def not_a_rule(given: object) -> str:
    """What was given in place of a rule, and what is to be given."""
    if isinstance(given, str):
        return f"not its name: pass titanforge.optim.build_rule({given!r})"
    if isinstance(given, type):
        example = (
            f"{given.__name__}()" if issubclass(given, UpdateRule) else 'titanforge.optim.build_rule("AdamW")'
        )
        return f"not the class {given.__name__}: pass {example}"
    return f'not {_kind(given)}: pass titanforge.optim.build_rule("AdamW")'


def _kind(given: object) -> str:
    name = type(given).__qualname__
    return "None" if given is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _checked(rule: UpdateRule, options: Mapping[str, float]) -> dict[str, float]:
    valid = ("lr", "weight_decay", *rule.option_names)
    if not isinstance(options, Mapping):
        raise TypeError(f'options must be a mapping such as {{"lr": 3e-4}}, not {_kind(options)}')
    for name, value in options.items():
        if name not in valid:
            near = difflib.get_close_matches(str(name), valid, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"options[{name!r}]: {rule.name} has none; {hint}it has {', '.join(valid)}")
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"options[{name!r}] must be a number, not {_kind(value)}: {value!r}")
        upper = 1.0 if name in _BELOW_ONE else float("inf")
        if not 0 <= value < upper:
            below = "below 1" if upper == 1 else "finite"
            raise ValueError(f"options[{name!r}] must be at least 0 and {below}, not {value}")
    return {name: float(value) for name, value in options.items()}
