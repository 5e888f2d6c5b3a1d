"""Every configuration key: one dataclass per TOML section, help under each field.

The string literal below a field is that key's documentation: ``--help`` and
``docs/config.md`` are made from it. Names and meanings follow torchtitan's TOML
configuration wherever the same thing exists there. This module imports nothing
of ours, and validates nothing beyond types: ``loader`` checks words and types,
``validation`` checks sections against each other.
"""

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
class Model:
    name: str = "llama3"
    """Model family: `llama3`, `qwen3` or `gpt2`."""
    flavor: str = "debugmodel"
    """Size within the family: see docs/models.md for the list."""
    hf_assets_path: str = ""
    """Folder with the tokenizer's files (and weights, for checkpoint.initial_load_in_hf)."""
    dim: int | None = None
    """Override the flavor's model width."""
    n_layers: int | None = None
    """Override the flavor's number of blocks."""
    n_heads: int | None = None
    """Override the flavor's number of query heads."""
    n_kv_heads: int | None = None
    """Override the flavor's number of key/value heads."""
    hidden_dim: int | None = None
    """Override the flavor's feed-forward width (of one expert, where there are experts)."""
    head_dim: int | None = None
    """Override the width of a head (`qwen3`; elsewhere it is dim / n_heads)."""
    n_positions: int | None = None
    """Override the number of learned positions (`gpt2`)."""
    n_experts: int | None = None
    """Override the number of experts of each block (`qwen3`; 0: dense)."""
    n_experts_per_token: int | None = None
    """Override how many experts a token is sent to (`qwen3`)."""
    moe_balancing: Literal["none", "auxiliary_loss", "bias"] | None = None
    """What keeps experts equally busy: nothing, a term of the loss, or a bias on the choice of experts that
    each step moves; default: the flavor's, `auxiliary_loss`."""
    moe_auxiliary_loss_coefficient: float | None = None
    """Weight of that term relative to the mean loss of a token; default: the flavor's, 0.001."""
    moe_bias_update_rate: float | None = None
    """How far a step moves that bias; default: the flavor's, 0.001."""
    vocab_size: int | None = None
    """Override the vocabulary; default: the flavor's, or for `debugmodel` the tokenizer's."""


@dataclass
class ParamGroup:
    pattern: str = ""
    """Regular expression searched in the parameter's full name; the first group that matches wins."""
    lr: float | None = None
    """Peak learning rate of this group; default `optimizer.lr`."""
    weight_decay: float | None = None
    """Decoupled weight decay of this group; default `optimizer.weight_decay`."""
    beta1: float | None = None
    """First-moment decay of this group; default `optimizer.beta1`."""
    beta2: float | None = None
    """Second-moment decay of this group; default `optimizer.beta2`."""
    eps: float | None = None
    """Epsilon of this group; default `optimizer.eps`."""


