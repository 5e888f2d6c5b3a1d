"""Tokenizers: bytes, and byte-pair vocabularies from files on disk. `build_tokenizer` picks one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from titanforge.data.tokenizers.base import Tokenizer
from titanforge.data.tokenizers.bpe import BPETokenizer
from titanforge.data.tokenizers.byte import ByteTokenizer

__all__ = ["BPETokenizer", "ByteTokenizer", "Tokenizer", "build_tokenizer"]

_SUPPORTED = (
    "`byte`, tokenizer.json (byte-level BPE), Llama 3's tokenizer.model, Qwen's *.tiktoken, "
    "or vocab.json with merges.txt"
)
PACKAGE = "package:"


def build_tokenizer(spec: str, hf_assets_path: str = "") -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Args:
        spec: `byte`; the path of a tokenizer file or of a folder with one; `package:NAME/PATH` for a file
            inside an installed Python package; or `auto`: the file in `hf_assets_path`
            (`model.hf_assets_path`), or `byte` if that is empty.

    Of several files in a folder the first of tokenizer.json, tokenizer.model, *.tiktoken, vocab.json counts;
    a folder without any is searched again in `original/` (Llama's own layout).

    Raises:
        FileNotFoundError: the path, the package, or a tokenizer file in the folder does not exist.
        ValueError: a tokenizer file of another kind, or several that may be meant.
    """
    if spec == "byte" or (spec == "auto" and not hf_assets_path):
        return ByteTokenizer()
    key, path = ("model.hf_assets_path", hf_assets_path) if spec == "auto" else ("data.tokenizer", spec)
    where = _package_file(path) if path.startswith(PACKAGE) else Path(path).expanduser()
    if where.is_dir():
        where = _tokenizer_file_in(key, where)
    elif not where.is_file():
        raise FileNotFoundError(f"{key} = {path!r}: no such file or folder. Supported: {_SUPPORTED}.")
    if where.name == "merges.txt":
        where = where.with_name("vocab.json")
    return BPETokenizer(str(where))


def _package_file(spec: str) -> Path:
    """The file of `package:NAME/PATH`, found without running the package's code."""
    name, _, inside = spec.removeprefix(PACKAGE).partition("/")
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(
            f"data.tokenizer = {spec!r}: no Python package {name!r} is installed; "
            f"install the one that brings {name}/{inside}, or name a tokenizer file by its path"
        )
    for location in found.submodule_search_locations:
        if (path := Path(location, inside)).exists():
            return path
    raise FileNotFoundError(f"data.tokenizer = {spec!r}: the package {name!r} holds no {inside!r}")


def _tokenizer_file_in(key: str, folder: Path) -> Path:
    for place in (folder, folder / "original"):
        for name in ("tokenizer.json", "tokenizer.model"):
            if (place / name).is_file():
                return place / name
        rank_files = sorted(place.glob("*.tiktoken"))
        if len(rank_files) > 1:
            names = ", ".join(path.name for path in rank_files)
            raise ValueError(
                f"{key} = {str(folder)!r}: several *.tiktoken files ({names}); set data.tokenizer to the "
                "path of one."
            )
        if rank_files:
            return rank_files[0]
        if (place / "vocab.json").is_file():
            return place / "vocab.json"
    raise FileNotFoundError(
        f"{key} = {str(folder)!r}: no tokenizer file there. Set data.tokenizer: {_SUPPORTED}."
    )
