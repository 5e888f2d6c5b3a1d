"""What a run writes, logs and waits for: `[job] [profiling] [metrics] [checkpoint] [comm] [debug]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Job:
    config_file: str | None = None
    """TOML file to read; command-line keys win over it."""
    dump_folder: str = "./outputs"
    """Folder that receives everything a run writes: metrics, checkpoints, traces, plots."""
    description: str = "default job"
    """One line about the run, shown at start-up and in the dashboards."""
    print_config: bool = False
    """Print the merged configuration at start-up."""
    save_config_file: str | None = None
    """Also write the merged configuration to this file, relative to `job.dump_folder`."""
    dry_run: bool = False
    """Validate everything, build the model without memory, print sizes and layout, and exit."""
    stop_timeout_seconds: int = 120
    """Time that a SIGTERM or SIGINT leaves to the step under way, saves not counted; a process that has come
    to no step boundary by then shows where it stands and ends. Steps that take longer need more. Replicas
    that train by themselves (`sync.policy`) stop together within a quarter of it."""


@dataclass
class Profiling:
    enable_profiling: bool = False
    """Write torch.profiler traces (Chrome format)."""
    save_traces_folder: str = "profile_traces"
    """Where traces go, relative to `job.dump_folder`."""
    profile_freq: int = 10
    """Take one trace every this many steps."""
    profiler_active: int = 1
    """Steps that each trace covers."""
    profiler_warmup: int = 3
    """Steps the profiler runs before each trace, not recorded."""
    enable_memory_snapshot: bool = False
    """Record the CUDA allocator's history; dump it every `profile_freq` steps and at out-of-memory."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Where memory snapshots go, relative to `job.dump_folder`."""


@dataclass
class Metrics:
    log_freq: int = 10
    """Log every this many steps (the first and the last step are always logged)."""
    enable_tensorboard: bool = False
    """Also write TensorBoard events."""
    disable_color_printing: bool = False
    """Plain console lines, no colours."""
    save_tb_folder: str = "tb"
    """Where TensorBoard events go, relative to `job.dump_folder`."""
    save_for_all_ranks: bool = False
    """Write TensorBoard, W&B and JSONL for every rank, not for the first alone."""
    enable_plot: bool = True
    """Draw `metrics.png` when the run ends."""
    enable_wandb: bool = False
    """Also log to Weights & Biases: online when logged in, offline otherwise, never a prompt."""
    wandb_project: str = "titanforge"
    """W&B project; the environment variable WANDB_PROJECT wins. Entity, name and ids: WANDB_* too."""


@dataclass
class Checkpoint:
    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in `checkpoint.folder`."""
    folder: str = "checkpoint"
    """Where checkpoints go, relative to `job.dump_folder`."""
    interval: int = 500
    """Save every this many steps (the last step is always saved)."""
    initial_load_path: str | None = None
    """Checkpoint to start from when `checkpoint.folder` holds none."""
    initial_load_model_only: bool = True
    """From `initial_load_path` take the weights alone; false: everything."""
    initial_load_in_hf: bool = False
    """`initial_load_path` (default: model.hf_assets_path) is a Hugging Face model: config.json and
    safetensors. It must be the model that `[model]` describes."""
    last_save_model_only: bool = False
    """Save weights alone at the last step (cannot be resumed). A run that is done exports on restart."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Dtype of the weights in a model-only last save."""
    last_save_in_hf: bool = False
    """Save the weights of the last step as a Hugging Face model; needs `last_save_model_only`."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """`async`: copy to host memory, then write while training goes on; the other pins that memory."""
    keep_latest_k: int = 10
    """Keep this many checkpoints; 0: all. 1 is refused: one must survive a crash during a save."""
    load_step: int = -1
    """Step to resume from; -1: the newest complete one."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """Parts not to load: any of model, optimizer, dataloader, train_state; `lr_scheduler` holds nothing, as
    the rate follows from the step (train_state)."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step."""
    create_seed_checkpoint: bool = False
    """Initialise on one process, save as step 0, and exit."""
    load_only: bool = False
    """Load but never save."""


@dataclass
class Comm:
    init_timeout_seconds: int = 300
    """Collective timeout until the first step of this process is done."""
    train_timeout_seconds: int = 100
    """Collective timeout after that."""
    trace_buf_size: int = 20000
    """Entries of the flight recorder for each backend (NCCL, gloo); 0: off."""
    save_traces_folder: str = "comm_traces"
    """Where flight-recorder dumps go, relative to `job.dump_folder`."""
    save_traces_file_prefix: str = "rank_"
    """File name prefix of those dumps."""


@dataclass
class Debug:
    seed: int | None = None
    """Seed of weights, data order and sampling; default 0."""
    deterministic: bool = False
    """Deterministic algorithms everywhere; slower."""
    deterministic_warn_only: bool = False
    """Warn instead of failing where no deterministic algorithm exists."""
