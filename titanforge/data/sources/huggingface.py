"""Anything that Hugging Face's `datasets` reads, streamed: hub datasets by name, and local folders.

A shard is what `datasets` makes of one data file. Shards are read from front to back as the run needs them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from titanforge.data.errors import DataError
from titanforge.data.sources.base import ShardedSource

_ROWS = 64
_SAVED_SHARDS = 64
"""Shards of a folder that `save_to_disk` wrote: it can be read anywhere, so their number is ours."""


class Hub(NamedTuple):
    """Where a dataset known by a short name lies on the hub."""

    id: str
    subset: str | None
    split: str


HUB = {
    "c4": Hub("allenai/c4", "en", "train"),
    "c4_validation": Hub("allenai/c4", "en", "validation"),
    "fineweb": Hub("HuggingFaceFW/fineweb", None, "train"),
    "fineweb-edu": Hub("HuggingFaceFW/fineweb-edu", None, "train"),
    "openwebtext": Hub("Skylion007/openwebtext", None, "train"),
}
"""Short names that `training.dataset` takes; c4 and c4_validation mean what they mean in torchtitan."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


class HuggingFaceSource(ShardedSource):
    """One split of a dataset.

    Args:
        path: a local folder, or a hub id, with `@revision` if wanted.
        subset: the configuration's name, for datasets with several.

    Raises:
        FileNotFoundError: no such folder, dataset, or split.
        ValueError: a subset is missing or unknown.
        DataError: the hub cannot be reached, or what is there cannot be read.
    """

    def __init__(self, dataset: str, path: str, text_key: str, subset: str | None, split: str) -> None:
        self.bounded = os.path.isdir(os.path.expanduser(path))
        self._path = os.path.expanduser(path) if self.bounded else path
        self._subset, self._split, self._text_key = subset, split, text_key
        known_as = dataset if dataset == path else f"{dataset} ({path})"
        self.name = f"{known_as}, {f'{subset}, ' if subset else ''}{split}"
        self._opened: Any = None
        self._files: list[str] = []
        opened = self._open()
        if opened.column_names is not None and text_key not in opened.column_names:
            raise DataError(
                f"{self.name}: no column {text_key!r} (data.text_key); "
                f"its columns: {', '.join(opened.column_names)}"
            )
        self.num_shards = opened.num_shards
        self.fingerprint = self._fingerprint()

    def _open(self) -> Any:
        """The dataset as `datasets` streams it. Workers get it by pickle, so that the hub is asked once."""
        if self._opened is None:
            import datasets

            datasets.disable_progress_bars()
            try:
                if os.path.isfile(os.path.join(self._path, "dataset_dict.json")) or os.path.isfile(
                    os.path.join(self._path, "state.json")
                ):
                    self._opened = self._open_saved(datasets)
                else:
                    self._opened = self._open_files(datasets)
            except (ValueError, FileNotFoundError, DataError):
                raise
            except Exception as error:
                raise DataError(f"{self.name}: cannot be opened: {error}") from error
        return self._opened

    def _open_saved(self, datasets: Any) -> Any:
        saved = datasets.load_from_disk(self._path)
        if isinstance(saved, datasets.DatasetDict):
            if self._split not in saved:
                raise self._no_split(saved)
            saved = saved[self._split]
        elif self._split != str(saved.split or "train"):
            raise self._no_split([saved.split or "train"])
        self._files = [f"{self._path}, part {i}" for i in range(min(_SAVED_SHARDS, len(saved)))]
        self._saved_rows = len(saved)
        return saved.to_iterable_dataset(num_shards=len(self._files))

    def _open_files(self, datasets: Any) -> Any:
        path, _, revision = (self._path, "", "") if self.bounded else self._path.partition("@")
        try:
            builder = datasets.load_dataset_builder(path, name=self._subset, revision=revision or None)
        except (ConnectionError, OSError) as error:
            if self.bounded or isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f"{self.name}: {error}") from error
            reason = " ".join(str(error).split())
            raise DataError(
                f"{self.name}: the Hugging Face hub cannot be reached: {reason}. Without a network, bring "
                "the files (python scripts/download_assets.py --dataset ...) and name their folder: "
                'training.dataset = "huggingface", training.dataset_path = FOLDER.'
            ) from error
        except ValueError as error:  # a subset is missing or unknown; the message lists them
            raise ValueError(f"{self.name}: {error} (data.subset)") from error
        files = builder.config.data_files or {}
        if files and self._split not in files:
            raise self._no_split(files)
        self._files = [str(file) for file in files.get(self._split, [])]
        try:
            return builder.as_streaming_dataset(split=self._split)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error} (data.split)") from error

    def _no_split(self, there: Any) -> FileNotFoundError:
        return FileNotFoundError(
            f"{self.name}: no split {self._split!r} (data.split); there: {', '.join(map(str, there))}"
        )

    def _fingerprint(self) -> int:
        """Of local files names below the folder and sizes; of the hub's the paths without the commit."""
        entries: list[tuple[str, int]] = []
        for file in self._files:
            if self.bounded:
                size = os.path.getsize(file) if os.path.isfile(file) else self._saved_rows
                entries.append((os.path.relpath(file, self._path), size))
            else:
                entries.append((re.sub(r"@[^/]+", "", file), 0))
        content = repr((entries, self._subset, self._split, self.num_shards))
        digest = hashlib.blake2b(content.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def where(self, shard: int, number: int) -> str:
        file = f" ({self._files[shard]})" if len(self._files) == self.num_shards else ""
        return f"{self.name}, shard {shard} of {self.num_shards}{file}, document {number}"

    def read_shard(self, shard: int, start: int) -> Iterator[str]:
        opened = self._open()
        if opened.column_names is not None:
            opened = opened.select_columns([self._text_key])
        part = opened.shard(num_shards=self.num_shards, index=shard)
        if start:
            part = part.skip(start)
        number = start
        # Tables, not rows: faster, and rows would be dealt among the workers of a torch DataLoader.
        for table in part.with_format("arrow").iter(batch_size=_ROWS):
            if self._text_key not in table.column_names:
                raise DataError(
                    f"{self.where(shard, number)}: no field {self._text_key!r} (data.text_key); "
                    f"its fields: {', '.join(table.column_names)}"
                )
            for text in table.column(self._text_key).to_pylist():
                if not isinstance(text, str):
                    raise DataError(
                        f"{self.where(shard, number)}: field {self._text_key!r} (data.text_key) holds no "
                        f"string: {text!r:.60}"
                    )
                yield text
                number += 1


def open_huggingface(
    dataset: str, path: str | None, text_key: str, subset: str | None, split: str | None
) -> HuggingFaceSource:
    """`dataset` is `huggingface`, which needs `path`, or a name in HUB; its `path` may be a local copy."""
    known = HUB.get(dataset)
    if known is None and not path:
        raise ValueError(
            "training.dataset = 'huggingface' needs training.dataset_path: a folder, or an id on the hub "
            "such as 'allenai/c4'"
        )
    if known is not None and not path:
        path, subset = known.id, subset or known.subset
    assert path
    if not Path(path).expanduser().is_dir() and not _HUB_ID.fullmatch(path):
        raise FileNotFoundError(
            f"training.dataset_path = {path!r}: no such folder, and no id on the Hugging Face hub "
            "(owner/name, owner/name@revision)"
        )
    return HuggingFaceSource(dataset, path, text_key, subset, split or (known.split if known else "train"))
