"""From the `[optimizer]` and `[forge]` sections to a fused optimizer, or to its plan alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import nn

from titanforge.forge.coverage import Covered, cover
from titanforge.forge.engine import ForgeOptimizer
from titanforge.forge.plan import ParamPlan, Placement, Schedule, plan
from titanforge.forge.probe import probe_readers
from titanforge.forge.report import PlanLine
from titanforge.optim.build import OptimizerOptions, build_groups, build_recipe
from titanforge.optim.dobb.hooks import install_hooks
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.rule import UpdateRule
from titanforge.optim.states import Recipe

Planner = Callable[[UpdateRule, Placement, Mapping[str, int], Schedule], ParamPlan]


@dataclass(frozen=True)
class Steps:
    """How training runs, as far as the plan depends on it.

    micro_batches: per step. tokens: per micro-batch. accumulation: `forge.accumulation`. max_norm: of lagged
    clipping; 0: none. undo: a refused step must leave the states of affine rules as they were even after some
    of its micro-batches (`training.nonfinite_loss = "skip"`).
    """

    micro_batches: int = 1
    tokens: int = 0
    accumulation: str = "auto"
    max_norm: float = 0.0
    undo: bool = False


def attach(
    model: nn.Module,
    groups: list[ParamGroupSpec],
    recipe: Recipe | None = None,
    *,
    probe: Callable[[], Any],
    steps: Steps | None = None,
    seed: int = 0,
    mesh: Mapping[str, int] | None = None,
    planner: Planner = plan,
) -> ForgeOptimizer:
    """Fuse the optimizer into a model's backward.

    model: has its memory and weights, and is in the mode and under the wrappers that it trains with. Any
        module: linears, embeddings, norms, biases and a head that owns its loss are found, whatever holds
        them.
    groups, recipe: as for `RuleOptimizer`. probe: runs a forward pass as training will, and returns what the
    loss depends on. Called once; it leaves no
        trace in buffers or random states.
    seed: of stochastic rounding.
    mesh: ranks along each axis that shares the model or its batch; empty for a model that this rank trains
        alone among others; None: one rank.
    Raises ValueError where several ranks share the model.
    """
    ranks = prod(mesh.values()) if mesh is not None else dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1:
        raise ValueError(
            f"forge.enable = true runs on one rank as yet, and {ranks} were started: start one, or set "
            "forge.enable = false"
        )
    steps, recipe = steps or Steps(), recipe or Recipe()
    captured = install_hooks(model, groups)
    covered = cover(model, probe_readers(model, probe))
    plans = _plan_weights(groups, recipe, covered, steps, planner)
    return ForgeOptimizer(
        model,
        groups,
        recipe,
        covered,
        plans,
        micro_batches=steps.micro_batches,
        max_norm=steps.max_norm,
        seed=seed,
        captured=captured,
    )


def build_forge_optimizer(
    model: nn.Module,
    options: OptimizerOptions,
    training_dtype: str,
    *,
    probe: Callable[[], Any],
    steps: Steps,
    seed: int = 0,
) -> ForgeOptimizer:
    """`optim.build_optimizer`, fused. options: the `[optimizer]` section."""
    groups, recipe = build_groups(model, options), build_recipe(options, training_dtype)
    return attach(model, groups, recipe, probe=probe, steps=steps, seed=seed)


def preview(
    model: nn.Module,
    options: OptimizerOptions,
    training_dtype: str,
    *,
    probe: Callable[[], Any],
    steps: Steps,
) -> list[PlanLine]:
    """The plan alone, for a model on any device, also on meta."""
    groups, recipe = build_groups(model, options), build_recipe(options, training_dtype)
    covered = cover(model, probe_readers(model, probe))
    plans = _plan_weights(groups, recipe, covered, steps, plan)
    return [
        PlanLine(name, tuple(one.param.shape), one.param.dtype, plans[name]) for name, one in covered.items()
    ]


def _plan_weights(
    groups: list[ParamGroupSpec],
    recipe: Recipe,
    covered: Mapping[str, Covered],
    steps: Steps,
    planner: Planner,
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
            )
            plans[name] = planner(rule, covered[name].placement, {}, schedule)
    return plans
