"""Loaders from plain settings, each checked under the name of its configuration key."""

from __future__ import annotations

from collections.abc import Sequence

from titanforge.data.loader import Plan, TrainLoader
from titanforge.data.mix import SourceSpec, TrainingMix, open_mix, validation_lanes
from titanforge.data.sources import ShardedSource, Source, open_source
from titanforge.data.split import Walk
from titanforge.data.tokenizers import Tokenizer
from titanforge.data.validation import ValidationLoader


def build_train_loader(
    *,
    dataset: str,
    dataset_path: str | None,
    text_key: str,
    subset: str | None = None,
    split: str | None = None,
    sources: Sequence[SourceSpec] = (),
    shuffle_window: int = 1024,
    tokenizer: Tokenizer,
    seq_len: int,
    local_batch_size: int,
    global_batch_size: int,
    dp_rank: int,
    dp_world: int,
    seed: int,
    num_streams: int,
    shuffle: bool,
    repeat: bool,
    document_mask: bool,
    validation_fraction: float,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
) -> TrainLoader:
    """This rank's training loader. The arguments are the keys of [training], [data] and
    [training.dataloader].

    `sources`, if there are any, take the place of `dataset`, `dataset_path`, `subset` and `split`.
    `global_batch_size` may be −1: one micro-batch a step. No process or file stays open before the first
    batch.

    Raises:
        ValueError: a setting out of range, or no text to train on.
        FileNotFoundError: nothing at dataset_path.
        DataError: a broken file or record met while indexing.
    """
    _at_least_one("training.seq_len", seq_len)
    _at_least_one("training.local_batch_size", local_batch_size)
    _at_least_one("data.num_streams", num_streams)
    _at_least_one("data.shuffle_window", shuffle_window)
    _check_rank(dp_rank, dp_world)
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"data.validation_fraction = {validation_fraction}: must be at least 0 and below 1")
    if num_workers < 0:
        raise ValueError(f"training.dataloader.num_workers = {num_workers}: must not be negative")
    if prefetch_factor is not None and prefetch_factor < 1:
        raise ValueError(f"training.dataloader.prefetch_factor = {prefetch_factor}: must be at least 1")
    together = local_batch_size * dp_world
    if global_batch_size == -1:
        global_batch_size = together
    if global_batch_size < 1 or global_batch_size % together:
        raise ValueError(
            f"training.global_batch_size = {global_batch_size}: must be a multiple of "
            f"training.local_batch_size x data-parallel degree = {local_batch_size} x {dp_world} = {together}"
        )
    specs, opened = _open(dataset, dataset_path, text_key, subset, split, sources)
    plan = Plan(
        mix=TrainingMix.of(opened, specs, validation_fraction, num_streams),
        walk=Walk(seed, num_streams, shuffle, repeat, shuffle_window),
        tokenizer=tokenizer,
        seq_len=seq_len,
        local_batch_size=local_batch_size,
        global_batch_size=global_batch_size,
        dp_rank=dp_rank,
        dp_world=dp_world,
    )
    return TrainLoader(plan, document_mask, num_workers, pin_memory, prefetch_factor, persistent_workers)


def build_validation_loader(
    *,
    dataset: str,
    dataset_path: str | None,
    text_key: str,
    subset: str | None = None,
    split: str | None = None,
    sources: Sequence[SourceSpec] = (),
    tokenizer: Tokenizer,
    seq_len: int,
    local_batch_size: int,
    dp_rank: int,
    dp_world: int,
    document_mask: bool,
    validation_fraction: float,
    held_out_only: bool = True,
    steps: int = -1,
) -> ValidationLoader:
    """This rank's validation loader, its text read and packed.

    Args:
        sources: as in `build_train_loader`; the held-out text is then mixed by their weights, until one after
            the other ends.
        held_out_only: take the documents that `build_train_loader` leaves out at this
            `validation_fraction`; false: take all (a dataset of its own).
        steps: batches per rank at most; −1: the whole set.

    Raises ValueError, FileNotFoundError and DataError as `build_train_loader` does, and ValueError if there
    is no text to validate on.
    """
    _at_least_one("validation.seq_len", seq_len)
    _at_least_one("validation.local_batch_size", local_batch_size)
    _check_rank(dp_rank, dp_world)
    if steps != -1 and steps < 1:
        raise ValueError(f"validation.steps = {steps}: must be at least 1, or -1 for the whole set")
    if held_out_only and not 0 < validation_fraction < 1:
        raise ValueError(
            f"data.validation_fraction = {validation_fraction}: nothing is held out to validate on. "
            "Raise it, or set validation.dataset."
        )
    specs, opened = _open(dataset, dataset_path, text_key, subset, split, sources)
    for source in opened:
        if steps == -1 and isinstance(source, ShardedSource) and not source.bounded:
            raise ValueError(
                f"validation.steps = -1: {source.name} would be read to its end, from the hub. "
                "Set a number of batches."
            )
    return ValidationLoader(
        validation_lanes(opened, validation_fraction if held_out_only else 1.0),
        [spec.weight for spec in specs],
        tokenizer,
        seq_len,
        local_batch_size,
        dp_rank,
        dp_world,
        steps,
        document_mask,
        name=", ".join(source.name for source in opened),
    )


def _open(
    dataset: str,
    dataset_path: str | None,
    text_key: str,
    subset: str | None,
    split: str | None,
    sources: Sequence[SourceSpec],
) -> tuple[Sequence[SourceSpec], list[Source | ShardedSource]]:
    if sources:
        return sources, open_mix(sources, text_key)
    return [SourceSpec(dataset, dataset_path)], [open_source(dataset, dataset_path, text_key, subset, split)]


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{key} = {value}: must be at least 1")


def _check_rank(dp_rank: int, dp_world: int) -> None:
    if not 0 <= dp_rank < dp_world:
        raise ValueError(
            f"data-parallel rank {dp_rank} of {dp_world}: must be at least 0 and below the degree"
        )
