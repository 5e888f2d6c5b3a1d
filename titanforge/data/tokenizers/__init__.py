"""Tokenizers: bytes, and byte-pair vocabularies from tiktoken rank files. `build_tokenizer` picks one."""

from __future__ import annotations

from pathlib import Path

from titanforge.data.tokenizers.base import Tokenizer
from titanforge.data.tokenizers.bpe import BPETokenizer
from titanforge.data.tokenizers.byte import ByteTokenizer

__all__ = ["BPETokenizer", "ByteTokenizer", "Tokenizer", "build_tokenizer"]

_SUPPORTED = "`byte`, or a tiktoken rank file: Llama 3's tokenizer.model, Qwen's *.tiktoken"


def build_tokenizer(spec: str, hf_assets_path: str = "") -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Args:
        spec: `byte`; the path of a rank file or of a folder with one; or `auto`: the rank file in
            `hf_assets_path` (`model.hf_assets_path`), or `byte` if that is empty.

    Raises:
        FileNotFoundError: the path, or a rank file in the folder, does not exist.
        ValueError: a tokenizer file of another kind.
    """
    if spec == "byte" or (spec == "auto" and not hf_assets_path):
        return ByteTokenizer()
    key, path = ("model.hf_assets_path", hf_assets_path) if spec == "auto" else ("data.tokenizer", spec)
    where = Path(path)
    if where.is_dir():
        where = _rank_file_in(key, where)
    elif not where.is_file():
        raise FileNotFoundError(f"{key} = {path!r}: no such file or folder. Supported: {_SUPPORTED}.")
    if where.suffix == ".json":
        raise ValueError(f"{key} = {path!r}: tokenizer.json is not supported. Supported: {_SUPPORTED}.")
    return BPETokenizer(str(where))


def _rank_file_in(key: str, folder: Path) -> Path:
    candidates = [folder / "tokenizer.model", folder / "original" / "tokenizer.model"]
    found = [path for path in candidates if path.is_file()] or sorted(folder.glob("*.tiktoken"))
    if len(found) > 1 and found[0].suffix == ".tiktoken":
        raise ValueError(f"{key} = {str(folder)!r}: several *.tiktoken files; set data.tokenizer to one.")
    if not found:
        there = " (its tokenizer.json is not supported)" if (folder / "tokenizer.json").is_file() else ""
        raise FileNotFoundError(
            f"{key} = {str(folder)!r}: no tokenizer file there{there}. Set data.tokenizer: {_SUPPORTED}."
        )
    return found[0]
