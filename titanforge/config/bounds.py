"""The range of each number, checked key by key."""

from __future__ import annotations

from titanforge.config import schema
from titanforge.config.schema import ConfigError, refusal
from titanforge.config.sections import JobConfig

# Lower bound (inclusive) and upper bound (exclusive; None: no upper bound). A key that is unset is skipped.
BOUNDS: dict[str, tuple[float, float | None]] = {
    "profiling.profile_freq": (1, None),
    "profiling.profiler_active": (1, None),
    "profiling.profiler_warmup": (0, None),
    "metrics.log_freq": (1, None),
    "model.dim": (1, None),
    "model.n_layers": (1, None),
    "model.n_heads": (1, None),
    "model.n_kv_heads": (1, None),
    "model.hidden_dim": (1, None),
    "model.vocab_size": (1, None),
    "optimizer.lr": (0, None),
    "optimizer.beta1": (0, 1),
    "optimizer.beta2": (0, 1),
    "optimizer.eps": (0, None),
    "optimizer.weight_decay": (0, None),
    "optimizer.momentum": (0, 1),
    "optimizer.muon.steps": (1, None),
    "optimizer.dion.rank_fraction": (0, None),
    "optimizer.dobb.blocks": (1, None),
    "optimizer.dobb.block_width": (0, None),
    "optimizer.dobb.period": (1, None),
    "optimizer.dobb.decay": (0, 1),
    "optimizer.dobb.iterations": (0, None),
    "optimizer.dobb.shift": (0, None),
    "optimizer.dobb.relative_shift": (0, None),
    "optimizer.scalar.lr": (0, None),
    "optimizer.scalar.beta1": (0, 1),
    "optimizer.scalar.beta2": (0, 1),
    "optimizer.scalar.eps": (0, None),
    "optimizer.scalar.weight_decay": (0, None),
    "lr_scheduler.warmup_steps": (0, None),
    "lr_scheduler.total_steps": (1, None),
    "training.local_batch_size": (1, None),
    "training.seq_len": (1, None),
    "training.max_norm": (0, None),
    "training.steps": (1, None),
    "training.gc_freq": (1, None),
    "training.dataloader.num_workers": (0, None),
    "training.dataloader.prefetch_factor": (1, None),
    "data.num_streams": (1, 2**20),
    "data.shuffle_window": (1, None),
    "data.validation_fraction": (0, 1),
    "parallelism.data_parallel_replicate_degree": (1, None),
    "parallelism.tensor_parallel_degree": (1, None),
    "parallelism.pipeline_parallel_degree": (1, None),
    "parallelism.pipeline_parallel_microbatch_size": (1, None),
    "parallelism.pipeline_parallel_layers_per_stage": (1, None),
    "parallelism.pipeline_parallel_first_stage_less_layers": (0, None),
    "parallelism.pipeline_parallel_last_stage_less_layers": (0, None),
    "parallelism.context_parallel_degree": (1, None),
    "parallelism.expert_parallel_degree": (1, None),
    "activation_checkpoint.memory_budget": (0, None),
    "sync.interval": (1, None),
    "sync.local_lr": (0, None),
    "sync.warmup_steps": (0, None),
    "sync.max_interval": (0, None),
    "checkpoint.interval": (1, None),
    "checkpoint.keep_latest_k": (0, None),
    "checkpoint.load_step": (-1, None),
    "validation.local_batch_size": (1, None),
    "validation.seq_len": (1, None),
    "validation.freq": (1, None),
    "validation.sample_tokens": (1, None),
    "validation.sample_temperature": (0, None),
    "job.stop_timeout_seconds": (1, 10**9),
    "comm.init_timeout_seconds": (1, 10**9),
    "comm.train_timeout_seconds": (1, 10**9),
    "comm.trace_buf_size": (0, None),
    "debug.seed": (0, 2**63),
}


MINUS_ONE_OR_POSITIVE = (
    "validation.steps",
    "training.global_batch_size",
    "parallelism.data_parallel_shard_degree",
)
ABOVE_ZERO = ("optimizer.update_scale_tau", "sync.bucket_mib")  # with a tau of 0 no matrix would move
SHARES = ("optimizer.dion.rank_fraction", "lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor")


def check_bounds(config: JobConfig) -> None:
    """Raise ConfigError at the first number that is out of its range."""
    for path in schema.all_keys():
        value = schema.get_value(config, path)
        if (path not in BOUNDS or BOUNDS[path][1] is None) and isinstance(value, int) and abs(value) >= 2**63:
            raise refusal(config, path, "is more than 64 bits hold")
    for path, (low, high) in BOUNDS.items():
        value = schema.get_value(config, path)
        if value is None or (value >= low and (high is None or value < high)):
            continue
        upper = "" if high is None else f" and less than {high}"
        raise refusal(config, path, f"must be at least {low}{upper}")
    for path in MINUS_ONE_OR_POSITIVE:
        value = schema.get_value(config, path)
        if value != -1 and value < 1:
            raise refusal(config, path, "must be -1 or at least 1 (--help tells what -1 means)")
    for path in SHARES:
        value = schema.get_value(config, path)
        if value is not None and not 0 <= value <= 1:
            raise refusal(config, path, "must lie between 0 and 1")
    for path in ABOVE_ZERO:
        if not schema.get_value(config, path) > 0:
            raise refusal(config, path, "must be greater than 0")
    for i, group in enumerate(config.optimizer.param_groups):
        for name, value in vars(group).items():
            low, high = BOUNDS.get(f"optimizer.{name}", (0, None))
            if isinstance(value, float) and not (value >= low and (high is None or value < high)):
                upper = "" if high is None else f" and less than {high}"
                raise ConfigError(
                    f"optimizer.param_groups[{i}].{name} = {value}: must be at least {low}{upper}"
                )
