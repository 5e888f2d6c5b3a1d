"""One document a file: any UTF-8 text, and the standard library's own sources."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from titanforge.data.errors import DataError
from titanforge.data.sources.base import Source, fingerprint, relative_names
from titanforge.data.sources.files import find_files


class TextSource(Source):
    """Each of `paths` (sorted by the caller) is one document."""

    def __init__(self, name: str, paths: list[Path]) -> None:
        self.name = name
        self._paths = [str(path) for path in paths]
        names = relative_names(paths)
        self.fingerprint = fingerprint([(n, path.stat().st_size, 1) for n, path in zip(names, paths)])

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, document: int) -> str:
        path = self._paths[document]
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        try:
            return content.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{path}, line {line}: not UTF-8 text ({error.reason} at byte {error.start}). "
                "Convert it, or name the text files by a glob in training.dataset_path."
            ) from error

    def where(self, document: int) -> str:
        return self._paths[document]


def open_text(path: str | None) -> TextSource:
    return TextSource(f"text ({path})", find_files("text", path))


_NOT_LIBRARY = {
    # Tests and demonstrations, what pip put there, and what differs between builds of one version.
    *("test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "__phello__"),
    *("site-packages", "dist-packages", "ensurepip", "lib-dynload", "__pycache__"),
}


def open_python_stdlib() -> TextSource:
    """The running interpreter's standard library: about 10 MB of English and code, on every machine.

    Raises FileNotFoundError where the library has no source files (zipped or stripped interpreters).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY and not name.startswith("config-")]
        found += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and name != "sitecustomize.py"
        ]
    if not found:
        raise FileNotFoundError(
            f"training.dataset = 'python_stdlib': no .py files in {root}; this Python comes without its "
            "sources. Use another one, or set training.dataset and training.dataset_path."
        )
    return TextSource("python_stdlib", sorted(found, key=lambda p: os.fsencode(p.relative_to(root))))
