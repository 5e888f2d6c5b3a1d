"""Weights alone, as safetensors: exports, and the only way foreign weights come in."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanforge.checkpoint.layout import fingerprint

SHARD_BYTES = 5 << 30  # per file: what other tools expect, and bounds the host memory of an export
_ALIASES = "titanforge_aliases"


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory with ``tensor``."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names whose tensor is another name's (tied weights), mapped to that first name.

    Judged by storage on this rank; ask a rank that holds a piece of every tensor (the main one does).
    """
    first: dict[tuple, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        if local.numel() == 0:
            continue
        key = (local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
    return aliases


class Exporter:
    """Gathers a model's weights tensor by tensor and writes them from the main rank.

    Args:
        dtype: what floating-point weights are stored as; the cast comes before the gather.

    One ``model.safetensors`` if all fits in ``SHARD_BYTES``, else numbered files and an index.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def plan(self, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> list[list[str]]:
        """Names of each file, in order; the same on every rank."""
        files: list[list[str]] = [[]]
        size = 0
        for name, tensor in tensors.items():
            if name in aliases:
                continue
            width = self.stored_dtype(tensor).itemsize
            if files[-1] and size + tensor.numel() * width > SHARD_BYTES:
                files.append([])
                size = 0
            files[-1].append(name)
            size += tensor.numel() * width
        return files

    def gather(self, tensor: Tensor) -> Tensor:
        """The whole tensor in host memory; collective over a DTensor's mesh."""
        tensor = tensor.detach().to(self.stored_dtype(tensor))
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.to("cpu", copy=True).contiguous()

    def stored_dtype(self, tensor: Tensor) -> torch.dtype:
        """What a tensor is written as."""
        return self.dtype if tensor.is_floating_point() else tensor.dtype

    def write(
        self, folder: Path, index: int, count: int, tensors: dict[str, Tensor], aliases: Mapping[str, str]
    ) -> dict[str, dict]:
        """Write file ``index`` of ``count``; returns its fingerprint by name."""
        name = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        metadata = {_ALIASES: json.dumps(dict(aliases))} if aliases else {}
        save_file(tensors, folder / name, {"format": "pt", **metadata})
        return {name: fingerprint(folder / name)}


def write_index(folder: Path, files: Mapping[str, list[str]]) -> None:
    """The index that other tools read when there are several files."""
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    text = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files at ``path``: itself, or those in the folder. Empty if there are none."""
    if path.is_file():
        return [path] if path.suffix == ".safetensors" else []
    return sorted(path.glob("*.safetensors"))


def open_weights(file: Path) -> safe_open:
    """The file's tensors, mapped and not read. Raises ValueError naming a file that is not whole."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}): fetch it again") from None


def read_weights(
    path: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str], known: Collection[str] = ()
) -> None:
    """Fill ``tensors`` in place from safetensors; each rank reads its own shards alone. Not collective.

    Args:
        tied: ``find_aliases(tensors)`` of the main rank; a file may leave those names out.
        known: names of the model that other ranks hold.

    Raises:
        ValueError: names or shapes differ, or a name is in two files; the message says which.
    """
    sources: dict[str, Path] = {}
    known_aliases: dict[str, str] = {}
    for file in weight_files(path):
        with open_weights(file) as opened:
            known_aliases.update(json.loads((opened.metadata() or {}).get(_ALIASES, "{}")))
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if name in sources:
                    raise ValueError(f"{name} is in {sources[name].name} and in {file.name} of {path}.")
                sources[name] = file
    aliases = {n: o for n, o in {**tied, **known_aliases}.items() if n not in sources}
    wanted = {name: aliases.get(name, name) for name in tensors}
    missing = sorted(name for name, source in wanted.items() if source not in sources)
    unexpected = sorted(set(sources) - set(wanted.values()) - set(tensors) - set(known))
    if missing or unexpected:
        raise ValueError(
            f"{path} does not fit this model. Missing: {some(missing)}. Not of this model: "
            f"{some(unexpected)}. Names must be titanforge's own (of a Hugging Face model: set "
            "checkpoint.initial_load_in_hf = true); see [model] for the sizes."
        )
    for file in sorted(set(sources.values())):
        with open_weights(file) as opened:
            for name, source in wanted.items():
                if sources[source] == file:
                    _fill(name, tensors[name], opened, source)


def _fill(name: str, tensor: Tensor, opened, source: str) -> None:
    stored = opened.get_slice(source)
    there, here = tuple(stored.get_shape()), tuple(tensor.shape)
    if there != here:
        raise ValueError(f"{name} has shape {there} in the file and {here} in the model.")
    if not isinstance(tensor, DTensor):
        tensor.detach().copy_(opened.get_tensor(source))
        return
    local = local_tensor(tensor)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if local.numel():
        local.copy_(stored[tuple(slice(o, o + n) for o, n in zip(offset, shape))])


def some(names: list[str]) -> str:
    """The first few names, and how many more there are, for a message."""
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
