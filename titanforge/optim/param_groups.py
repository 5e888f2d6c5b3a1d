"""Which rule and which options each weight gets: every trainable parameter is owned exactly once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import nn

from titanforge.optim.rule import UpdateRule

Role = Literal["matrix", "embedding", "head", "norm", "bias"]

UNDECAYED_ROLES: tuple[Role, ...] = ("embedding", "norm", "bias")
"""Roles without weight decay unless a group says so."""

# Components that wrapping adds to a parameter's name; a rule or a checkpoint must not depend on them.
_WRAPPER_COMPONENTS = ("_orig_mod", "_checkpoint_wrapped_module")
_EMBEDDING = re.compile(r"embed|(^|\.)(wte|wpe)\.")
_HEAD = re.compile(r"(^|\.)(output|lm_head)\.weight$")
_NORM = re.compile(r"norm|(^|\.)ln(_|\d|\.)")


class PatternGroup(Protocol):
    """One `[[optimizer.param_groups]]` table."""

    pattern: str
    lr: float | None
    weight_decay: float | None
    beta1: float | None
    beta2: float | None
    eps: float | None


@dataclass
class RuleOptions:
    """A rule with the options that its weights get where no group says otherwise.

    options: lr (peak), weight_decay, beta1, beta2, eps, momentum.
    """

    rule: UpdateRule
    options: Mapping[str, float]


@dataclass
class ParamGroupSpec:
    """Weights that share a rule and its options. `options["lr"]` is the peak rate.

    parts: by name, the matrices of equal height that a weight is made of; 1 where it is not in here.
    owners: by name, the modules that have a weight, and under which attribute (see `note_owners`).
    model: whose weights they are; None: nobody looks whether it still has them.
    """

    name: str
    rule: UpdateRule
    options: dict[str, float]
    names: list[str] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)
    owners: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict, repr=False)
    model: nn.Module | None = field(default=None, repr=False)

    @property
    def num_parameters(self) -> int:
        """Weights in the group, over all shards."""
        return sum(param.numel() for param in self.params)


def clean_name(name: str) -> str:
    """A parameter's name without the components that compilation or checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_COMPONENTS)


def role_of(name: str, num_dims: int) -> Role:
    """What a weight is, from its name and its number of dims."""
    if name.rsplit(".", 1)[-1] == "bias":
        return "bias"
    if _NORM.search(name) or num_dims < 2:
        return "norm"
    if _EMBEDDING.search(name):
        return "embedding"
    if _HEAD.search(name):
        return "head"
    return "matrix"


