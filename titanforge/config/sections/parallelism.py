"""Ranks: `[parallelism]` within a replica, `[sync]` between replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1
    """Replicas of the model; the sync policy keeps them together."""
    data_parallel_shard_degree: int = -1
    """Ranks that shard weights, gradients and states (FSDP2); -1: what the others leave."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered weights after forward. `default`: always; but never under a pipeline, whose micro-batches
    would gather them each time."""
    tensor_parallel_degree: int = 1
    """Tensor-parallel ranks (1: off)."""
    enable_async_tensor_parallel: bool = False
    """Gathers and scatters of the tensor axis in pieces, each beside the part of a matrix product that needs
    it. For compiled blocks on CUDA devices of one host."""
    pipeline_parallel_degree: int = 1
    """Pipeline-parallel ranks: each holds a run of the blocks, or several (1: off)."""
    pipeline_parallel_schedule: str = "1F1B"
    """`GPipe`, `1F1B`, `Interleaved1F1B`, `InterleavedZeroBubble` or `ZBVZeroBubble`. The last three have two
    stages on a rank or more."""
    pipeline_parallel_microbatch_size: int = 1
    """Sequences of a micro-batch; training.local_batch_size is cut into such."""
    pipeline_parallel_layers_per_stage: int | None = None
    """Blocks of a stage, which decides how many stages a rank has; default: one stage, or two where the
    schedule has several."""
    pipeline_parallel_first_stage_less_layers: int | None = None
    """As how many blocks the embedding counts when blocks are dealt to stages; default: by its weights (with
    pipeline_parallel_layers_per_stage: 1)."""
    pipeline_parallel_last_stage_less_layers: int | None = None
    """As how many blocks the final norm and the head count; default as above."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Modules of each stage by name, in place of all that: `[["tok_embeddings", "layers.0"], ["layers.1",
    "norm", "output"]]`."""
    context_parallel_degree: int = 1
    """Ranks that share one sequence (1: off)."""
    context_parallel_method: Literal["ring", "ulysses"] = "ring"
    """How attention crosses context-parallel ranks."""
    expert_parallel_degree: int = 1
    """Ranks that share the experts of each block (1: off). They are ranks of the other axes: the degree
    divides dp_shard x cp x tp, and is a multiple of the tensor-parallel degree."""


@dataclass
class Sync:
    policy: Literal["every_step", "scheduled", "rmmc"] = "every_step"
    """When replicas talk: at each step, every `interval` steps, or when some layer's momentum changes by more
    than `threshold` (relative maximum momentum change, CurvaDion)."""
    reduce: Literal["gradients", "states"] = "gradients"
    """What `every_step` sums over replicas: `gradients`, or the optimizer's `states` after each replica has
    folded its own gradient into them (Dion below full rank: its factors, far fewer bytes for the same update,
    but not hidden behind backward). The other policies always average states."""
    interval: int = 10
    """H, of `scheduled`: steps from one sync to the next; docs/sync.md shows what 10, 33 and 100 cost."""
    threshold: float = 0.5
    """tau, of `rmmc`: synchronise when the change is above; below 0: always. CurvaDion's is 0.5."""
    local_update: Literal["gradient", "momentum", "orthonormal"] = "orthonormal"
    """Step between syncs of rules that are affine in the gradient (Muon, Dion, Dobb, SGD): along the gradient
    or the momentum, or the rule's own. Other rules (AdamW) always take their own."""
    local_lr: float | None = None
    """Peak learning rate of `local_update`; default: that of the weight's group."""
    warmup_steps: int = 0
    """Synchronise at each of the first steps."""
    max_interval: int = 0
    """Greatest number of consecutive local steps; 0: no bound."""
    average_parameters: bool = True
    """Average weights at each sync; false: states alone (saves and evaluations average weights anyway)."""
    low_rank: bool = True
    """Reduce the momenta of rules that can by their low-rank factors (Dion), of weights that are whole within
    a replica: the same update for fewer bytes. Momenta themselves then stay each replica's own until a save
    or an evaluation averages them."""
    exchange_dtype: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    """How replicas send what is formed anew for each exchange: gradients, and Dion's factors (`low_rank`).
    int8 and int4 have a scale for each 64 values. Sums are in fp32, and so are states and weights, which
    averages overwrite."""
    bucket_mib: float = 32.0
    """Size of one reduction bucket, in MiB."""
