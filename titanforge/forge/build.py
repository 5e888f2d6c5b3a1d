"""From the `[optimizer]` and `[forge]` sections to a fused optimizer, or to its plan alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from titanforge.forge.arguments import Steps, check_arguments, check_axes, check_groups, check_ranks
from titanforge.forge.coverage import Covered, cover
from titanforge.forge.engine import ForgeOptimizer
from titanforge.forge.forwards import merged_groups
from titanforge.forge.modules import ordinary_forwards
from titanforge.forge.plan import ParamPlan, Placement, Schedule, plan
from titanforge.forge.probe import probe_readers
from titanforge.forge.ranks import Ranks
from titanforge.forge.report import PlanLine, switches_report
from titanforge.forge.values import shown
from titanforge.optim.build import OptimizerOptions, build_groups, build_recipe
from titanforge.optim.dobb.hooks import find_readers, install_hooks
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.rule import UpdateRule
from titanforge.optim.rule_groups import groups_of_rule
from titanforge.optim.states import Recipe

Planner = Callable[[UpdateRule, Placement, Mapping[str, int], Schedule], ParamPlan]


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
    probe: runs a forward pass as training will, and returns the loss, or what it depends on. Called once (not
        where several ranks share the model); it leaves no trace in buffers or random states.
    options: of a rule: learning rate, weight decay …; see `groups_of_rule`. Groups have their own.
    steps: how training runs; default: steps of one micro-batch, without clipping.
    seed: of stochastic rounding, 0 to 2**63 - 1.
    ranks: how ranks share the model; None: there is one.
    planner: in place of `plan`, to compare.
    update_in_backward: as of `ForgeOptimizer`.
    A model that was attached before is taken over: the former optimizer says so at its next step.
    Raises TypeError for an argument of another type, ValueError for a value out of range, for options that
    the rule has not, for groups that do not own each trainable weight once, for several ranks that it was not
    told about, and for an axis that fusion lacks; each names the argument, and all come before the model
    changes. Whatever fails after that (the probe, the planner, states that cannot be stored so) leaves the
    model as it was, in the hands of its former optimizer if it had one.
    """
    check_arguments(
        recipe=recipe,
        probe=probe,
        steps=steps,
        seed=seed,
        ranks=ranks,
        planner=planner,
        update_in_backward=update_in_backward,
    )
    groups = _groups(model, rule, options)
    ranks = check_ranks(ranks)
    steps, recipe = steps or Steps(), recipe or Recipe()
    captured = find_readers(model, groups)
    with ordinary_forwards(model):
        covered = cover(model, None if ranks.several else probe_readers(model, probe))
        plans = _plan_weights(groups, recipe, covered, steps, planner, ranks)
        optimizer = ForgeOptimizer(
            model,
            groups,
            recipe,
            covered,
            plans,
            micro_batches=steps.micro_batches,
            max_norm=steps.max_norm,
            keep_logits=steps.keep_logits,
            merge_projections=steps.merge_projections,
            seed=seed,
            captured=captured,
            ranks=ranks,
            update_in_backward=update_in_backward,
        )
    install_hooks(captured, groups)
    return optimizer


def _groups(
    model: nn.Module, rule: UpdateRule | Sequence[ParamGroupSpec], options: Mapping[str, float] | None
) -> list[ParamGroupSpec]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"forge.attach takes a torch.nn.Module first, not {type(model).__qualname__}")
    if isinstance(rule, UpdateRule):
        return groups_of_rule(model, rule, options)
    groups = check_groups(model, rule)
    if options is not None:
        raise ValueError("forge.attach: options are of a rule alone; groups have theirs already")
    return groups


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


@dataclass(frozen=True)
class Preview:
    """lines: the plan of each weight. switches: as of `switches_report`."""

    lines: list[PlanLine]
    switches: list[str]


def preview(
    model: nn.Module,
    options: OptimizerOptions,
    training_dtype: str,
    *,
    probe: Callable[[], Any],
    steps: Steps,
    ranks: Ranks | None = None,
) -> Preview:
    """What `build_forge_optimizer` would do, for a whole model on any device, also on meta."""
    ranks = ranks or Ranks()
    check_axes(ranks)
    groups, recipe = build_groups(model, options), build_recipe(options, training_dtype)
    apart = find_readers(model, groups)
    covered = cover(model, None if ranks.several else probe_readers(model, probe))
    plans = _plan_weights(groups, recipe, covered, steps, plan, ranks)
    lines = [
        PlanLine(name, tuple(one.param.shape), one.param.dtype, plans[name], one.placement.kind)
        for name, one in covered.items()
    ]
    merged = merged_groups(model, covered, plans, apart) if steps.merge_projections else []
    switches = switches_report(lines, merged, keep_logits=steps.keep_logits)
    return Preview(lines, switches)


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
            if not isinstance(plans[name], ParamPlan):
                raise TypeError(
                    f"forge.attach: planner must return a ParamPlan, and returned {shown(plans[name])} for "
                    f"{name!r}"
                )
    return plans