@dataclass
class ScalarOptimizer:
    name: str = "AdamW"
    """Rule for the weights that a matrix rule does not take: embeddings, head, norms, biases."""
    lr: float | None = None
    """Peak learning rate; default `optimizer.lr`."""
    beta1: float = 0.9
    """First-moment decay."""
    beta2: float = 0.95
    """Second-moment decay."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""


@dataclass
class MuonOptions:
    steps: int = 5
    """Newton-Schulz iterations (Muon, Scion)."""
    coefficients: list[float] = field(default_factory=lambda: [3.4445, -4.7750, 2.0315])
    """a, b, c of the iteration X <- a X + (b A + c A A) X, A = X X^T (Muon, Scion)."""


@dataclass
class DionOptions:
    rank_fraction: float = 1.0
    """rho: the rank is max(1, floor(rho min(m, n)))."""
    error_feedback: bool = True
    """M keeps what the low rank leaves out (Dion); false: M <- mu M + G (CurvaDion, section 2.1)."""


@dataclass
class DobbOptions:
    side: Literal["A", "G"] = "A"
    """Basis from input activations (A, Dobb) or from output gradients (G, Dobb-G)."""
    norm: Literal["linf", "l2"] = "linf"
    """Coefficients: their sign (linf), or columns of unit norm (l2)."""
    blocks: int = 1
    """B: blocks of the input axis (side A) or the output axis (G); must divide it. B = n: sign momentum."""
    block_width: int = 0
    """Width of a block instead of their number, the same for every weight; 0: `blocks` counts."""
    period: int = 9
    """T: steps from one capture and refresh to the next."""
    decay: float = 0.95
    """beta_C: decay of the second moments, per capture."""
    capture: Literal["first", "all"] = "first"
    """Micro-batches of a refresh step that are captured."""
    source: Literal["activation", "gradient"] = "activation"
    """What second moments are of: what layers read or, with side G, their output gradients; `gradient`: the
    weight's own gradient, G^T G or G G^T, at every step (an ablation of the paper: appendix F.3)."""
    iterations: int = 1
    """k: warm orthogonal iterations a refresh; 0: an exact eigendecomposition every time."""
    qr: Literal["householder", "cholesky"] = "cholesky"
    """How an iteration orthonormalises. The paper's principal runs use householder."""
    shift: float = 1e-6
    """eps: added to the diagonal at the cold start and before Householder QR."""
    relative_shift: float = 1e-2
    """omega: before Cholesky QR the shift is omega times the largest absolute row sum of C."""
    statistics_dtype: Literal["float32", "bfloat16"] = "float32"
    """How second moments are stored between refreshes."""
    basis_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """How bases are stored."""
    overlap_refresh: bool = True
    """Refresh bases during backward, on a stream of its own, once inputs are captured; false: in the
    optimizer call. The same bits either way. Side G and exact eigendecompositions wait for the call."""


@dataclass
class Optimizer:
    name: str = "AdamW"
    """Update rule, any case: see docs/optimizers.md for the list."""
    lr: float = 8e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """First-moment decay (Adam family, Lion)."""
    beta2: float = 0.95
    """Second-moment decay (Adam family, Lion)."""
    eps: float = 1e-8
    """Added to the denominator (Adam family)."""
    weight_decay: float = 0.1
    """Decoupled weight decay; norms, biases and embeddings get none unless a group says so."""
    momentum: float = 0.9
    """Momentum of SGD and of the matrix rules."""
    nesterov: bool = False
    """Nesterov momentum (SGD, Muon, RMNP, Dobb)."""
    update_scale: Literal["shared", "own", "rank_corrected"] = "shared"
    """s, by which a matrix rule multiplies its update. `shared`: tau sqrt(max(m, n)) for all of them; `own`:
    each method's (docs/optimizers.md); `rank_corrected`: Dion's tau sqrt(m n / r)."""
    update_scale_tau: float = 0.2
    """tau of the shared scale: 0.2 matches the size of AdamW's updates, so that its learning rate serves."""
    per_head: bool = False
    """Matrix rules take each head of a query, key or value projection as a matrix of its own."""
    implementation: Literal["native", "fused", "foreach", "for-loop"] = "native"
    """`native`: titanforge's rules. The others: torch.optim's implementations (AdamW, Adam, SGD)."""
    state_dtype: Literal["float32", "bfloat16", "int8", "fp8"] = "float32"
    """How optimizer states are stored (`native`)."""
    master_weights: Literal["none", "float32", "stochastic_rounding"] = "none"
    """How bfloat16 weights keep small updates; only with training.dtype = "bfloat16" (`native`)."""
    param_groups: list[ParamGroup] = field(default_factory=list)
    """Groups by name pattern (`[[optimizer.param_groups]]`); what none matches gets the defaults."""
    scalar: ScalarOptimizer = field(default_factory=ScalarOptimizer)
    """The rule beside a matrix rule."""
    muon: MuonOptions = field(default_factory=MuonOptions)
    """Muon and Scion."""
    dion: DionOptions = field(default_factory=DionOptions)
    """Dion."""
    dobb: DobbOptions = field(default_factory=DobbOptions)
    """Dobb."""


