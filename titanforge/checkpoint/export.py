"""A model's weights alone, as safetensors in `export-step-N`; gathered tensor by tensor. Collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titanforge.checkpoint import huggingface, json_state, layout, safetensors_format
from titanforge.checkpoint.layout import CheckpointError
from titanforge.checkpoint.loading import distinct, on_main

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""Values of `checkpoint.export_dtype`."""


def export_weights(
    folder: Path,
    model: dict[str, Any],
    *,
    step: int,
    dtype: torch.dtype,
    config_toml: str,
    group: ProcessGroup,
    form: huggingface.Form | None = None,
    assets: Path | None = None,
) -> None:
    """Write the weights of ``model``, a state, into ``folder``/export-step-N.

    Args:
        dtype: of what is stored.
        form: as Hugging Face's tools store the model; None: by our names.
        assets: the Hugging Face folder whose tokenizer goes along, with ``form``.

    Raises:
        CheckpointError: on every rank, if it could not be written.
    """
    tensors: dict[str, Tensor] = {}
    json_state.split(model, "", tensors)
    tensors = {name.removeprefix("."): tensor for name, tensor in tensors.items()}
    aliases = on_main(group, lambda: safetensors_format.find_aliases(tensors))
    tensors, holders = _with_others(tensors, group)
    if form is not None:
        tensors, aliases = {name: tensors[name] for name in form.sources()}, {}
    final = layout.export_folder(folder, step)
    written = layout.temporary(final)
    on_main(group, lambda: layout.make_empty(written))
    exporter = safetensors_format.Exporter(dtype)
    plan = exporter.plan(tensors, aliases)
    files: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    failure: Exception | None = None
    for index, members in enumerate(plan):
        batch: dict[str, Tensor] = {}
        for name in members:
            # On every rank, also after a failed write.
            whole = _whole_on_main(exporter, tensors[name], holders[name], group)
            if whole is not None:
                batch |= huggingface.to_huggingface(name, whole, form) if form else {name: whole}
        if dist.get_rank(group) == 0 and failure is None:
            try:
                new = exporter.write(written, index, len(plan), batch, aliases)
                files.update(new)
                names.update((file, list(batch)) for file in new)
            except Exception as error:
                failure = error

    def finish() -> None:
        if failure is not None:
            raise CheckpointError(f"exporting step {step} to {written} failed ({failure}).")
        if len(plan) > 1:
            safetensors_format.write_index(written, names)
        if form is not None:
            huggingface.write_extras(written, form, exporter.dtype, assets)
        layout.write_synced(written / layout.CONFIG, config_toml)
        extra = [p for p in written.iterdir() if p.name not in files]
        files.update((path.name, layout.fingerprint(path)) for path in extra)
        layout.write_marker(written, files, step=step, export_dtype=str(exporter.dtype))
        layout.publish(written, final)

    on_main(group, finish)


def _with_others(own: dict[str, Tensor], group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, int]]:
    """All weights by name, on meta if this rank has none of it; and the first rank that holds each."""
    facts = {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in own.items()}
    tensors, holders = {}, {}
    for rank, held in distinct(facts, group).items():
        for name, (shape, dtype) in held.items():
            if name not in holders:
                holders[name] = rank
                there = own.get(name)
                empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                tensors[name] = empty if there is None else there
    return tensors, holders


def _whole_on_main(
    exporter: safetensors_format.Exporter, tensor: Tensor, holder: int, group: ProcessGroup
) -> Tensor | None:
    """A whole weight in host memory on rank 0, None elsewhere; on meta: other ranks hold it."""
    whole = None if tensor.is_meta else exporter.gather(tensor)
    rank = dist.get_rank(group)
    if holder != 0 and rank == holder:
        assert whole is not None
        dist.send(whole, group=group, group_dst=0)
    elif holder != 0 and rank == 0:
        whole = torch.empty(tensor.shape, dtype=exporter.stored_dtype(tensor))
        dist.recv(whole, group=group, group_src=holder)
    return whole if rank == 0 else None
