"""Meshes, and what each mesh axis does to a model.

Imports torch alone: these functions take modules, meshes and plain values, and know neither the
configuration, nor update rules, nor any model family. A model needs only the attribute names
``tok_embeddings``, ``layers``, ``norm`` and ``output`` (absent ones are skipped).
"""

from titanforge.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanforge.parallelisms.async_tensor_parallel import enable_async_tensor_parallel
from titanforge.parallelisms.clip import clip_factor, clip_grad_norm_, global_grad_norm
from titanforge.parallelisms.compile import apply_compile
from titanforge.parallelisms.context_parallel import (
    apply_context_parallel,
    check_context_parallel,
    sequence_pieces,
)
from titanforge.parallelisms.data_parallel import (
    apply_fsdp,
    apply_mixed_precision,
    expert_modules,
    expert_shard_dim,
    reshard,
    set_is_last_micro_batch,
)
from titanforge.parallelisms.determinism import set_determinism
from titanforge.parallelisms.distributed import PeerFailure, Runtime, init_distributed
from titanforge.parallelisms.expert_parallel import (
    apply_expert_parallel,
    check_expert_parallel,
    share_routing,
)
from titanforge.parallelisms.mesh import ParallelDims
from titanforge.parallelisms.pipeline_parallel import Pipeline, split_model
from titanforge.parallelisms.pipeline_stages import PipelinePlan, check_pipeline_parallel, plan_pipeline
from titanforge.parallelisms.sequence import pad_sequences
from titanforge.parallelisms.tensor_parallel import (
    apply_tensor_parallel,
    check_tensor_parallel,
    complete_gradients,
    tensor_rank_weights,
    tensor_split_dim,
)

__all__ = [
    "ParallelDims",
    "PeerFailure",
    "Pipeline",
    "PipelinePlan",
    "Runtime",
    "apply_activation_checkpoint",
    "apply_compile",
    "apply_context_parallel",
    "apply_expert_parallel",
    "apply_fsdp",
    "apply_mixed_precision",
    "apply_tensor_parallel",
    "check_context_parallel",
    "check_expert_parallel",
    "check_pipeline_parallel",
    "check_tensor_parallel",
    "clip_factor",
    "clip_grad_norm_",
    "complete_gradients",
    "enable_async_tensor_parallel",
    "expert_modules",
    "expert_shard_dim",
    "global_grad_norm",
    "init_distributed",
    "pad_sequences",
    "plan_pipeline",
    "reshard",
    "sequence_pieces",
    "set_determinism",
    "set_is_last_micro_batch",
    "share_routing",
    "split_model",
    "tensor_rank_weights",
    "tensor_split_dim",
]
