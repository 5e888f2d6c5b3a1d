"""A run's parts from its configuration and mesh, as training, dry runs and scripts need them alike."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch

from titanforge.config import JobConfig
from titanforge.config.schema import refusal
from titanforge.data import SourceSpec, Tokenizer, TrainLoader, build_train_loader
from titanforge.forge import Steps
from titanforge.layout import DTYPES, longest_sequence, model_overrides
from titanforge.models.huggingface import HuggingFaceForm, form_of
from titanforge.models.registry import build_model
from titanforge.optim import DataLinks
from titanforge.parallelisms import ParallelDims
from titanforge.parallelisms.mesh import AXES
from titanforge.sync import CommLedger


def batch_of_step(config: JobConfig, data_parallel: int) -> tuple[int, int]:
    """(sequences of an optimizer step over all ranks, micro-batches in which each rank takes its share)."""
    training = config.training
    per_micro_batch = training.local_batch_size * data_parallel
    sequences = per_micro_batch if training.global_batch_size == -1 else training.global_batch_size
    return sequences, sequences // per_micro_batch


def build_meta_model(config: JobConfig, vocab_size: int) -> tuple[Any, Any]:
    """The model without memory, in the dtype that weights are stored in, and its arguments.

    Raises:
        ValueError: unknown family or size, or sizes that do not fit together.
    """
    with torch.device("meta"), _default_dtype(DTYPES[config.training.dtype]):
        return build_model(
            config.model.name,
            config.model.flavor,
            vocab_size=vocab_size,
            seq_len=longest_sequence(config),
            overrides=model_overrides(config),
        )


def huggingface_form(config: JobConfig, args: Any) -> HuggingFaceForm | None:
    """How Hugging Face's tools store this model, if the run reads or writes it so.

    Raises:
        ValueError: they have no such model.
    """
    wanted = config.checkpoint.initial_load_in_hf or config.checkpoint.last_save_in_hf
    return form_of(args) if wanted else None


def check_exchange(config: JobConfig, encodes: Collection[bool]) -> None:
    """Refuse codes that no rank sends anything in. `validate_config` has refused what the keys alone say; how
    large factors are, and which weights are sharded, is known of the model.

    encodes: `SyncPolicy.encodes` of all ranks, whose pipeline stages may have different weights.
    """
    if not any(encodes):
        raise refusal(
            config,
            "sync.exchange_dtype",
            "replicas would average states and weights alone, which go as float32: no momentum is whole "
            'within a replica and larger than its factors. Set it to "float32", or take a smaller '
            "optimizer.dion.rank_fraction, or neither shards nor tensor parallelism, or sync.policy = "
            '"every_step" with sync.reduce = "gradients"',
        )


def probe_forward(model: Any, device: torch.device | str) -> torch.Tensor:
    """The loss of a few tokens (on meta: logits): shows the fused optimizer who reads which weight."""
    tokens = torch.zeros((1, 8), dtype=torch.int64, device=device)
    return model(tokens, None, None, tokens) if tokens.device.type != "meta" else model(tokens, logits_at=0)


def mesh_sizes(dims: ParallelDims) -> dict[str, int]:
    """Ranks along each axis, as the fused optimizer's plan takes them."""
    return {axis: getattr(dims, axis) for axis in (*AXES, "ep")}


def forge_steps(config: JobConfig, micro_batches: int) -> Steps:
    """What the fused optimizer's plan needs to know of the run."""
    training = config.training
    return Steps(
        micro_batches=micro_batches,
        tokens=training.local_batch_size * training.seq_len,
        accumulation=config.forge.accumulation,
        max_norm=training.max_norm,
        undo=training.nonfinite_loss == "skip",
        keep_logits=config.forge.keep_logits,
        merge_projections=config.forge.merge_projections,
    )


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def build_loader(
    config: JobConfig,
    tokenizer: Tokenizer,
    global_batch: int,
    dp_rank: int,
    dp_world: int,
    seed: int,
    device: torch.device,
) -> TrainLoader:
    """This rank's share of the training data, as `[training]` and `[data]` say."""
    training, data, loader = config.training, config.data, config.training.dataloader
    return build_train_loader(
        dataset=training.dataset,
        dataset_path=training.dataset_path,
        text_key=data.text_key,
        subset=data.subset,
        split=data.split,
        sources=[SourceSpec(**vars(source)) for source in data.sources],
        shuffle_window=data.shuffle_window,
        tokenizer=tokenizer,
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
        global_batch_size=global_batch,
        dp_rank=dp_rank,
        dp_world=dp_world,
        seed=seed,
        num_streams=data.num_streams,
        shuffle=data.shuffle,
        repeat=data.repeat,
        document_mask=data.document_mask,
        validation_fraction=data.validation_fraction,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory and device.type == "cuda",
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def data_links(dims: ParallelDims, ledger: CommLedger) -> DataLinks:
    """How the optimizer reaches the ranks that see other data."""
    shards, replicas = dims.get_group("dp_shard_cp"), dims.get_group("dp_replicate")
    what = {"purpose": "second moments"}
    scatter = partial(ledger.reduce_scatter, group=shards, axis="dp_shard", **what)
    reduce = partial(ledger.all_reduce, group=replicas, axis="dp_replicate", **what)
    experts = None
    if dims.ep > 1:
        alike = dims.get_group("dp_shard_mod_ep")
        experts = DataLinks(
            shards=dims.degree("dp_shard_mod_ep"),
            shard=dims.get_mesh("dp_shard_mod_ep").get_local_rank(),
            replicas=dims.dp_replicate,
            reduce_scatter=None if alike is None else partial(scatter, group=alike),
            all_reduce=None if replicas is None else reduce,
        )
    return DataLinks(
        experts=experts,
        shards=dims.degree("dp_shard_cp"),
        shard=dims.get_mesh("dp_shard_cp").get_local_rank(),
        replicas=dims.dp_replicate,
        reduce_scatter=None if shards is None else scatter,
        all_reduce=None if replicas is None else reduce,
        record=partial(ledger.record, "dp_shard" if dims.tp == 1 else "dp_shard x tp"),
    )
