"""Where documents come from. Indexing reads no text that it need not."""

from __future__ import annotations

from titanforge.data.sources.base import ShardedSource, Source
from titanforge.data.sources.huggingface import HUB, open_huggingface
from titanforge.data.sources.jsonl import open_jsonl
from titanforge.data.sources.parquet import open_parquet
from titanforge.data.sources.text import open_python_stdlib, open_text

__all__ = ["DATASETS", "ShardedSource", "Source", "open_source"]

DATASETS = ("python_stdlib", "text", "jsonl", "parquet", "huggingface", *HUB)


def open_source(
    dataset: str,
    dataset_path: str | None,
    text_key: str,
    subset: str | None = None,
    split: str | None = None,
) -> Source | ShardedSource:
    """The source that `training.dataset` and `training.dataset_path` name, indexed.

    Args:
        subset, split: of a Hugging Face dataset; None: its only one, and `train`.

    Raises:
        ValueError: unknown dataset, or a path missing or given where none belongs.
        FileNotFoundError: nothing at the path.
        DataError: a file that is not of the kind, or a hub out of reach.
    """
    if dataset == "huggingface" or dataset in HUB:
        return open_huggingface(dataset, dataset_path, text_key, subset, split)
    if dataset == "python_stdlib":
        if dataset_path:
            raise ValueError(
                f"training.dataset_path = {dataset_path!r}: the dataset 'python_stdlib' takes no path; "
                "set training.dataset = 'text', 'jsonl', 'parquet' or 'huggingface' to read it"
            )
        source = open_python_stdlib()
    elif dataset == "text":
        source = open_text(dataset_path)
    elif dataset == "jsonl":
        source = open_jsonl(dataset_path, text_key)
    elif dataset == "parquet":
        source = open_parquet(dataset_path, text_key)
    elif dataset == "c4_test":
        raise ValueError(
            "training.dataset = 'c4_test': those files are torchtitan's own (tests/assets/c4_test); set "
            "training.dataset = 'jsonl' and training.dataset_path to them, or use 'python_stdlib'"
        )
    else:
        raise ValueError(f"training.dataset = {dataset!r}: choose one of {', '.join(DATASETS)}")
    if len(source) == 0:
        raise ValueError(f"training.dataset_path = {dataset_path!r}: no documents in it")
    return source
