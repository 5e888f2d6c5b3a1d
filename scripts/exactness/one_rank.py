"""Gates that each rank runs by itself: the update's arithmetic, storage and resuming."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from scripts.exactness.one_linear import PAPER, SMALL, relative_rms, weights_by_step
from scripts.exactness.registry import Reading, World, gate
from scripts.exactness.runs import (
    ALONE,
    STEPS,
    Run,
    formed,
    fused,
    job,
    largest,
    losses_apart,
    ordinary,
    rule,
    tensors_apart,
)
from titanforge.config.sections import Optimizer
from titanforge.optim.build import build_groups, build_recipe
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.registry import RULES, build_rule

BF16 = {"training__dtype": "bfloat16"}
RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {"optimizer": rule()},
    "bf16, bf16 states": {"optimizer": rule(state_dtype="bfloat16"), **BF16},
    "bf16, fp32 master": {"optimizer": rule(master_weights="float32"), **BF16},
    "bf16, int8 states, stochastic rounding": {
        "optimizer": rule(state_dtype="int8", master_weights="stochastic_rounding"),
        **BF16,
    },
    "bf16, fp8 states": {"optimizer": rule(state_dtype="fp8"), **BF16},
    # Qwen3's debug model has one table for embedding and head.
    "bf16, a tied head": {"optimizer": rule(state_dtype="bfloat16"), "model__name": "qwen3", **BF16},
}


def alone(world: World, make: Callable[..., Any], optimizer: Optimizer, **changes: Any) -> Run:
    """A run on this rank alone."""
    config = job(world, ALONE, **changes)
    config.optimizer = optimizer
    return Run(world, config, make)


@gate("T0")
def fused_is_formed(world: World) -> Iterator[Reading]:
    """Updates inside backward against the same kernel on formed gradients: bit for bit."""
    for name, recipe in RECIPES.items():
        first, second = alone(world, fused, **recipe), alone(world, formed, **recipe)
        losses = losses_apart(first.train(), second.train())
        apart = largest(
            [tensors_apart(first.weights(), second.weights()), tensors_apart(first.states(), second.states())]
        )
        yield Reading(f"{name}: weights, states and losses apart", largest([apart, losses]), 0.0, 0.0)


@gate("families")
def every_family(world: World) -> Iterator[Reading]:
    """Every rule fused against unfused, and against torch.optim where that has it: round-off."""
    gaps: dict[str, float] = {}
    for name in sorted(RULES):
        first, second = (alone(world, make, rule(name)) for make in (fused, ordinary))
        gaps[name] = losses_apart(first.train(), second.train())
    worst = max(gaps, key=lambda name: gaps[name])
    # Where sums run in another order, a sign or a power iteration may turn; losses are fp32 of about 6.
    what = f"fused against unfused, {len(gaps)} rules, worst {worst}: losses apart"
    yield Reading(what, largest(gaps.values()), 1e-3 if world.on_gpu else 2e-5)
    errors = {name: _against_torch(world, name, *how) for name, how in TORCH.items()}
    worst = max(errors, key=lambda name: errors[name])
    what = f"against torch.optim in float64, {len(errors)} rules, worst {worst}: weights apart"
    yield Reading(what, largest(errors.values()), 2e-6)


_LR, _DECAY, _BETAS, _EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8
Torch = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
TORCH: dict[str, tuple[str, dict[str, Any], Torch]] = {
    "SGD": ("sgd", {"momentum": 0.0}, lambda p: torch.optim.SGD(p, _LR, weight_decay=_DECAY)),
    "momentum": ("sgd", {}, lambda p: torch.optim.SGD(p, _LR, 0.9, weight_decay=_DECAY)),
    "Adagrad": ("adagrad", {}, lambda p: torch.optim.Adagrad(p, _LR, weight_decay=_DECAY, eps=_EPS)),
    "RMSprop": ("rmsprop", {}, lambda p: torch.optim.RMSprop(p, _LR, 0.95, _EPS, weight_decay=_DECAY)),
    "Adam": ("adam", {}, lambda p: torch.optim.Adam(p, _LR, _BETAS, _EPS, _DECAY)),
    "AdamW": ("adamw", {}, lambda p: torch.optim.AdamW(p, _LR, _BETAS, _EPS, _DECAY)),
    "Adamax": ("adamax", {}, lambda p: torch.optim.Adamax(p, _LR, _BETAS, _EPS, _DECAY)),
    "NAdam": (
        "nadam",
        {},
        lambda p: torch.optim.NAdam(p, _LR, _BETAS, _EPS, _DECAY, decoupled_weight_decay=True),
    ),
    "RAdam": (
        "radam",
        {},
        lambda p: torch.optim.RAdam(p, _LR, _BETAS, _EPS, _DECAY, decoupled_weight_decay=True),
    ),
    "Adafactor": (
        "adafactor",
        {},
        # torch's own epsilon follows the dtype: the reference in float64 gets float32's.
        lambda p: torch.optim.Adafactor(
            p, _LR, weight_decay=_DECAY, eps=(torch.finfo(torch.float32).eps, 1e-3)
        ),
    ),
}


def _against_torch(world: World, case: str, name: str, form: dict[str, Any], make: Torch) -> float:
    """Weights after twelve steps on given gradients, relative to the largest; infinite if none moved."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((60, 100), (12, 50), (70,))]
    ours = [nn.Parameter(w.clone().to(world.device)) for w in start]
    theirs = [nn.Parameter(w.double().to(world.device)) for w in start]
    options = {"lr": _LR, "weight_decay": _DECAY, "beta1": 0.9, "beta2": 0.95, "eps": _EPS, "momentum": 0.9}
    names = [f"{case}.{i}" for i in range(len(ours))]
    optimizer = RuleOptimizer([ParamGroupSpec("all", build_rule(name, **form), options, names, ours)])
    reference = make(theirs)
    for number in range(12):
        for mine, other in zip(ours, theirs):
            gradient = torch.randn(mine.shape, generator=generator).to(world.device) * 0.1
            mine.grad, other.grad = gradient.clone(), gradient.double()
        optimizer.set_lr(1.0 - 0.05 * number)
        for group in reference.param_groups:
            group["lr"] = _LR * (1.0 - 0.05 * number)
        optimizer.step()
        reference.step()
    if any(float((other.detach().cpu() - before).abs().max()) < 1e-3 for other, before in zip(theirs, start)):
        return math.inf
    return largest(
        float((mine - other).abs().max()) / max(1.0, float(other.abs().max()))
        for mine, other in ((mine.detach().double(), other.detach()) for mine, other in zip(ours, theirs))
    )


