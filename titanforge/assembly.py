"""A run's parts from its configuration alone, as training, dry runs and scripts need them alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from titanforge.config import JobConfig
from titanforge.forge import Steps
from titanforge.layout import DTYPES, longest_sequence, model_overrides
from titanforge.models.huggingface import HuggingFaceForm, form_of
from titanforge.models.registry import build_model
from titanforge.parallelisms import ParallelDims
from titanforge.parallelisms.mesh import AXES


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
    )


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
