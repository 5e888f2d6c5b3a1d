"""Steps and what they read: `[training] [data] [validation]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
