"""Choosing a checkpoint that is whole, and filling a run's state from it. Collective throughout."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titanforge.checkpoint import dcp_format, huggingface, json_state, safetensors_format
from titanforge.checkpoint.layout import (
    MARKER,
    STATE,
    CheckpointError,
    list_exports,
    list_steps,
    read_marker,
    step_folder,
    why_corrupt,
    why_incomplete,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Parts whose tensors are stored by torch.distributed.checkpoint; every other part is JSON.
TENSOR_PARTS = ("model", "optimizer")
# Parts that differ from rank to rank, each in its rank's own file.
RANK_PARTS = ("rng",)


def on_main(group: ProcessGroup, function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0; every rank returns its result or raises its error."""
    box: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            box[0] = function()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box, group_src=0, group=group)
    if box[1] is not None:
        raise box[1]
    return box[0]


def distinct(value: Any, group: ProcessGroup) -> dict[int, Any]:
    """What ranks hold that is not alike, each once, by the first rank that holds it; plain JSON values.

    Pipeline stages hold different parts of a state. Where all hold the same, no more than digests are sent.
    Collective.
    """
    digest = hashlib.blake2b(json.dumps(value).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    firsts = sorted({found: rank for rank, found in reversed(list(enumerate(digests)))}.values())
    if len(firsts) == 1:
        return {0: value}
    values = {}
    for rank in firsts:
        box = [value]
        dist.broadcast_object_list(box, group_src=rank, group=group)
        values[rank] = box[0]
    return values


def everywhere(facts: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """``facts`` of this rank and of all others; collective."""
    return {name: fact for theirs in distinct(facts, group).values() for name, fact in theirs.items()}


def why_unusable(folder: Path, group: ProcessGroup) -> str | None:
    """The reason why a checkpoint cannot be trusted, or None; the same on every rank.

    Sizes and the table of contents are checked by the main rank; then every file is read once, dealt
    over the ranks, and compared with its checksum.
    """

    def look() -> tuple[str | None, list[str]]:
        reason = why_incomplete(folder)
        if reason is None:
            try:
                dcp_format.read_table(folder)
            except (ValueError, OSError) as error:
                reason = str(error)
        return reason, sorted(read_marker(folder)["files"]) if reason is None else []

    reason, files = on_main(group, look)
    if reason is not None:
        return reason
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    reasons: list[str | None] = [None] * world_size
    dist.all_gather_object(reasons, why_corrupt(folder, files[rank::world_size]), group=group)
    return next((reason for reason in reasons if reason is not None), None)


def newest_usable(
    folder: Path, load_step: int, group: ProcessGroup
) -> tuple[Path | None, list[tuple[str, str]]]:
    """The checkpoint to load from ``folder`` (None: it holds none), and what was skipped with the reason.

    Args:
        load_step: this one alone, whatever else is there; -1: the newest that is whole.

    Raises:
        FileNotFoundError: there is no such step.
        CheckpointError: checkpoints exist, and none may be used.
    """
    steps, exports = on_main(group, lambda: (list_steps(folder), list_exports(folder)))
    if load_step >= 0:
        if load_step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise FileNotFoundError(f"checkpoint.load_step = {load_step}: {folder} holds steps {there}.")
        reason = why_unusable(step_folder(folder, load_step), group)
        if reason is not None:
            raise CheckpointError(
                f"checkpoint.load_step = {load_step}: {step_folder(folder, load_step)} is unusable: "
                f"{reason}. Choose another step, or -1 for the newest good one."
            )
        return step_folder(folder, load_step), []
    skipped = []
    for step in reversed(steps):
        candidate = step_folder(folder, step)
        reason = why_unusable(candidate, group)
        if reason is None:
            return candidate, skipped
        skipped.append((candidate.name, reason))
        if dist.get_rank(group) == 0:
            logger.warning("checkpoint %s skipped: %s", candidate, reason)
    way_out = (
        "Copy a good one back, set another checkpoint.folder, or move this folder away to start anew; "
        "titanforge does not start from scratch on its own where checkpoints were."
    )
    if skipped:
        listed = "; ".join(f"{name}: {reason}" for name, reason in skipped)
        raise CheckpointError(f"no checkpoint in {folder} can be used ({listed}). {way_out}")
    if exports:
        raise CheckpointError(
            f"{folder} holds exported weights (export-step-{exports[-1]}) but no checkpoint to resume from. "
            f"To start from those weights, set checkpoint.initial_load_path to that folder and another "
            f"checkpoint.folder. {way_out}"
        )
    return None, skipped


def kind_of(path: Path) -> str:
    """What `checkpoint.initial_load_path` names: "step", "folder" of steps, or "weights"."""
    if safetensors_format.weight_files(path):
        return "weights"
    if (path / MARKER).exists():
        return "step"
    if list_steps(path):
        return "folder"
    if not path.exists():
        raise FileNotFoundError(f"checkpoint.initial_load_path = {str(path)!r} does not exist.")
    raise ValueError(
        f"checkpoint.initial_load_path = {str(path)!r} is neither a titanforge checkpoint nor safetensors. "
        "Weights of other programs are read from .safetensors alone, because other formats can run code."
    )


def read_checkpoint(
    folder: Path, live: dict[str, Any], parts: Collection[str] | None, rank: int, group: ProcessGroup
) -> dict[str, Any]:
    """Load a usable checkpoint: tensors of ``live`` are filled in place, the rest is returned.

    Args:
        live: the run's current state; its tensors give names, shapes and placements.
        parts: which parts to read; None: all.

    Returns:
        Part name to state, tensors being those of ``live``. A rank that the saving run did not have
        gets no part of its own (``rng``).

    Raises:
        ValueError: the checkpoint is of another model or optimizer; the message names the tensors.
    """
    stored = dcp_format.read_json(folder, STATE)
    mine = dcp_format.read_json(folder, dcp_format.rank_file(rank)) or {}
    wanted = [part for part in (*stored, *mine) if parts is None or part in parts]
    tensors: dict[str, Tensor] = {}
    for part in TENSOR_PARTS:
        if part in wanted:
            json_state.split(live[part], part, tensors)
    table = on_main(group, lambda: dict(dcp_format.shapes(dcp_format.read_table(folder))))
    shapes = everywhere({name: list(tensor.shape) for name, tensor in tensors.items()}, group)
    _compare(folder, shapes, table, [part for part in TENSOR_PARTS if part in wanted])
    _tell_conversions(folder, tensors, table)
    if tensors:
        dcp_format.read_tensors(folder, tensors, group)
    return {
        part: json_state.join(stored[part], tensors)
        if part in TENSOR_PARTS
        else json_state.decode(mine[part] if part in RANK_PARTS else stored[part])
        for part in wanted
    }


def _compare(folder: Path, live: dict[str, list[int]], stored: dict[str, Any], parts: list[str]) -> None:
    """Names and shapes must agree; a checkpoint that does not fit is not skipped but reported."""
    relevant = {name: facts for name, facts in stored.items() if name.split(".", 1)[0] in parts}
    problems = [f"{name} is not in the checkpoint" for name in sorted(set(live) - set(relevant))]
    problems += [f"{name} is not in this run" for name in sorted(set(relevant) - set(live))]
    problems += [
        f"{name} is {tuple(relevant[name][0])} in the checkpoint and {tuple(shape)} in this run"
        for name, shape in live.items()
        if name in relevant and list(relevant[name][0]) != shape
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"{folder} is of another model or optimizer: {'; '.join(problems[:4])}{more}. Compare its "
            "config.toml with this run's [model], [optimizer] and [training], or leave a part out with "
            "checkpoint.exclude_from_loading."
        )


def _tell_conversions(folder: Path, live: dict[str, Tensor], stored: dict[str, Any]) -> None:
    converted = [name for name, tensor in live.items() if stored[name][1] != tensor.dtype]
    if converted:
        first = converted[0]
        logger.warning(
            "%d tensors of %s are converted, such as %s: %s to %s",
            len(converted),
            folder,
            first,
            stored[first][1],
            live[first].dtype,
        )


def read_foreign_weights(path: Path, model: dict[str, Any], group: ProcessGroup) -> None:
    """Fill the model's tensors from a safetensors file or folder; every rank fails if one does."""
    tensors = _named(model)
    tied = on_main(group, lambda: safetensors_format.find_aliases(tensors))
    known = everywhere(dict.fromkeys(tensors), group)
    _together(lambda: safetensors_format.read_weights(path, tensors, tied, known), group)


def read_huggingface_weights(
    path: Path, model: dict[str, Any], form: huggingface.Form, group: ProcessGroup
) -> None:
    """Fill the model's tensors from the folder of a Hugging Face model; every rank fails if one does."""
    show = dist.get_rank(group) == 0
    tensors = _named(model)
    known = everywhere(dict.fromkeys(tensors), group)
    _together(lambda: huggingface.read_huggingface(path, tensors, form, show, known), group)


def _named(model: dict[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    json_state.split(model, "", tensors)
    return {name.removeprefix("."): tensor for name, tensor in tensors.items()}


def _together(read: Callable[[], None], group: ProcessGroup) -> None:
    """Run ``read`` on every rank; all raise what the first failing one found."""
    message: str | None = None
    try:
        read()
    except Exception as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    first = next((message for message in messages if message is not None), None)
    if first is not None:
        raise ValueError(f"checkpoint.initial_load_path: {first}")
