"""JSON Lines: one object a line, the text in one field. Indexed by byte offsets; nothing is parsed ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import numpy as np

from titanforge.data.errors import DataError
from titanforge.data.sources.base import Opened, Source, fingerprint, relative_names
from titanforge.data.sources.files import find_files

SUFFIXES = (".jsonl", ".ndjson", ".json")
_OPEN_FILES = 64
_SCAN_BYTES = 1 << 24


class JsonlSource(Source):
    """Document = line. The index takes 8 bytes a line."""

    def __init__(self, name: str, paths: list[Path], text_key: str) -> None:
        self.name, self.text_key = name, text_key
        self._paths = [str(path) for path in paths]
        offsets = [_line_offsets(path) for path in paths]
        lines = [len(o) - 1 for o in offsets]
        # First line of each file in the joint numbering, and where its lines + 1 offsets begin.
        self._first = np.cumsum([0, *lines])
        self._offsets = np.concatenate(offsets)
        sizes = [int(o[-1]) for o in offsets]
        self.fingerprint = fingerprint(list(zip(relative_names(paths), sizes, lines)))
        self._files = Opened[BinaryIO](self._open, limit=_OPEN_FILES)

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "_files"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._files = Opened[BinaryIO](self._open, limit=_OPEN_FILES)

    def _open(self, file: int) -> BinaryIO:
        return open(self._paths[file], "rb")

    def __len__(self) -> int:
        return int(self._first[-1])

    def _locate(self, document: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first, document, side="right")) - 1
        return file, document - int(self._first[file])

    def where(self, document: int) -> str:
        file, line = self._locate(document)
        return f"{self._paths[file]}, line {line + 1}"

    def read(self, document: int) -> str:
        file, line = self._locate(document)
        entry = document + file  # every earlier file has one offset more than lines
        start, end = int(self._offsets[entry]), int(self._offsets[entry + 1])
        try:
            handle = self._files.get(file)
            handle.seek(start)
            content = handle.read(end - start)
            if len(content) != end - start:
                raise DataError(f"{self.where(document)}: the file has been shortened since it was indexed")
            if line == 0:
                content = content.removeprefix(b"\xef\xbb\xbf")
            if not content.strip():
                return ""
            record = json.loads(content.decode("utf-8"))
        except OSError as error:
            raise DataError(f"{self.where(document)}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.where(document)}: not a JSON object: {error}") from error
        text = record.get(self.text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(f"{self.where(document)}: {self._complaint(record)}")
        return text

    def _complaint(self, record: object) -> str:
        if not isinstance(record, dict):
            return f"a JSON object is expected, this is {type(record).__name__}"
        if self.text_key not in record:
            fields = ", ".join(map(repr, sorted(record))) or "none"
            return f"no field {self.text_key!r} (data.text_key); its fields: {fields}"
        return f"field {self.text_key!r} (data.text_key) holds no string: {record[self.text_key]!r:.60}"


def _line_offsets(path: Path) -> np.ndarray:
    """Byte offsets of the lines' starts and of the file's end: int64 [lines + 1]."""
    newlines, size = [], 0
    with open(path, "rb") as file:
        while chunk := file.read(_SCAN_BYTES):
            newlines.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (size + 1))
            size += len(chunk)
    starts = np.concatenate([np.zeros(1, np.int64), *newlines]).astype(np.int64)
    return starts if starts[-1] == size else np.append(starts, size)


def open_jsonl(path: str | None, text_key: str) -> JsonlSource:
    files = find_files("jsonl", path, SUFFIXES)
    for file in files:
        with open(file, "rb") as opened:
            packed = opened.read(4) in (b"\x28\xb5\x2f\xfd",) or file.suffix in (".gz", ".zst", ".bz2", ".xz")
        if packed:
            raise ValueError(
                f"training.dataset_path: {file} is compressed and allows no random access. "
                "Decompress it, or convert it to Parquet (training.dataset = 'parquet')."
            )
    return JsonlSource(f"jsonl ({path})", files, text_key)
