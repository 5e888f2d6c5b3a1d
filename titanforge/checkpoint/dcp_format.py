"""How bytes are written and read: torch.distributed.checkpoint (DCP), with a marker and without pickle.

Writing goes through a storage writer whose ``finish`` (run on the coordinator once every rank has
written) adds our files and the marker and renames the folder. It needs no collective beyond DCP's own,
so it works the same from a background thread.

Reading: DCP keeps its table of contents in a pickle, which is read here by an unpickler that knows only
the dozen classes such a table consists of. Tensors are read by DCP with ``weights_only=True``. Pickled
objects ("byte" items), which DCP would load without that guard, are refused.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanforge.checkpoint.layout import (
    CONFIG,
    STATE,
    CheckpointError,
    fingerprint,
    publish,
    read_marker,
    write_marker,
    write_synced,
)

_TABLE = ".metadata"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def explain(error: BaseException) -> str:
    """What went wrong on each rank, in a line; DCP's own message is a page of tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())


# ------------------------------------------------------------------ writing


@dataclass
class _RankWrites:
    """What one rank reports to the coordinator: DCP's results, and its files' fingerprints."""

    results: list[WriteResult]
    files: dict[str, dict[str, Any]]


class MarkedWriter(FileSystemWriter):
    """Writes into ``written``; on success the folder is complete and called ``final``."""

    def __init__(
        self,
        written: Path,
        final: Path,
        *,
        step: int,
        rank: int,
        world_size: int,
        state: Any,
        rank_state: Any,
        config_toml: str,
    ) -> None:
        super().__init__(written, sync_files=True)
        self._written, self._final = written, final
        self._step, self._this_rank, self._world_size = step, rank, world_size
        self._config_toml = config_toml
        # Serialised now: an asynchronous save must hold today's values.
        self._state, self._rank_state = json.dumps(state), json.dumps(rank_state)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self.save_id)  # no path: the folder's name changes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        results = super().write_data(plan, planner).wait()
        own = self._written / rank_file(self._this_rank)
        write_synced(own, self._rank_state)
        names = {result.storage_data.relative_path for result in results} | {own.name}
        done: Future = Future()
        done.set_result(_RankWrites(results, {name: fingerprint(self._written / name) for name in names}))
        return done

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, [report.results for report in results])
        write_synced(self._written / STATE, self._state)
        write_synced(self._written / CONFIG, self._config_toml)
        files = {name: facts for report in results for name, facts in report.files.items()}
        files.update((name, fingerprint(self._written / name)) for name in (_TABLE, STATE, CONFIG))
        write_marker(
            self._written, files, step=self._step, world_size=self._world_size, torch=str(torch.__version__)
        )
        publish(self._written, self._final)


# ------------------------------------------------------------------ reading


@functools.cache
def _allowed_names() -> dict[tuple[str, str], Any]:
    """Everything a DCP table of contents may name, and what it stands for."""
    table = "torch.distributed.checkpoint.metadata"
    names = [
        *((table, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((table, f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
        (table, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    ]
    allowed = {(module, name): getattr(importlib.import_module(module), name) for module, name in names}
    allowed.update((("torch", n), v) for n, v in vars(torch).items() if isinstance(v, torch.dtype))
    return allowed


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _allowed_names()[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"names {module_name}.{global_name}, which no table of contents needs"
            ) from None


def read_table(folder: Path) -> Metadata:
    """DCP's table of contents, without running any code it may hold.

    Raises:
        ValueError: not such a table, or one that points outside the folder; the message is the reason.
    """
    content = (folder / _TABLE).read_bytes()
    try:
        table = _TableUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a garbled pickle can raise nearly anything
        raise ValueError(f"{_TABLE} is not a checkpoint's table of contents ({error})") from None
    if not isinstance(table, Metadata) or not isinstance(table.storage_data, dict):
        raise ValueError(f"{_TABLE} is not a checkpoint's table of contents")
    known = set(read_marker(folder)["files"])
    for place in table.storage_data.values():
        if getattr(place, "relative_path", None) not in known:
            raise ValueError(f"{_TABLE} names a file that the marker does not list")
        if place.transform_descriptors:
            raise ValueError(f"{_TABLE} asks for a stream transformation; titanforge writes none")
    for name, entry in table.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{_TABLE} holds {name!r}, a pickled object; titanforge writes tensors alone")
    return table


class _SafeReader(FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        table = read_table(self._folder)
        table.storage_meta = StorageMeta(load_id=self.load_id)
        return table


class _TensorsOnlyPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is a pickled object; refused")


def read_tensors(folder: Path, tensors: dict[str, Tensor], group: ProcessGroup) -> None:
    """Fill ``tensors`` in place from a checkpoint written by any number of ranks; collective.

    Names and shapes must have been compared with ``read_table`` before. Dtypes are converted.

    Raises:
        CheckpointError: a rank could not read its share, or refused what it found.
    """
    reader, planner = _SafeReader(folder), _TensorsOnlyPlanner()
    try:
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"reading {folder} failed ({explain(error)}).") from error


def read_json(folder: Path, name: str) -> Any:
    """A JSON file of a checkpoint, None if it is not there.

    Raises:
        ValueError: not JSON.
    """
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def shapes(table: Metadata) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every stored tensor by name."""
    entries = table.state_dict_metadata.items()
    return {n: (e.size, e.properties.dtype) for n, e in entries if isinstance(e, TensorStorageMetadata)}