@dataclass
class LRScheduler:
    warmup_steps: int = 200
    """Steps of linear warm-up."""
    total_steps: int | None = None
    """Length of the schedule; default training.steps. Set it to stop early but keep the schedule."""
    decay_ratio: float | None = None
    """Share of the schedule that decays (warm-up, stable, decay); default: all after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = 0.0
    """Floor of the decay, as a share of the peak learning rate."""


@dataclass
class DataLoader:
    num_workers: int = 0
    """Worker processes per rank, at most `data.num_streams`. The order of the data does not depend on it."""
    persistent_workers: bool = False
    """Keep the workers alive between passes."""
    pin_memory: bool = False
    """Copy batches through page-locked memory."""
    prefetch_factor: int | None = None
    """Batches loaded ahead by each worker; default: the loader's own (2)."""


@dataclass
class Training:
    dataset: str = "python_stdlib"
    """`python_stdlib` (the standard library's sources), `text`, `jsonl`, `parquet`, `huggingface`, or a
    Hugging Face dataset by name: `c4`, `c4_validation`, `fineweb`, `fineweb-edu`, `openwebtext`."""
    dataset_path: str | None = None
    """File, folder or glob of the dataset (`text`, `jsonl`, `parquet`); folder or hub id (`huggingface`)."""
    local_batch_size: int = 8
    """Sequences per rank and micro-batch."""
    global_batch_size: int = -1
    """Sequences per optimizer step over all ranks; -1: local_batch_size x data-parallel degree.
    More than that is reached by gradient accumulation."""
    seq_len: int = 2048
    """Tokens per sequence."""
    max_norm: float = 1.0
    """Clip the gradient's global norm to this; 0: no clipping."""
    steps: int = 10000
    """Optimizer steps to train."""
    enable_cpu_offload: bool = False
    """Keep sharded weights, gradients and states in host memory (FSDP)."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """How weights are stored."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """What the forward and backward pass compute in when weights are float32."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """What gradients are reduced in."""
    gc_freq: int = 50
    """Collect Python garbage every this many steps, never in between."""
    nonfinite_loss: Literal["stop", "skip"] = "stop"
    """A step with a non-finite loss never changes the weights. Then: stop with an error, or go on."""
    dataloader: DataLoader = field(default_factory=DataLoader)
    """The loader."""


@dataclass
class DataSource:
    dataset: str = "python_stdlib"
    """As training.dataset."""
    path: str | None = None
    """As training.dataset_path."""
    weight: float = 1.0
    """Share of the tokens, in proportion to the other sources' weights."""
    text_key: str | None = None
    """As data.text_key, which is the default."""
    name: str | None = None
    """What metrics and errors call it; default: the path's last word, or the dataset."""
    subset: str | None = None
    """As data.subset."""
    split: str | None = None
    """As data.split."""


@dataclass
class Data:
    tokenizer: str = "auto"
    """`auto` (from model.hf_assets_path, else byte), `byte`, the path of a tokenizer file or folder, or
    `package:NAME/PATH`: a file inside an installed Python package."""
    text_key: str = "text"
    """Field or column that holds the text (`jsonl`, `parquet`, Hugging Face datasets)."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset with several, e.g. `en` or `sample-10BT`."""
    split: str | None = None
    """Split of a Hugging Face dataset to train on; default: `train`."""
    sources: list[DataSource] = field(default_factory=list)
    """A weighted mix, in place of training.dataset: one `[[data.sources]]` table each."""
    num_streams: int = 64
    """Independent packing streams. Fixed for the life of a run: the order of the data follows from it."""
    shuffle: bool = True
    """Shuffle the documents anew in each epoch (seeded by debug.seed)."""
    shuffle_window: int = 1024
    """Documents of one stream that are shuffled together where data is streamed (Hugging Face datasets)."""
    repeat: bool = True
    """Start over when the data ends; false: stop with an error that says so."""
    document_mask: bool = True
    """Attention stays within a document, and positions restart with each."""
    validation_fraction: float = 0.02
    """Share of the documents held out for validation, chosen by content hash."""


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
    interval: int = 50
    """Of `scheduled`: steps from one sync to the next."""
    threshold: float = 0.5
    """Of `rmmc`: synchronise when the change is above; below 0: always."""
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
    """Reduce the momenta of rules that can by their low-rank factors (Dion): the same update for fewer bytes.
    Momenta themselves then stay each replica's own until a save or an evaluation averages them."""
    bucket_mib: float = 32.0
    """Size of one reduction bucket, in MiB."""


