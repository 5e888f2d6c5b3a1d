"""Weights in Hugging Face's files: read shard by shard into a model, written file by file out of one.

Which of our tensors is which of theirs is told by a ``HuggingFaceForm`` (titanforge.models.huggingface).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanforge.checkpoint.safetensors_format import local_tensor, open_weights, some

INDEX = "model.safetensors.index.json"
# Files of a tokenizer, copied beside exported weights so that the folder can be used as it is.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


class Source(Protocol):
    """Where one of our tensors lives in their files."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def transposed(self) -> bool: ...
    @property
    def stacked(self) -> bool: ...


class Form(Protocol):
    """What is asked of a model's form."""

    @property
    def prefix(self) -> str: ...
    @property
    def ignored(self) -> tuple[str, ...]: ...
    @property
    def tied_head(self) -> str | None: ...
    def sources(self) -> Mapping[str, Any]: ...
    def config(self, dtype: torch.dtype) -> dict[str, Any]: ...
    def check(self, config: Mapping[str, Any]) -> None: ...


class Progress:
    """A bar on a terminal, a line every half minute elsewhere; silent unless ``show``."""

    def __init__(self, what: str, total: int, show: bool, stream: TextIO | None = None) -> None:
        self.what, self.total, self.show = what, total, show
        self.stream = stream or sys.stderr
        self.done = self.bytes = 0
        self._next = 0.0

    def advance(self, size: int) -> None:
        """One more tensor, of ``size`` bytes."""
        self.done, self.bytes = self.done + 1, self.bytes + size
        if not self.show or (time.monotonic() < self._next and self.done < self.total):
            return
        terminal = self.stream.isatty()
        self._next = time.monotonic() + (0.1 if terminal else 30.0)
        filled = 30 * self.done // max(1, self.total)
        bar = f"[{'#' * filled}{'.' * (30 - filled)}] " if terminal else ""
        line = f"{self.what} {bar}{self.done}/{self.total} tensors, {self.bytes / 2**30:.2f} GiB"
        end = "\n" if self.done == self.total or not terminal else ""
        print(("\r" if terminal else "") + line, end=end, file=self.stream, flush=True)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is no folder of a Hugging Face model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object")
    return config


def read_huggingface(
    path: Path,
    tensors: Mapping[str, Tensor],
    form: Form,
    show: bool = False,
    known: Collection[str] = (),
) -> None:
    """Fill ``tensors`` in place from a folder; each rank reads its own shards alone. Not collective.

    Args:
        tensors: the model's state dict. Buffers that no file can hold stay as they are.
        show: print progress.
        known: names of the model that other ranks hold.

    Raises:
        FileNotFoundError, ValueError: as ``open_model``; shapes that differ.
    """
    files = open_model(path, form)
    sources = form.sources()
    progress = Progress("reading", sum(name in tensors for name in sources), show)
    for name, source in sources.items():
        if name not in tensors:
            if name in known:
                continue
            raise ValueError(f"the model has no {name}: its arguments differ from those of its form")
        fill(name, tensors[name], source, files)
        local = local_tensor(tensors[name])
        progress.advance(local.numel() * local.element_size())


def open_model(path: Path, form: Form) -> TensorFiles:
    """A folder's tensors, which are those of the form, neither less nor more; a tied head is read.

    Raises:
        FileNotFoundError: no config.json, or a file that the index names is missing.
        ValueError: another model, names missing or left over, a head that should be tied but is not.
    """
    form.check(read_config(path))
    files = TensorFiles(path, form.prefix)
    wanted = {name for source in form.sources().values() for name in source.names}
    head = "lm_head.weight"
    tied = form.tied_head
    missing = sorted(name for name in wanted if name not in files)
    extra = [name for name in files if name not in wanted and not (tied and name == head)]
    extra = sorted(n for n in extra if not any(re.search(pattern, n) for pattern in form.ignored))
    if missing or extra:
        raise ValueError(
            f"{path} does not fit its config.json. Missing: {some(missing)}. Left over: {some(extra)}."
        )
    if tied and head in files and not torch.equal(files.tensor(tied), files.tensor(head)):
        raise ValueError(f"{path}: config.json ties the head to the embedding, but {head} is another tensor")
    return files


