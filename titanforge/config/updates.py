"""Checks of what changes weights: the rule, how it stores states and weights, its schedule."""

from __future__ import annotations

import re

from titanforge.config import schema
from titanforge.config.rules import MATRIX_RULES, RULE_KEYS, rule_name
from titanforge.config.schema import ConfigError, refusal, show
from titanforge.config.sections import JobConfig

TORCH_OPTIM_RULES = ("adamw", "adam", "sgd")


def _check_rules(config: JobConfig) -> None:
    for path in ("optimizer.name", "optimizer.scalar.name"):
        name = rule_name(schema.get_value(config, path))
        if name not in RULE_KEYS:
            word = schema.nearest(name, RULE_KEYS)
            hint = f"; did you mean {show(word)}?" if word else ""
            raise refusal(config, path, f"must be one of {', '.join(sorted(RULE_KEYS))}{hint}")
    if rule_name(config.optimizer.scalar.name) in MATRIX_RULES:
        raise refusal(config, "optimizer.scalar.name", "takes matrices alone: use AdamW, Lion or the like")
    name = rule_name(config.optimizer.name)
    if len(config.optimizer.muon.coefficients) != 3:
        raise refusal(config, "optimizer.muon.coefficients", "must be three numbers: a, b, c")
    scale = config.optimizer.update_scale
    if (scale == "rank_corrected" and name != "dion") or (scale == "own" and name == "dobb"):
        raise refusal(
            config, "optimizer.update_scale", f'{name} has no such scale: take "shared", tau sqrt(max(m, n))'
        )
    if name == "dion" and config.optimizer.dion.rank_fraction == 0:
        raise refusal(config, "optimizer.dion.rank_fraction", "must be more than 0, at most 1")
    if config.optimizer.nesterov and "nesterov" not in RULE_KEYS[rule_name(config.optimizer.name)]:
        with_it = ", ".join(rule for rule, keys in RULE_KEYS.items() if "nesterov" in keys)
        raise refusal(
            config,
            "optimizer.nesterov",
            f"optimizer.name = {show(config.optimizer.name)} has no Nesterov form (these have: {with_it})",
        )


def check_optimizer(config: JobConfig) -> None:
    """Rule, implementation, storage and parameter groups, which must fit each other."""
    optimizer, training = config.optimizer, config.training
    _check_rules(config)
    native = optimizer.implementation == "native"
    if optimizer.master_weights != "none":
        if training.dtype != "bfloat16":
            raise refusal(
                config,
                "optimizer.master_weights",
                f'needs training.dtype = "bfloat16", not {show(training.dtype)}: float32 weights are their'
                ' own masters, so set it to "none"',
            )
        if not native:
            raise refusal(
                config,
                "optimizer.master_weights",
                f'needs optimizer.implementation = "native", not {show(optimizer.implementation)}',
            )
    if not native:
        if rule_name(optimizer.name) not in TORCH_OPTIM_RULES:
            raise refusal(
                config,
                "optimizer.implementation",
                f"torch.optim has AdamW, Adam and SGD here, not optimizer.name = {show(optimizer.name)}: use"
                ' "native"',
            )
        if optimizer.state_dtype not in ("float32", training.dtype):
            raise refusal(
                config,
                "optimizer.state_dtype",
                f'needs optimizer.implementation = "native", not {show(optimizer.implementation)}:'
                " torch.optim keeps states in the weights' dtype",
            )
    for i, group in enumerate(optimizer.param_groups):
        path = f"optimizer.param_groups[{i}].pattern = {show(group.pattern)}"
        if not group.pattern:
            raise ConfigError(f'{path}: is empty: give a regular expression, e.g. "norm"')
        try:
            re.compile(group.pattern)
        except re.error as error:
            raise ConfigError(f"{path}: is not a regular expression: {error}") from None


def check_dobb(config: JobConfig) -> None:
    """What Dobb does not work with; whether blocks fit shards is the model's to say."""
    if rule_name(config.optimizer.name) != "dobb" or config.optimizer.dobb.source == "gradient":
        return
    if config.parallelism.pipeline_parallel_degree > 1:
        raise refusal(
            config,
            "parallelism.pipeline_parallel_degree",
            "Dobb captures whole micro-batches, one after the other: set it to 1, or take"
            ' optimizer.dobb.source = "gradient"',
        )
    if config.training.enable_cpu_offload:
        raise refusal(
            config,
            "training.enable_cpu_offload",
            "Dobb captures on the GPU what it keeps beside the weights: set it to false, or take"
            ' optimizer.dobb.source = "gradient"',
        )


def check_schedule(config: JobConfig) -> list[str]:
    """Warnings about a schedule that the run does not see as written."""
    schedule, steps = config.lr_scheduler, config.training.steps
    warnings = []
    if schedule.total_steps is not None and schedule.warmup_steps > schedule.total_steps:
        raise refusal(
            config,
            "lr_scheduler.warmup_steps",
            f"is longer than the schedule, lr_scheduler.total_steps = {schedule.total_steps}: shorten it",
        )
    total = schedule.total_steps or steps
    if schedule.warmup_steps >= total:
        warnings.append(
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps}: the run, {total} steps, is all warm-up and"
            " ends before the learning rate decays"
        )
    elif schedule.decay_ratio is not None and schedule.warmup_steps + schedule.decay_ratio * total > total:
        warnings.append(
            f"lr_scheduler.decay_ratio = {schedule.decay_ratio}: warm-up ({schedule.warmup_steps} steps) and"
            f" decay ({round(schedule.decay_ratio * total)}) are longer than the schedule ({total}): the"
            " decay starts right after warm-up"
        )
    if total < steps:
        warnings.append(
            f"lr_scheduler.total_steps = {total}: less than training.steps = {steps}: the last"
            f" {steps - total} steps run at the schedule's floor"
        )
    return warnings
