"""From the `[optimizer]` section to an optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from titanforge.optim.baseline import TorchOptimizer
from titanforge.optim.dion import Dion
from titanforge.optim.dobb.hooks import find_readers, install_hooks
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.matrix import MatrixRule, OrthogonalRule
from titanforge.optim.matrix_options import DionOptions, DobbOptions, MatrixOptions, MuonOptions
from titanforge.optim.orthonormal import noise_bytes
from titanforge.optim.owners import note_owners
from titanforge.optim.param_groups import (
    ParamGroupSpec,
    PatternGroup,
    RuleOptions,
    build_param_groups,
    matrix_parts,
    named_trainable_parameters,
)
from titanforge.optim.placement import cuts
from titanforge.optim.registry import build_rule
from titanforge.optim.states import Recipe


class ScalarOptions(Protocol):
    """The keys of `[optimizer.scalar]`."""

    name: str
    lr: float | None
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class OptimizerOptions(Protocol):
    """The keys of `[optimizer]`; `titanforge.config.sections.Optimizer` has them."""

    name: str
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    nesterov: bool
    update_scale_tau: float
    per_head: bool

    @property
    def update_scale(self) -> str: ...

    @property
    def muon(self) -> Any: ...

    @property
    def dion(self) -> Any: ...

    @property
    def dobb(self) -> Any: ...

    @property
    def implementation(self) -> str: ...

    @property
    def state_dtype(self) -> str: ...

    @property
    def master_weights(self) -> str: ...

    @property
    def param_groups(self) -> Sequence[PatternGroup]: ...

    @property
    def scalar(self) -> ScalarOptions: ...


def build_optimizer(
    model: nn.Module,
    options: OptimizerOptions,
    training_dtype: str,
    *,
    seed: int = 0,
    partial: bool = False,
) -> RuleOptimizer | TorchOptimizer:
    """The optimizer of a model that has its memory, and its weights if there are master weights.

    options: the `[optimizer]` section.
    training_dtype: how weights are stored, `float32` or `bfloat16`.
    seed: of stochastic rounding.
    partial: this is a part of the model; see `build_groups`.
    Raises ValueError, naming the key, for a combination that is not possible.
    """
    groups = build_groups(model, options, partial=partial)
    recipe = build_recipe(options, training_dtype)
    if options.implementation == "native":
        readers = find_readers(model, groups)
        optimizer = RuleOptimizer(groups, recipe, seed=seed, captured=readers)
        install_hooks(readers, groups)
        return optimizer
    for key, value, only in (
        # torch.optim keeps states in the weights' dtype: the default is not read.
        ("state_dtype", options.state_dtype, ("float32", training_dtype)),
        ("master_weights", options.master_weights, ("none",)),
    ):
        if value not in only:
            raise ValueError(
                f'optimizer.{key} = {value!r} needs optimizer.implementation = "native", '
                f"not {options.implementation!r}"
            )
    return TorchOptimizer(groups, options.implementation)


def build_recipe(options: OptimizerOptions, training_dtype: str) -> Recipe:
    """How states and weights are stored. Raises ValueError, naming the key, for what is not possible."""
    if options.master_weights != "none" and training_dtype != "bfloat16":
        raise ValueError(
            f"optimizer.master_weights = {options.master_weights!r} is for bfloat16 weights; with "
            f'training.dtype = {training_dtype!r} set it to "none"'
        )
    return Recipe(options.state_dtype, options.master_weights)


def build_groups(
    model: nn.Module, options: OptimizerOptions, *, partial: bool = False
) -> list[ParamGroupSpec]:
    """The parameter groups alone, also for a model on meta: for printing them without memory.

    partial: of a part of the model, where a pattern of `optimizer.param_groups` need not own a weight; check
        the whole model's groups first.
    """
    _check_ranges(options)
    scalar = options.scalar
    main_rule = build_rule(
        options.name, momentum=options.momentum, nesterov=options.nesterov, matrix=matrix_options(options)
    )
    main = RuleOptions(main_rule, _values(options, options.lr, options.momentum))
    beside = None
    if main_rule.matrix_only:
        rule = build_rule(scalar.name, momentum=options.momentum, key="optimizer.scalar.name")
        if rule.matrix_only:
            raise ValueError(
                f"optimizer.scalar.name = {scalar.name!r} takes matrices alone, and the scalar rule is for "
                "the other weights: take AdamW or Lion"
            )
        lr = options.lr if scalar.lr is None else scalar.lr
        beside = RuleOptions(rule, _values(scalar, lr, options.momentum))
    named, roles = named_trainable_parameters(model)
    parts = matrix_parts(model, options.per_head)
    groups = build_param_groups(
        named, main, options.param_groups, scalar=beside, roles=roles, parts=parts, partial=partial
    )
    return note_owners(model, groups)


def check_storage(groups: Sequence[ParamGroupSpec], options: OptimizerOptions, training_dtype: str) -> None:
    """Whether states and weights can be stored as asked; raises ValueError, naming the key, where the engine
    would.

    groups: of the whole model in the dtype that it trains in, from `build_groups`, also on meta.
    """
    recipe = build_recipe(options, training_dtype)
    for group in groups:
        for param in group.params:
            recipe.weight_codec_for(group.rule, param)
            for slot in group.rule.slots_for(param.shape):
                recipe.state_codec_for(group.rule, slot, param)


def shard_dims(groups: Sequence[ParamGroupSpec], shards: int) -> dict[int, int]:
    """The dims along which weights are to be cut into so many shards, by `id` of the weight; weights that
    are not in it may be cut anyhow.

    groups: of the whole model, from `build_groups`, on any device, also on meta. Raises ValueError, naming
    the key, where shards cannot be updated by themselves.
    """
    dims: dict[int, int] = {}
    for group in groups:
        for name, param in zip(group.names, group.params):
            dim = group.rule.shard_dim(param.shape)
            if dim is not None:
                every = shards * cuts(param, dim)  # the tensor axis has cut it before
                group.rule.check_shards(name, param.shape, group.parts.get(name, 1), dim, every)
                dims[id(param)] = dim
    return dims


def matrix_options(options: OptimizerOptions) -> MatrixOptions:
    """What the rules of matrices read of the section."""
    muon = vars(options.muon)
    return MatrixOptions(
        update_scale=options.update_scale,
        tau=options.update_scale_tau,
        muon=MuonOptions(**{**muon, "coefficients": tuple(muon["coefficients"])}),
        dion=DionOptions(**vars(options.dion)),
        dobb=DobbOptions(**vars(options.dobb)),
    )


def _values(section: OptimizerOptions | ScalarOptions, lr: float, momentum: float) -> dict[str, float]:
    return {
        "lr": lr,
        "weight_decay": section.weight_decay,
        "beta1": section.beta1,
        "beta2": section.beta2,
        "eps": section.eps,
        "momentum": momentum,
    }


def _check_ranges(options: OptimizerOptions) -> None:
    sections = [
        ("optimizer", options),
        ("optimizer.scalar", options.scalar),
        *((f"optimizer.param_groups[{index}]", group) for index, group in enumerate(options.param_groups)),
    ]
    for section, values in sections:
        for key, upper in (
            ("lr", None),
            ("weight_decay", None),
            ("eps", None),
            ("beta1", 1.0),
            ("beta2", 1.0),
        ):
            value = getattr(values, key)
            if value is not None and not (value >= 0 and (upper is None or value < upper)):
                valid = "at least 0" if upper is None else "at least 0 and below 1"
                raise ValueError(f"{section}.{key} must be {valid}, not {value}")
    if not 0.0 <= options.momentum < 1.0:
        raise ValueError(f"optimizer.momentum must be at least 0 and below 1, not {options.momentum}")


STATE_ITEM_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0 + 4 / 64, "fp8": 1.0}
"""Bytes of one stored state element; int8 has an fp32 scale for each block of 64."""


def state_bytes(groups: Sequence[ParamGroupSpec], options: OptimizerOptions) -> int:
    """Bytes of all optimizer states of the whole model, before any memory is taken.

    groups: from `build_groups`, on any device.
    """
    total = 0.0
    for group in groups:
        for name, param in zip(group.names, group.params):
            itemsize = STATE_ITEM_BYTES[options.state_dtype]
            if options.implementation != "native":
                itemsize = param.element_size()
            for auxiliary in group.rule.auxiliary_slots(param.shape, group.parts.get(name, 1)):
                total += auxiliary.shape.numel() * auxiliary.dtype.itemsize
            for slot in group.rule.slots_for(param.shape):
                stored = itemsize if slot.shape == "weight" else 4
                total += slot.shape_for(param.shape).numel() * stored
            if options.master_weights == "float32" and param.element_size() < 4:
                total += param.numel() * 4
    return round(total)


def update_bytes(
    groups: Sequence[ParamGroupSpec], taken_with: Callable[[str], str] = lambda name: "", shards: int = 1
) -> int:
    """Bytes that U of the rules of matrices takes beside weights and states on a GPU, at its peak; 0 for
    others.

    taken_with: of a weight's name: same-shape weights for which it says the same are updated together.
        Default: all of a group.
    shards: that a weight is cut into, by one axis.

    Muon, Scion: two bfloat16 copies of the largest stack that goes together, and two of its Gram matrices. On
    shards a stack is what one rank owns of a batch, and there are four copies more, of what is on its way.
    Dion: bf16 planes and an fp32 product of such a stack, five float64 copies of its factor, and the noise
    that is kept for each shape of factor. Others: about eight fp32 copies of the largest weight.
    """
    peak, noise = 0, {}
    for group in groups:
        rule = group.rule
        if not isinstance(rule, MatrixRule):
            continue
        alike = Counter((taken_with(name), param.shape) for name, param in zip(group.names, group.params))
        for name, param in zip(group.names, group.params):
            rows, columns = param.shape[-2] // group.parts.get(name, 1), param.shape[-1]
            count = alike[taken_with(name), param.shape] if param.dim() == 2 else 1
            dealt = isinstance(rule, OrthogonalRule) and param.dim() == 2 and shards > 1
            if dealt:
                count = -(-count // shards)
            together = param.numel() * max(1, min(count, rule.batch_bytes // (4 * param.numel())))
            gram = together // max(rows, columns) * min(rows, columns)
            own = 8 * 4 * param.numel()
            if isinstance(rule, OrthogonalRule):
                own = 4 * (together + gram) + (8 * together if dealt else 0)
            if isinstance(rule, Dion):
                rank = rule.rank(rows, columns)
                own = 8 * together + 5 * 8 * (together // min(rows, columns) * rank)
                noise[max(rows, columns), rank] = noise_bytes(max(rows, columns), rank)
            peak = max(peak, own)
    return peak + sum(noise.values())
