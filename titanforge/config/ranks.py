"""Whether the degrees of ``[parallelism]`` fit each other, the ranks that were started, and the sequences."""

from __future__ import annotations

from titanforge.config import schema
from titanforge.config.rules import rule_name
from titanforge.config.schema import ConfigError, refusal, show
from titanforge.config.sections import JobConfig

COORDINATE_RULES = frozenset(
    {"adagrad", "adam", "adamax", "adamw", "lion", "nadam", "radam", "rmsprop", "sgd"}
)
"""Rules that read one coordinate at a time, so that any share of a weight can be updated by itself."""


SHARDED_RULES = COORDINATE_RULES | {"muon", "scion", "dion", "rmnp"}
"""And those that exchange what they need of the other parts of a matrix, whatever axis cuts it."""


def check_ranks(config: JobConfig, world_size: int, device_type: str) -> int:
    """Returns the number of data-parallel ranks, dp_replicate x dp_shard.

    Raises:
        ConfigError: naming the key, its value and what would fit.
    """
    parallelism = config.parallelism
    if world_size < 1:
        raise ConfigError(f"WORLD_SIZE = {world_size}: torchrun sets it to the number of ranks, at least 1")
    left, taken = world_size, ""
    started = "WORLD_SIZE=N before a dry run" if config.job.dry_run else "torchrun --nproc_per_node"
    for name in ("pipeline_parallel", "tensor_parallel", "context_parallel", "data_parallel_replicate"):
        path = f"parallelism.{name}_degree"
        degree = schema.get_value(config, path)
        if left % degree:
            raise refusal(
                config,
                path,
                f"does not divide the number of ranks, {world_size}{taken}: use a divisor of it, or"
                f" another number of ranks ({started})",
            )
        if degree > 1:
            taken += f" / {name}_degree = {degree}"
        left //= degree
    shard = parallelism.data_parallel_shard_degree
    if shard not in (-1, left):
        total = world_size // left * shard
        others = taken.replace(" / ", " x ").removeprefix(" x ") or "data_parallel_replicate_degree = 1"
        raise refusal(
            config,
            "parallelism.data_parallel_shard_degree",
            f"times {others} makes {total} ranks, but {world_size} were started: set it to -1 (here {left}),"
            f" or take {total} ranks ({started})",
        )
    if parallelism.expert_parallel_degree > 1 and config.training.enable_cpu_offload:
        raise refusal(
            config,
            "training.enable_cpu_offload",
            "is not available with parallelism.expert_parallel_degree above 1: set one of the two back",
        )
    # The tensor axis's ranks route their own parts of a sequence, of which Dobb has no statistics together.
    apart = SHARDED_RULES | ({"dobb"} if parallelism.tensor_parallel_degree == 1 else set())
    if parallelism.expert_parallel_degree > 1 and rule_name(config.optimizer.name) not in apart:
        beside = " beside tensor_parallel_degree" if parallelism.tensor_parallel_degree > 1 else ""
        raise refusal(
            config,
            "optimizer.name",
            f"is not available with parallelism.expert_parallel_degree above 1{beside}: use one of"
            f" {', '.join(sorted(apart))}",
        )
    if parallelism.enable_async_tensor_parallel:
        _check_async_tensor(config, device_type)
    if parallelism.tensor_parallel_degree * parallelism.context_parallel_degree > 1:
        _check_split_sequences(config)
    if parallelism.pipeline_parallel_degree > 1:
        _check_pipeline(config)
    if left * parallelism.tensor_parallel_degree * parallelism.context_parallel_degree > 1:
        _check_storage(config)
    return parallelism.data_parallel_replicate_degree * left


def slow_attention(config: JobConfig, device_type: str) -> list[str]:
    """A warning where the ring has no kernel for what it is asked to mask."""
    parallelism = config.parallelism
    ring = parallelism.context_parallel_degree > 1 and parallelism.context_parallel_method == "ring"
    if not ring or not config.data.document_mask or device_type != "cuda":
        return []
    return [
        'parallelism.context_parallel_method = "ring": forms attention scores with data.document_mask = true,'
        ' which is slow and takes memory; "ulysses" (whose degree divides the heads) does not'
    ]


def _check_async_tensor(config: JobConfig, device_type: str) -> None:
    """The compiler puts collectives beside matrix products, in memory that GPUs read of each other."""
    compiled = config.compile.enable and "model" in config.compile.components
    reason = ""
    if config.parallelism.tensor_parallel_degree == 1:
        reason = "there is nothing to overlap with parallelism.tensor_parallel_degree = 1"
    elif device_type != "cuda" and not config.job.dry_run:
        reason = f"needs CUDA devices, and this run is on {device_type}"
    elif not compiled or config.compile.backend != "inductor":
        reason = (
            "is the compiler's doing (set compile.enable = true, with model among compile.components and"
            ' compile.backend = "inductor")'
        )
    if reason:
        raise refusal(config, "parallelism.enable_async_tensor_parallel", f"{reason}: set it to false")


