"""Which files a path, folder or glob names, in an order that neither the file system nor the locale
decides."""

from __future__ import annotations

import glob
import os
from pathlib import Path


def find_files(dataset: str, path: str | None, suffixes: tuple[str, ...] = ()) -> list[Path]:
    """The regular files of `path`: itself; all in a folder, recursively; or a glob's matches (`**` recurses).

    A folder's hidden entries are left out, and files without one of `suffixes`, if any are given.
    Sorted by the bytes of the path.

    Raises FileNotFoundError naming `training.dataset_path` if nothing is found.
    """
    key = f"training.dataset_path = {path!r}"
    if not path:
        raise ValueError(
            f"training.dataset = {dataset!r} needs training.dataset_path: a file, folder or glob "
            "(or training.dataset = 'python_stdlib', which needs none)"
        )
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        found = [path]
    elif os.path.isdir(path):
        found = _walk(path, suffixes)
        if not found:
            raise FileNotFoundError(f"{key}: no {' or '.join(suffixes) or 'regular'} file in this folder")
    else:
        found = [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
        if not found:
            raise FileNotFoundError(f"{key}: no such file or folder, and no file matches it as a glob")
    return sorted((Path(name) for name in found), key=lambda p: [os.fsencode(part) for part in p.parts])


def _walk(root: str, suffixes: tuple[str, ...]) -> list[str]:
    found, seen = [], set()
    for folder, folders, names in os.walk(root, followlinks=True):
        # A link back up would make an endless walk.
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        found += [
            os.path.join(folder, name)
            for name in names
            if not name.startswith(".") and (not suffixes or name.lower().endswith(suffixes))
        ]
    return [name for name in found if os.path.isfile(name)]