@gate("MW")
def master_weights(world: World) -> Iterator[Reading]:
    """bf16 weights with an fp32 master against torch mixed precision: fp32 weights cast on each use, AdamW of
    torch.optim on their fp32 gradients.
    """
    mixed = alone(
        world, ordinary, rule(implementation="for-loop"), training__mixed_precision_param="bfloat16"
    )
    mixed.round_weights()
    wanted = mixed.train()
    for name, make in (("ordinary", ordinary), ("fused", fused)):
        run = alone(world, make, rule(master_weights="float32"), **BF16)
        # AdamW's last bits decide now and then to which bf16 a weight is cast; the fused kernel's gradient is
        # fp32 moreover, and torch's is rounded to bf16 first.
        tolerance = 2e-3 if make is fused else 1e-4
        what = f"{name} engine against torch mixed precision: losses apart"
        yield Reading(what, losses_apart(run.train(), wanted), tolerance, 5.96e-7)


@gate("SR")
def stochastic_rounding(world: World) -> Iterator[Reading]:
    """Steps of an eighth of a bf16 spacing: rounded at random they add up without bias, to nearest they are
    lost.
    """
    steps, size, distance = 16, 256, 2.0**-11
    moved = {}
    for storage in ("none", "stochastic_rounding"):
        linear = nn.Linear(size, size, bias=False, dtype=torch.bfloat16, device=world.device)
        nn.init.ones_(linear.weight)
        options = Optimizer(name="SGD", momentum=0.0, lr=distance, weight_decay=0.0, master_weights=storage)  # pyright: ignore[reportArgumentType]
        optimizer = RuleOptimizer(build_groups(linear, options), build_recipe(options, "bfloat16"), seed=3)
        for _ in range(steps):
            linear.weight.grad = torch.ones_like(linear.weight)
            optimizer.step()
        moved[storage] = float(1.0 - linear.weight.detach().double().mean())
    wanted = steps * distance
    # Standard deviation of the mean: 0.26 % of the way.
    bias = abs(moved["stochastic_rounding"] - wanted) / wanted
    yield Reading("rounded at random: mean way off, relative", bias, 0.015)
    yield Reading("to nearest: mean way (the dead zone)", abs(moved["none"]), 0.0)


@gate("fidelity")
def weight_error(world: World) -> Iterator[Reading]:
    """Twenty bf16 AdamW steps of one linear against fp32: the fused path's rms weight error over the standard
    path's, which rounds each gradient to bf16 first (FORGE, appendix E). No larger with fp32 master weights;
    up to 1.001 of it where the weights are bf16.
    """
    size = PAPER if world.on_gpu or world.full else SMALL
    *_, reference = weights_by_step(size, torch.float32, rule(), world.device, fuse=False)
    for name, options, paper in (
        ("bf16 throughout", rule(state_dtype="bfloat16"), 5.83e-4 / 6.09e-4),
        ("fp32 master", rule(master_weights="float32"), None),
    ):
        errors = []
        for fuse in (False, True):
            *_, last = weights_by_step(size, torch.bfloat16, options, world.device, fuse=fuse)
            errors.append(relative_rms(last, reference))
        standard, fused_error = errors
        what = f"{name}, {size}: rms error, fused over standard ({standard:.3e})"
        # Where the weights are bf16 their own rounding, alike on both paths, is nearly all of the error, and
        # the ratio falls to either side of 1 in the fourth digit.
        yield Reading(what, fused_error / standard, 1.0 if name == "fp32 master" else 1.001, paper)


@gate("resume")
def resume_is_bit_exact(world: World) -> Iterator[Reading]:
    """A fused run that goes on from its own states, stochastic rounding and int8 included: bit for bit."""
    recipe = RECIPES["bf16, int8 states, stochastic rounding"]
    run, again = alone(world, fused, **recipe), alone(world, fused, **recipe)
    run.train(0, 3)
    again.model.load_state_dict(run.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    losses = losses_apart(again.train(3, 3 + STEPS), run.train(3, 3 + STEPS))
    apart = largest([tensors_apart(run.weights(), again.weights()), losses])
    yield Reading("weights and losses apart", apart, 0.0)
