"""From the `[optimizer]` and `[forge]` sections to a fused optimizer, or to its plan alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from titanforge.forge.coverage import Covered, cover
from titanforge.forge.engine import ForgeOptimizer
from titanforge.forge.hooked import Ranks
from titanforge.forge.modules import is_fused, restore_module
from titanforge.forge.plan import ParamPlan, Placement, Schedule, plan
from titanforge.forge.probe import probe_readers
from titanforge.forge.report import PlanLine
from titanforge.optim.build import OptimizerOptions, build_groups, build_recipe
from titanforge.optim.dobb.hooks import install_hooks
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.rule import UpdateRule
from titanforge.optim.rule_groups import groups_of_rule, not_a_rule
from titanforge.optim.states import Recipe

ACCUMULATIONS = ("auto", "stash", "buffer")

Planner = Callable[[UpdateRule, Placement, Mapping[str, int], Schedule], ParamPlan]


@dataclass(frozen=True)
class Steps:
    """How training runs, as far as fused updates depend on it.

    micro_batches: per step. tokens: per micro-batch. accumulation: `forge.accumulation`. max_norm: of lagged
    clipping; 0: none. undo: a refused step must leave the states of affine rules as they were even after some
    of its micro-batches (`training.nonfinite_loss = "skip"`). keep_logits: `forge.keep_logits`.
    """

    micro_batches: int = 1
    tokens: int = 0
    accumulation: str = "auto"
    max_norm: float = 0.0
    undo: bool = False
    keep_logits: bool = False

    def __post_init__(self) -> None:
        if self.micro_batches < 1 or self.tokens < 0 or not self.max_norm >= 0:
            raise ValueError(f"micro_batches is 1 or more, tokens and max_norm are 0 or more, not {self}")
        if self.accumulation not in ACCUMULATIONS:
            raise ValueError(
                f'forge.accumulation = "{self.accumulation}": must be one of {", ".join(ACCUMULATIONS)}'
            )


def attach(
    model: nn.Module,
    rule: UpdateRule | Sequence[ParamGroupSpec],
    recipe: Recipe | None = None,
    *,
    probe: Callable[[], Any],
    options: Mapping[str, float] | None = None,
    steps: Steps | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
    planner: Planner = plan,
    update_in_backward: bool = True,
) -> ForgeOptimizer:
    """Fuse the optimizer into a model's backward.

    model: has its memory and weights, and is in the mode and under the wrappers that it trains with. Any
        module: linears, embeddings, norms, biases and a head that owns its loss are found, whatever holds
        them.
    rule: for all weights, with the split that `groups_of_rule` makes; or groups, as for `RuleOptimizer`.
    recipe: how states and weights are stored; default: float32 states, no master weights.
    probe: runs a forward pass as training will, and returns what the loss depends on. Called once; it leaves
        no trace in buffers or random states.
    options: of a rule: learning rate, weight decay …; see `groups_of_rule`. Groups have their own.
    seed: of stochastic rounding.
    ranks: how ranks share the model; None: there is one.
    update_in_backward: as of `ForgeOptimizer`.
    A model that was attached before is taken over: the former optimizer says so at its next step.
    Raises TypeError for what is neither rule nor groups, ValueError for options that the rule has not, for
    several ranks that it was not told about, and for an axis that fusion lacks.
    """
    groups = _groups(model, rule, options)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a titanforge.optim.Recipe, not {type(recipe).__qualname__} {recipe!r}")
    if ranks is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"{dist.get_world_size()} ranks, and forge.attach was not told how they share the model: "
                "pass ranks = Ranks(mesh = …), or Ranks() for a model of this rank alone"
            )
        ranks = Ranks()
    steps, recipe = steps or Steps(), recipe or Recipe()
    _check_axes(ranks)
    for module in model.modules():
        if is_fused(module):
            restore_module(module)
    captured = install_hooks(model, groups)
    covered = cover(model, None if ranks.several else probe_readers(model, probe))
    plans = _plan_weights(groups, recipe, covered, steps, planner, ranks)
    return ForgeOptimizer(
        model,
        groups,
        recipe,
        covered,
        plans,
        micro_batches=steps.micro_batches,
        max_norm=steps.max_norm,
        keep_logits=steps.keep_logits,
        seed=seed,
        captured=captured,
        ranks=ranks,
        update_in_backward=update_in_backward,
    )


def _groups(
    model: nn.Module, rule: UpdateRule | Sequence[ParamGroupSpec], options: Mapping[str, float] | None
) -> list[ParamGroupSpec]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"forge.attach takes a torch.nn.Module first, not {type(model).__qualname__}")
    if isinstance(rule, UpdateRule):
        return groups_of_rule(model, rule, options)
    groups = list(rule) if isinstance(rule, (list, tuple)) else []
    if not groups or not all(isinstance(group, ParamGroupSpec) for group in groups):
        raise TypeError(
            f"forge.attach takes an update rule, {not_a_rule(rule)}; or the groups that "
            "titanforge.optim.build_groups(model, options) returns"
        )
    if options is not None:
        raise ValueError("forge.attach: options are of a rule alone; groups have theirs already")
    return groups


def _check_axes(ranks: Ranks) -> None:
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


def build_forge_optimizer(
    model: nn.Module,
    options: OptimizerOptions,
    training_dtype: str,
    *,
    probe: Callable[[], Any],
    steps: Steps,
    seed: int = 0,
    ranks: Ranks | None = None,
) -> ForgeOptimizer:
    """`optim.build_optimizer`, fused. options: the `[optimizer]` section."""
    groups, recipe = build_groups(model, options), build_recipe(options, training_dtype)
    return attach(model, groups, recipe, probe=probe, steps=steps, seed=seed, ranks=ranks)


def preview(
    model: nn.Module,
    options: OptimizerOptions,
    training_dtype: str,
    *,
    probe: Callable[[], Any],
    steps: Steps,
    ranks: Ranks | None = None,
) -> list[PlanLine]:
    """The plan alone, for a whole model on any device, also on meta."""
    ranks = ranks or Ranks()
    _check_axes(ranks)
    groups, recipe = build_groups(model, options), build_recipe(options, training_dtype)
    covered = cover(model, None if ranks.several else probe_readers(model, probe))
    plans = _plan_weights(groups, recipe, covered, steps, plan, ranks)
    return [
        PlanLine(name, tuple(one.param.shape), one.param.dtype, plans[name], one.placement.kind)
        for name, one in covered.items()
    ]


def _plan_weights(
    groups: list[ParamGroupSpec],
    recipe: Recipe,
    covered: Mapping[str, Covered],
    steps: Steps,
    planner: Planner,
    ranks: Ranks,
) -> dict[str, ParamPlan]:
    plans = {}
    for group in groups:
        rule = group.rule
        for name, param in zip(group.names, group.params):
            codecs = [recipe.state_codec_for(rule, slot, param) for slot in rule.slots_for(param.shape)]
            schedule = Schedule(
                micro_batches=steps.micro_batches,
                tokens=steps.tokens,
                accumulation=steps.accumulation,
                state_keeps_sums=all(codec.name == "fp32" or codec.stochastic for codec in codecs),
                needs_norm=steps.max_norm > 0,
                undo=steps.undo,
                reduce="states" if ranks.reduce == "states" else "gradients",
            )
            plans[name] = planner(rule, covered[name].placement, ranks.mesh, schedule)
    return plans
