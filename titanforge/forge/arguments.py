"""What `attach` is given, checked before anything in the model changes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from titanforge.forge.ranks import DATA_AXES, Ranks
from titanforge.forge.values import check_choice, check_integer, check_number, check_switch, shown
from titanforge.optim.param_groups import ParamGroupSpec, named_trainable_parameters
from titanforge.optim.rule_groups import not_a_rule
from titanforge.optim.states import Recipe

ACCUMULATIONS = ("auto", "stash", "buffer")


@dataclass(frozen=True)
class Steps:
    """How training runs, as far as fused updates depend on it.

    micro_batches: per step. tokens: per micro-batch. accumulation: `forge.accumulation`. max_norm: of lagged
    clipping; 0: none. undo: a refused step must leave the states of affine rules as they were even after some
    of its micro-batches (`training.nonfinite_loss = "skip"`). keep_logits: `forge.keep_logits`.
    merge_projections: `forge.merge_projections`.
    Raises TypeError and ValueError, naming the field and the key that it has in a run.
    """

    micro_batches: int = 1
    tokens: int = 0
    accumulation: str = "auto"
    max_norm: float = 0.0
    undo: bool = False
    keep_logits: bool = False
    merge_projections: bool = True

    def __post_init__(self) -> None:
        check_integer("Steps.micro_batches (by training.global_batch_size)", self.micro_batches, 1)
        check_integer("Steps.tokens (training.local_batch_size x training.seq_len)", self.tokens, 0)
        check_choice("Steps.accumulation (forge.accumulation)", self.accumulation, ACCUMULATIONS)
        check_number("Steps.max_norm (training.max_norm)", self.max_norm)
        check_switch('Steps.undo (training.nonfinite_loss = "skip")', self.undo)
        check_switch("Steps.keep_logits (forge.keep_logits)", self.keep_logits)
        check_switch("Steps.merge_projections (forge.merge_projections)", self.merge_projections)


def check_arguments(
    *,
    recipe: object,
    probe: object,
    steps: object,
    seed: object,
    ranks: object,
    planner: object,
    update_in_backward: object,
) -> None:
    """All arguments of `attach` but the model and its groups, each by itself.

    Raises TypeError and ValueError, naming the argument and what to pass.
    """
    for name, value, wanted, example in (
        ("recipe", recipe, Recipe, "titanforge.optim.Recipe(state_dtype='bfloat16')"),
        ("steps", steps, Steps, "titanforge.forge.Steps(micro_batches=4)"),
        ("ranks", ranks, Ranks, "titanforge.forge.Ranks({'dp_replicate': 2}, sum_over_data)"),
    ):
        if value is not None and not isinstance(value, wanted):
            raise TypeError(
                f"forge.attach: {name} must be a {wanted.__name__}, not {shown(value)}: pass {example}"
            )
    if not _takes_nothing(probe):
        raise TypeError(
            "forge.attach: probe must be a function without arguments that runs a forward pass, not "
            f"{shown(probe)}: pass lambda: loss_of(model, batch)"
        )
    check_integer("forge.attach: seed (debug.seed)", seed, 0, 2**63)
    if not callable(planner):
        raise TypeError(
            f"forge.attach: planner must be a function like titanforge.forge.plan, not {shown(planner)}"
        )
    check_switch("forge.attach: update_in_backward", update_in_backward)


def _takes_nothing(function: object) -> bool:
    """Whether it can be called without arguments, as far as it says."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin, which does not say
        pass
    return True


def check_groups(model: nn.Module, given: object) -> list[ParamGroupSpec]:
    """Groups in place of a rule. Raises TypeError for something else, ValueError where they do not own each
    trainable weight of this model once, with all the options of its rule.
    """
    groups = list(given) if isinstance(given, (list, tuple)) else []
    if not groups or not all(isinstance(group, ParamGroupSpec) for group in groups):
        raise TypeError(
            f"forge.attach takes an update rule, {not_a_rule(given)}; or the groups that "
            "titanforge.optim.build_groups(model, options) returns"
        )
    weights = dict(named_trainable_parameters(model)[0])
    owned: set[str] = set()
    for group in groups:
        if missing := sorted({"lr", "weight_decay", *group.rule.option_names} - group.options.keys()):
            raise ValueError(f"forge.attach: options of the group {group.name!r} lack {', '.join(missing)}")
        for name, param in zip(group.names, group.params, strict=True):
            if weights.get(name) is not param:
                raise ValueError(
                    f"forge.attach: the group {group.name!r} owns {name!r}, which is no trainable weight of "
                    "this model: build the groups from the model that is attached"
                )
            if name in owned:
                raise ValueError(f"forge.attach: {name!r} is owned twice: each weight belongs to one group")
            owned.add(name)
    if left := sorted(weights.keys() - owned):
        raise ValueError(
            f"forge.attach: no group owns {left[0]!r} ({len(left)} in all), and nothing would update it: "
            "freeze it with requires_grad_(False), or build the groups from this model"
        )
    return groups


def check_ranks(ranks: Ranks | None) -> Ranks:
    """How ranks share the model, as far as `attach` can tell. Raises ValueError for several that it was not
    told about, for what fusion lacks among them, and where they could not agree on a step.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    if ranks is None:
        if several:
            raise ValueError(
                f"{dist.get_world_size()} ranks, and forge.attach was not told how they share the model: "
                "pass ranks = Ranks(mesh = …), or Ranks() for a model of this rank alone"
            )
        return Ranks()
    check_axes(ranks)
    apart = [axis for axis in DATA_AXES if ranks.mesh.get(axis, 1) > 1]
    if several and apart and ranks.sum_over_data is None:
        raise ValueError(
            f"forge.attach: ranks along {' and '.join(apart)} see other data, and must agree on whether a "
            "step is applied: pass Ranks(mesh, sum_over_data), a function that sums a tensor over them"
        )
    return ranks


def check_axes(ranks: Ranks) -> None:
    """Raises ValueError for what fusion lacks among several ranks."""
    if (stages := ranks.mesh.get("pp", 1)) > 1:
        raise ValueError(
            f"forge.enable = true is not available with the {stages} ranks of the mesh axis pp: updates "
            "happen inside backward, and several micro-batches are in flight: set it to false, or "
            "parallelism.pipeline_parallel_degree = 1"
        )
    if ranks.reduce != "gradients" and ranks.mesh.get("dp_replicate", 1) > 1:
        raise ValueError(
            f'sync.reduce = "{ranks.reduce}" with forge.enable = true: fused replicas sum gradients, bucket '
            'by bucket; set it to "gradients", or forge.enable = false'
        )