def named_trainable_parameters(
    model: nn.Module,
) -> tuple[list[tuple[str, nn.Parameter]], dict[str, Role]]:
    """Trainable parameters by clean name (a tied one once, by its first name), and their roles.

    A module's type decides where it is telling: `nn.Embedding` weights are embeddings whatever their name.
    """
    by_type = {
        clean_name(f"{module_name}.weight" if module_name else "weight")
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    named, roles = [], {}
    for raw_name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        name = clean_name(raw_name)
        if name in roles:
            raise ValueError(f"two parameters are called {name!r} once wrapper names are removed")
        named.append((name, param))
        roles[name] = "embedding" if name in by_type else role_of(name, param.dim())
    return named, roles


def matrix_parts(model: nn.Module, per_head: bool = False) -> dict[str, int]:
    """Weights that are several matrices of equal height, one below the other, by clean name.

    A fused query, key and value projection (`wqkv`) is three matrices. per_head: each head of a query, key or
    value projection is one; the module that owns them states `head_dim`.
    """
    found: dict[str, int] = {}
    for owner_name, owner in model.named_modules():
        head_dim = getattr(owner, "head_dim", None)
        for attribute, fused in (("wqkv", 3), ("wq", 1), ("wk", 1), ("wv", 1)):
            weight = getattr(getattr(owner, attribute, None), "weight", None)
            if weight is None or weight.dim() != 2:
                continue
            count = weight.shape[0] // head_dim if per_head and head_dim else fused
            if count > 1:
                found[clean_name(f"{owner_name}.{attribute}.weight".lstrip("."))] = count
    return found


def build_param_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    main: RuleOptions,
    groups: Sequence[PatternGroup] = (),
    *,
    scalar: RuleOptions | None = None,
    roles: Mapping[str, Role] | None = None,
    parts: Mapping[str, int] | None = None,
    partial: bool = False,
) -> list[ParamGroupSpec]:
    """Deal the parameters to groups of one rule and one set of options.

    named_parameters: (full name, parameter) pairs; frozen parameters are left out.
    main: the rule of `optimizer.name`. If it takes matrices alone, `scalar` owns all other roles.
    groups: patterns searched in the full name; the first that matches wins, and overrides the options it
        states. A stated weight decay holds for norms, biases and embeddings too.
    roles: role by name; default from the name alone. parts: by name, of weights made of several matrices
        (`matrix_parts`); for rules of matrices. partial: a pattern may own nothing.
    Raises ValueError for a pattern that is no regular expression, that owns nothing, or that states an option
    which the rule of one of its weights does not have; for a parameter given twice; and for no parameters.
    """
    if main.rule.matrix_only and scalar is None:
        raise ValueError(
            f"optimizer.name = {main.rule.name!r} takes matrices alone: it needs optimizer.scalar"
        )
    patterns = [_compile(group.pattern, index) for index, group in enumerate(groups)]
    matched, owned = [0] * len(groups), [0] * len(groups)
    specs: dict[tuple, ParamGroupSpec] = {}
    seen_names: set[str] = set()
    seen_params: set[int] = set()
    for name, param in named_parameters:
        if not param.requires_grad:
            continue
        if name in seen_names or id(param) in seen_params:
            raise ValueError(f"parameter {name!r} was given twice: each must be owned exactly once")
        seen_names.add(name)
        seen_params.add(id(param))
        role = roles[name] if roles is not None else role_of(name, param.dim())
        source = scalar if main.rule.matrix_only and role != "matrix" else main
        assert source is not None
        hits = [index for index, pattern in enumerate(patterns) if pattern.search(name)]
        for index in hits:
            matched[index] += 1
        options = _default_options(source, role)
        label = f"{source.rule.name}/{'decay' if options['weight_decay'] else 'no_decay'}"
        if hits:
            owned[hits[0]] += 1
            options.update(_overrides(groups[hits[0]], hits[0], source.rule, name))
            label = f"{source.rule.name}/{groups[hits[0]].pattern}"
        key = (source.rule.name, tuple(options.items()), label)
        spec = specs.setdefault(key, ParamGroupSpec(label, source.rule, options))
        spec.names.append(name)
        spec.params.append(param)
        if parts and source.rule.matrix_only and name in parts:
            spec.parts[name] = parts[name]
    if not specs:
        raise ValueError("the model has no trainable parameter")
    for index, group in enumerate(groups):
        if not owned[index] and not partial:
            why = (
                f"matches {matched[index]} parameter(s), but earlier groups own them all: move it up"
                if matched[index]
                else f"matches no trainable parameter; names look like {sorted(seen_names)[:3]}"
            )
            raise ValueError(f"optimizer.param_groups[{index}].pattern = {group.pattern!r} {why}")
    return list(specs.values())


def _compile(pattern: str, index: int) -> re.Pattern[str]:
    key = f"optimizer.param_groups[{index}].pattern"
    if not pattern:
        raise ValueError(f"{key} is empty: state a regular expression for parameter names")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{key} = {pattern!r} is no regular expression: {error}") from error


def _default_options(source: RuleOptions, role: Role) -> dict[str, float]:
    used = ("lr", "weight_decay", *source.rule.option_names)
    options = {name: float(source.options[name]) for name in used}
    if role in UNDECAYED_ROLES:
        options["weight_decay"] = 0.0
    return options


def _overrides(group: PatternGroup, index: int, rule: UpdateRule, name: str) -> dict[str, float]:
    stated = {
        option: float(value)
        for option in ("lr", "weight_decay", "beta1", "beta2", "eps")
        if (value := getattr(group, option)) is not None
    }
    for option in stated:
        if option not in ("lr", "weight_decay", *rule.option_names):
            raise ValueError(
                f"optimizer.param_groups[{index}].{option} has no effect: {name!r} is updated by "
                f"{rule.name}, which has no {option}"
            )
    return stated
