"""Keys of torchtitan's last TOML release that titanforge lacks, and what to use instead.

Job files of theirs should load here. A key that is switched off, or that only
tunes something switched off, is ignored with a warning; a key that is switched
on is refused, because ignoring it would train something else than was asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ForeignKey:
    """What to use instead of a key, and the values that mean "off" (None: it only tunes something off)."""

    instead: str
    off: tuple[Any, ...] | None = None


_QUANTIZE = (
    "training in float8 or MX formats is not available; training.mixed_precision_param sets the compute dtype"
)
_SCHEDULE = "schedules are taken by name, parallelism.pipeline_parallel_schedule"
_EXPERT_TENSOR = "experts are shared whole, by parallelism.expert_parallel_degree ranks; leave this at 1"
_EXPERT_BACKEND = "tokens travel by all-to-alls of torch.distributed; leave this out"
_FAULT_TOLERANCE = (
    "nothing restarts replicas one by one; use checkpoint.interval and `torchrun --max-restarts`"
)
_HUGGING_FACE = (
    "quantized weights are not read; checkpoint.initial_load_in_hf reads float32, bfloat16 and float16"
)
_BUDGET = "no curve of time over memory is drawn: try values of activation_checkpoint.memory_budget"
_VALIDATION_LOADER = "validation reads its batches without workers"

_SAC_SHAPES = 'activation_checkpoint.selective_ac_option = "op" keeps every matrix product'

FOREIGN_KEYS: dict[str, ForeignKey] = {
    "job.custom_config_module": ForeignKey(
        "keys cannot be added from outside; edit titanforge/config/sections/", ("",)
    ),
    "model.tokenizer_path": ForeignKey(
        "use data.tokenizer (a tokenizer file) or model.hf_assets_path", (None, "none", "")
    ),
    "model.converters": ForeignKey(_QUANTIZE, ([],)),
    "model.print_after_conversion": ForeignKey("use job.dry_run, which prints the model's sizes", (False,)),
    "optimizer.early_step_in_backward": ForeignKey(
        "use forge.enable, which updates weights inside backward", (False,)
    ),
    "training.gc_debug": ForeignKey("use training.gc_freq and profiling.enable_memory_snapshot", (False,)),
    "parallelism.disable_loss_parallel": ForeignKey(
        "with parallelism.tensor_parallel_degree above 1 head and loss are always split over the vocabulary",
        (False,),
    ),
    "parallelism.pipeline_parallel_schedule_csv": ForeignKey(_SCHEDULE, (None, "none", "")),
    "parallelism.pipeline_parallel_expert_parallel_overlap": ForeignKey(_SCHEDULE),
    "parallelism.context_parallel_load_balancer": ForeignKey(
        'parallelism.context_parallel_method = "ring" always deals chunks from both ends of a sequence'
    ),
    "parallelism.context_parallel_rotate_method": ForeignKey(
        "parallelism.context_parallel_method chooses how attention crosses ranks"
    ),
    "parallelism.expert_tensor_parallel_degree": ForeignKey(_EXPERT_TENSOR, (1,)),
    "parallelism.expert_parallel_comm_backend": ForeignKey(_EXPERT_BACKEND, ("standard",)),
    "checkpoint.enable_ft_dataloader_checkpoints": ForeignKey(_FAULT_TOLERANCE),
    "checkpoint.initial_load_in_hf_quantized": ForeignKey(_HUGGING_FACE, (False,)),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ForeignKey(
        _SAC_SHAPES, ([], ["moe.router.gate"])
    ),
    "activation_checkpoint.early_stop": ForeignKey(
        "recomputation always runs as torch does by default", (False,)
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": ForeignKey(_BUDGET, (False,)),
    "activation_checkpoint.determinism_check": ForeignKey("use debug.deterministic", ("default", "none")),
    "activation_checkpoint.debug": ForeignKey("use debug.deterministic", (False,)),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": ForeignKey(_QUANTIZE, (False,)),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": ForeignKey(_QUANTIZE, (False,)),
    "quantize.linear.float8.recipe_name": ForeignKey(_QUANTIZE),
    "quantize.linear.float8.filter_fqns": ForeignKey(_QUANTIZE),
    "quantize.linear.float8.emulate": ForeignKey(_QUANTIZE, (False,)),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": ForeignKey(_QUANTIZE),
    "quantize.linear.mx.recipe_name": ForeignKey(_QUANTIZE),
    "quantize.linear.mx.filter_fqns": ForeignKey(_QUANTIZE),
    "quantize.grouped_mm.float8.fqns": ForeignKey(_QUANTIZE),
    "quantize.grouped_mm.mx.recipe_name": ForeignKey(_QUANTIZE),
    "quantize.grouped_mm.mx.fqns": ForeignKey(_QUANTIZE),
    "comm.mode": ForeignKey("use job.dry_run to check a configuration without ranks", ("default",)),
    "memory_estimation.enable": ForeignKey("use job.dry_run, which estimates memory", (False,)),
    "memory_estimation.disable_fake_mode": ForeignKey("use job.dry_run, which estimates memory"),
    "fault_tolerance.enable": ForeignKey(_FAULT_TOLERANCE, (False,)),
    "fault_tolerance.process_group": ForeignKey(_FAULT_TOLERANCE),
    "fault_tolerance.process_group_timeout_ms": ForeignKey(_FAULT_TOLERANCE),
    "fault_tolerance.replica_id": ForeignKey(_FAULT_TOLERANCE),
    "fault_tolerance.group_size": ForeignKey(_FAULT_TOLERANCE),
    "fault_tolerance.min_replica_size": ForeignKey(_FAULT_TOLERANCE),
    "fault_tolerance.semi_sync_method": ForeignKey(
        "use sync.policy, which needs no service", (None, "none", "")
    ),
    "experimental.custom_import": ForeignKey("nothing is imported by name from a job file", ("",)),
    "experimental.custom_args_module": ForeignKey("edit titanforge/config/sections/", ("",)),
    "validation.dataloader.num_workers": ForeignKey(_VALIDATION_LOADER),
    "validation.dataloader.persistent_workers": ForeignKey(_VALIDATION_LOADER),
    "validation.dataloader.pin_memory": ForeignKey(_VALIDATION_LOADER),
    "validation.dataloader.prefetch_factor": ForeignKey(_VALIDATION_LOADER),
    "debug.moe_force_load_balance": ForeignKey(
        "model.moe_balancing says how the router is balanced", (False,)
    ),
}
"""Dotted key → what to use instead."""


def is_foreign_section(path: str) -> bool:
    """Whether keys of torchtitan's that we lack live below this dotted name."""
    return any(key.startswith(f"{path}.") for key in FOREIGN_KEYS)