class TensorFiles:
    """The tensors of a folder by name, wherever they are; nothing is read before it is asked for."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._where: dict[str, Any] = {}
        for file in _weight_files(path):
            opened = open_weights(file)
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if name in self._where:
                    raise ValueError(f"{name} is in two files of {path}, {file.name} being one")
                self._where[name] = opened
        # Files of a bare body (no head) leave its prefix out; the published GPT-2 is one.
        self._bare = prefix if not any(name.startswith(prefix) for name in self._where) else ""

    def _name(self, name: str) -> str:
        return name.removeprefix(self._bare) if self._bare else name

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._where

    def __iter__(self) -> Iterator[str]:
        """Names with the prefix, whether the files have it or not."""
        for name in self._where:
            yield name if not self._bare or name.startswith("lm_head") else self._bare + name

    def slice(self, name: str) -> Any:
        name = self._name(name)
        return self._where[name].get_slice(name)

    def tensor(self, name: str) -> Tensor:
        name = self._name(name)
        return self._where[name].get_tensor(name)


def _weight_files(path: Path) -> list[Path]:
    """Files of the index, or all safetensors files where there is no index."""
    index = path / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is no index of weights ({error})") from None
        if strange := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{index} names a file outside its folder: {strange[0]!r}")
        if gone := [name for name in names if not (path / name).is_file()]:
            raise FileNotFoundError(
                f"{index} names {gone[0]}, which is not there: the download is incomplete"
            )
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} has no .safetensors file; weights in other formats are not read")
    return files


def fill(name: str, tensor: Tensor, source: Source, files: TensorFiles) -> None:
    """Fill this rank's part of one of our tensors; raises ValueError if theirs have other shapes."""
    local = local_tensor(tensor)
    shape, offset = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    own = list(tensor.shape[1:] if source.stacked else tensor.shape)
    for their in source.names:
        stored = list(files.slice(their).get_shape())
        if stored != (own[::-1] if source.transposed else own):
            raise ValueError(
                f"{their} has shape {stored} in the file; {name} in the model is {list(tensor.shape)}"
            )
    if source.stacked and len(source.names) != tensor.shape[0]:
        raise ValueError(f"{name} stacks {tensor.shape[0]} tensors; its form names {len(source.names)}")
    if local.numel() == 0:
        return
    ranges = [slice(o, o + n) for o, n in zip(offset, shape)]
    if not source.stacked:
        local.copy_(_part(files.slice(source.names[0]), ranges, source.transposed))
        return
    for place, index in enumerate(range(ranges[0].start, ranges[0].stop)):
        local[place].copy_(_part(files.slice(source.names[index]), ranges[1:], source.transposed))


def _part(stored: Any, ranges: list[slice], transposed: bool) -> Tensor:
    return stored[tuple(ranges[::-1])].t() if transposed else stored[tuple(ranges)]


def to_huggingface(name: str, tensor: Tensor, form: Form) -> dict[str, Tensor]:
    """One of our whole tensors as theirs, by name."""
    source: Source = form.sources()[name]
    parts = tensor.unbind(0) if source.stacked else (tensor,)
    assert len(parts) == len(source.names), name
    return {
        their: (part.t() if source.transposed else part).contiguous()
        for their, part in zip(source.names, parts)
    }


def write_extras(folder: Path, form: Form, dtype: torch.dtype, assets: Path | None) -> None:
    """config.json, and the tokenizer's files from ``assets`` if there are any."""
    config = json.dumps(form.config(dtype), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES if assets is not None else ():
        assert assets is not None
        if (assets / name).is_file():
            shutil.copyfile(assets / name, folder / name)