@dataclass
class Forge:
    enable: bool = False
    """Run the optimizer where the weight gradient is made, so that no gradient is stored."""
    kernel: str = "auto"
    """Form of the fused weight-gradient kernel: `portable` runs on any GPU; `pp2` (up to 2048 tokens) and
    `coop` (more) on NVIDIA Hopper with Triton 3.6 or newer; `auto` chooses by shape and tokens. All give the
    same bits. A launch that a form does not take (ragged shapes, experts) runs in the portable one."""
    clip: Literal["exact", "lagged"] = "exact"
    """How `training.max_norm` is honoured by fused weights: `exact` cannot be, `lagged` can."""
    accumulation: Literal["auto", "stash", "buffer"] = "auto"
    """How micro-batches are joined for rules that are not affine in the gradient."""
    keep_logits: bool = False
    """Keep a fused head's logits from forward to backward in place of forming them again: one matrix product
    of the head's four less, for tokens x vocabulary x 2 bytes (bf16) more at the peak (twice, of a head that
    shares its weight with the embedding). Without effect, which the plan then says, where the head's
    micro-batches are stashed or ranks share it."""


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
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """Recompute nothing, some of, or all of each block in backward; `memory_budget`: what the compiler
    chooses, to keep a share of what it would."""
    memory_budget: float = 0.5
    """Mode `memory_budget`: share of a block's activations that is kept, 0 to 1, of what compiling without a
    budget keeps. Just below 1 (0.99) only norms and elementwise products are recomputed, a third of the bytes
    for hardly any time."""
    selective_ac_option: str = "op"
    """`op`: keep matrix products and attention, recompute the rest. A number n: whole blocks, every n-th."""
    preserve_rng_state: bool = True
    """Replay random numbers in recomputation."""


@dataclass
class Compile:
    enable: bool = False
    """torch.compile, block by block."""
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    """What to compile: any of model, loss."""
    backend: str = "inductor"
    """torch.compile backend."""
    cuda_graph: bool = False
    """Capture the whole training step, update included, in one CUDA graph, with or without `compile.enable`.
    The results are the same bits; at few tokens the card no longer waits for the host. One GPU, native
    optimizer."""


@dataclass
class Validation:
    enable: bool = False
    """Evaluate on held-out text."""
    dataset: str | None = None
    """Dataset to evaluate on; default: the held-out part of the training data."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset to evaluate on."""
    split: str | None = None
    """Split of a Hugging Face dataset to evaluate on; default: `train` (of `c4_validation` its own)."""
    dataset_path: str | None = None
    """Its path."""
    local_batch_size: int = 8
    """Sequences per rank and batch."""
    seq_len: int | None = None
    """Tokens per sequence; default training.seq_len."""
    freq: int = 10
    """Evaluate every this many steps, and after the last."""
    steps: int = 10
    """Batches per evaluation and rank; -1: the whole set."""
    sample_prompts: list[str] = field(default_factory=list)
    """Continue these prompts at each evaluation and show the text."""
    sample_tokens: int = 128
    """Tokens per sample."""
    sample_temperature: float = 0.8
    """Sampling temperature; 0: greedy."""


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


@dataclass
class JobConfig:
    """The whole configuration; one field per TOML section."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    parallelism: Parallelism = field(default_factory=Parallelism)
    sync: Sync = field(default_factory=Sync)
    forge: Forge = field(default_factory=Forge)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    validation: Validation = field(default_factory=Validation)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