def _check_split_sequences(config: JobConfig) -> None:
    """What holds where ranks share sequences, along the tensor axis or the context axis."""
    parallelism = config.parallelism
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    pieces = tensor * context * (2 if context > 1 and parallelism.context_parallel_method == "ring" else 1)
    for path in ("training.seq_len", "validation.seq_len"):
        length = schema.get_value(config, path)
        if length is not None and length % pieces:
            raise refusal(
                config,
                path,
                f"must be a multiple of {pieces}, as the ranks of parallelism.tensor_parallel_degree ="
                f" {tensor} and context_parallel_degree = {context} share each sequence: use"
                f" {-(-length // pieces) * pieces}",
            )
    # FSDP takes the context axis along with its own and cuts a matrix once, along Dobb's blocks.
    known = SHARDED_RULES | {"dobb"}
    if tensor > 1 and rule_name(config.optimizer.name) == "dobb":
        _check_dobb_rows(config)
    if rule_name(config.optimizer.name) not in known:
        raise refusal(
            config,
            "optimizer.name",
            "is not available with parallelism.tensor_parallel_degree or context_parallel_degree above 1: use"
            f" one of {', '.join(sorted(known))}",
        )
    if tensor > 1 and config.optimizer.state_dtype == "int8":
        raise refusal(
            config,
            "optimizer.state_dtype",
            "has blocks along the input axis of a weight, which parallelism.tensor_parallel_degree above 1"
            ' splits: use "bfloat16"',
        )
    if config.training.enable_cpu_offload:
        raise refusal(
            config,
            "training.enable_cpu_offload",
            "is not available with parallelism.tensor_parallel_degree or context_parallel_degree above 1: set"
            " it to false",
        )


def _check_storage(config: JobConfig) -> None:
    """What cannot be stored so where ranks hold parts of weights."""
    optimizer = config.optimizer
    axes = "parallelism.data_parallel_shard_degree, tensor_parallel_degree and context_parallel_degree"
    if optimizer.state_dtype == "fp8":
        raise refusal(
            config,
            "optimizer.state_dtype",
            'has one scale per weight, of which ranks hold parts: use "int8" or "bfloat16", or set'
            f" {axes} to 1",
        )
    rule = rule_name(optimizer.name)
    split = {"muon", "scion", "dion"} | ({"dobb"} if optimizer.dobb.side == "A" else set())
    if optimizer.state_dtype == "int8" and rule in split:
        raise refusal(
            config,
            "optimizer.state_dtype",
            f'is not available for the momenta of {rule} where ranks hold parts of them: use "bfloat16", or'
            f" set {axes} to 1",
        )
    if optimizer.master_weights == "stochastic_rounding" and rule in SHARDED_RULES - COORDINATE_RULES:
        raise refusal(
            config,
            "optimizer.master_weights",
            f"is not available where ranks send the updates that {rule} makes of weights they hold parts of:"
            f' use "float32", or set {axes} to 1',
        )


def _check_dobb_rows(config: JobConfig) -> None:
    """The tensor axis shares rows of some matrices: they must need nothing of each other."""
    for key, wanted, why in (
        ("side", "A", "has its blocks along the axis that ranks share in the layer before"),
        ("norm", "linf", "sums over columns of which each rank has a part"),
        ("source", "activation", "sums over rows of which each rank has a part"),
    ):
        path = f"optimizer.dobb.{key}"
        if schema.get_value(config, path) != wanted:
            raise refusal(
                config,
                path,
                f"{why} with parallelism.tensor_parallel_degree above 1: set it to {show(wanted)}, or the"
                " degree to 1",
            )


def _check_pipeline(config: JobConfig) -> None:
    """What does not work with pipeline stages; whether the model can be cut is for its own sizes to tell."""
    schedule = config.parallelism.pipeline_parallel_schedule
    degree = f"parallelism.pipeline_parallel_degree = {config.parallelism.pipeline_parallel_degree}"
    splits_backward = schedule.lower().endswith("zerobubble")
    if config.forge.enable:
        why = (
            f'schedule "{schedule}" runs a custom backward twice'
            if splits_backward
            else "several micro-batches are in flight"
        )
        raise refusal(
            config,
            "forge.enable",
            f"is not available with {degree}: updates happen inside backward, and {why}: set it to false",
        )
    for path, wanted in (
        ("training.enable_cpu_offload", False),
        ("sync.policy", "every_step"),
        ("sync.reduce", "gradients"),
    ):
        if schema.get_value(config, path) != wanted:
            raise refusal(config, path, f"is not available with {degree}: set it to {show(wanted)}")
    if not splits_backward:
        return
    for path, wanted, why in (
        ("compile.enable", False, "compiled blocks form both gradients at once"),
        ("parallelism.fsdp_reshard_after_forward", "never", "weights must still be there"),
    ):
        if schema.get_value(config, path) not in (wanted, schema.all_keys()[path].default):
            raise refusal(
                config,
                path,
                f'schedule "{schedule}" forms gradients of weights apart from those of inputs, and {why}: set'
                f' it to {show(wanted)}, or take parallelism.pipeline_parallel_schedule = "Interleaved1F1B"',
            )
