"""Parquet: one document a row, the text in one column. Only footers are read ahead; row groups on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from titanforge.data.errors import DataError
from titanforge.data.sources.base import Opened, Source, fingerprint, relative_names
from titanforge.data.sources.files import find_files

SUFFIXES = (".parquet", ".pq")
_OPEN_FILES = 16
_MEMORY = 512 << 20
"""Bytes of decoded text that one process keeps."""


class ParquetSource(Source):
    """Document = row. A row group is decoded whole, so `blocks` asks for an order that stays in a few."""

    def __init__(self, name: str, paths: list[Path], text_key: str) -> None:
        self.name, self.text_key = name, text_key
        self._paths = [str(path) for path in paths]
        rows, group_file, group_index, group_bytes, entries = [], [], [], [], []
        for file, (path, short) in enumerate(zip(paths, relative_names(paths))):
            metadata, column = _open_checked(str(path), text_key)
            for group in range(metadata.num_row_groups):
                rows.append(metadata.row_group(group).num_rows)
                group_file.append(file)
                group_index.append(group)
                group_bytes.append(metadata.row_group(group).column(column).total_uncompressed_size)
            entries.append((short, path.stat().st_size, metadata.num_rows))
        self._first = np.cumsum([0, *rows])
        self._group_file = np.array(group_file, np.int64)
        self._group_index = np.array(group_index, np.int64)
        # Streams drift apart by less than a window, so two windows must fit in memory.
        average = max(1, sum(group_bytes) // max(1, len(group_bytes)))
        self._window = int(min(64, max(1, _MEMORY // (4 * average))))
        self.fingerprint = fingerprint(entries)
        self.__setstate__({})

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key not in ("_files", "_groups")}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._files = Opened[Any](self._open, limit=_OPEN_FILES)
        self._groups = Opened[Any](self._decode, limit=_MEMORY, weigh=lambda column: column.nbytes)

    def _open(self, file: int) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self._paths[file])

    def _decode(self, group: int) -> Any:
        file = self._files.get(int(self._group_file[group]))
        table = file.read_row_group(int(self._group_index[group]), columns=[self.text_key])
        return table.column(0)

    def __len__(self) -> int:
        return int(self._first[-1])

    def blocks(self) -> tuple[np.ndarray, int]:
        return self._first, self._window

    def _locate(self, document: int) -> tuple[int, int]:
        group = int(np.searchsorted(self._first, document, side="right")) - 1
        return group, document - int(self._first[group])

    def where(self, document: int) -> str:
        group, row = self._locate(document)
        path = self._paths[int(self._group_file[group])]
        return f"{path}, row group {int(self._group_index[group])}, row {row}"

    def read(self, document: int) -> str:
        import pyarrow

        group, row = self._locate(document)
        try:
            text = self._groups.get(group)[row].as_py()
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{self.where(document)}: {error}") from error
        if not isinstance(text, str):
            raise DataError(
                f"{self.where(document)}: column {self.text_key!r} (data.text_key) holds no string: "
                f"{text!r:.60}"
            )
        return text


def _open_checked(path: str, text_key: str) -> tuple[Any, int]:
    """The file's metadata and the number of its text column."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
    if text_key not in schema.names:
        raise DataError(
            f"{path}: no column {text_key!r} (data.text_key); its columns: {', '.join(schema.names)}"
        )
    kind = schema.field(text_key).type
    value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not (pyarrow.types.is_string(value) or pyarrow.types.is_large_string(value)):
        raise DataError(f"{path}: column {text_key!r} (data.text_key) is of type {kind}, not string")
    # Nested columns before it take several places each.
    names = [metadata.schema.column(i).path.split(".")[0] for i in range(metadata.num_columns)]
    return metadata, names.index(text_key)


def open_parquet(path: str | None, text_key: str) -> ParquetSource:
    return ParquetSource(f"parquet ({path})", find_files("parquet", path, SUFFIXES), text_key)
