"""Checks of what is read: datasets and their paths, a mix of them, the tokenizer, what validation reads."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import Path

from titanforge.config import schema
from titanforge.config.schema import ConfigError, refusal, show
from titanforge.config.sections import JobConfig

DATASETS_WITH_PATH = ("text", "jsonl", "parquet")
HUB_DATASETS = ("c4", "c4_validation", "fineweb", "fineweb-edu", "openwebtext")
DATASETS = ("python_stdlib", *DATASETS_WITH_PATH, "huggingface", *HUB_DATASETS)


def _matches(pattern: str) -> Iterable[Path]:
    """Files that a file, folder or glob stands for (a folder: everything below it)."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return (found for found in path.rglob("*") if found.is_file())
    found = glob.glob(str(path), recursive=True)
    return [Path(name) for name in found if Path(name).is_file()]


def _check_dataset(dataset: str, path: str | None, dataset_key: str, path_key: str) -> None:
    of_dataset, of_path = f"{dataset_key} = {show(dataset)}", f"{path_key} = {show(path)}"
    if dataset not in DATASETS:
        word = schema.nearest(dataset, DATASETS)
        hint = f"did you mean {show(word)}?" if word else 'others by "huggingface" and their id as the path'
        if dataset == "c4_test":
            hint = 'c4_test is torchtitan\'s own test file: read it as "jsonl", or use "python_stdlib"'
        raise ConfigError(f"{of_dataset}: must be one of {', '.join(DATASETS)}; {hint}")
    if dataset == "python_stdlib":
        if path is not None:
            raise ConfigError(f"{of_path}: {of_dataset} brings its own files: unset it")
        return
    if not path:
        if dataset in HUB_DATASETS:
            return
        what = "a folder or hub id" if dataset == "huggingface" else "a file, folder or glob"
        raise ConfigError(f"{of_path}: {of_dataset} needs the path of {what} here")
    if dataset in DATASETS_WITH_PATH:
        if next(iter(_matches(path)), None) is None:
            raise ConfigError(
                f"{of_path}: no such file, and no match as a folder or glob (from {Path.cwd()})"
            )
    elif not Path(path).expanduser().is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", path):
        raise ConfigError(
            f"{of_path}: no such folder (from {Path.cwd()}), and no hub id (owner/name@revision)"
        )


def _check_sources(config: JobConfig) -> None:
    """The mix of `[[data.sources]]`, or the one dataset of `[training]`."""
    training, sources = config.training, config.data.sources
    if not sources:
        _check_dataset(training.dataset, training.dataset_path, "training.dataset", "training.dataset_path")
        return
    for path in ("training.dataset", "training.dataset_path", "data.subset", "data.split"):
        if schema.get_value(config, path) != schema.all_keys()[path].default:
            raise refusal(config, path, "[[data.sources]] names what to train on: keep one of the two")
    for i, source in enumerate(sources):
        key = f"data.sources[{i}]"
        _check_dataset(source.dataset, source.path, f"{key}.dataset", f"{key}.path")
        if source.weight <= 0:
            raise ConfigError(f"{key}.weight = {source.weight}: must be above 0 (leave the source out)")


def check_data(config: JobConfig) -> None:
    """What is trained on, by how many workers, and the tokenizer."""
    _check_sources(config)
    if config.training.dataloader.num_workers > config.data.num_streams:
        raise refusal(
            config,
            "training.dataloader.num_workers",
            "each stream of the data is one worker's: use at most data.num_streams ="
            f" {config.data.num_streams} (a few are enough)",
        )
    assets, tokenizer = config.model.hf_assets_path, config.data.tokenizer
    if tokenizer == "auto" and assets and not Path(assets).expanduser().is_dir():
        raise refusal(
            config, "model.hf_assets_path", 'no such folder: correct it, or set data.tokenizer = "byte"'
        )
    if tokenizer.startswith("package:"):  # a file inside an installed Python package; found when it is read
        return
    if tokenizer not in ("auto", "byte") and not Path(tokenizer).expanduser().exists():
        raise refusal(
            config,
            "data.tokenizer",
            'must be "auto", "byte", the path of a tokenizer file, or package:NAME/PATH; no such file',
        )


def check_validation(config: JobConfig) -> None:
    """What is evaluated on, and the prompts of samples."""
    validation = config.validation
    if not validation.enable:
        return
    if "" in validation.sample_prompts:
        raise refusal(
            config, "validation.sample_prompts", "an empty prompt gives nothing to continue: leave it out"
        )
    if validation.dataset is not None:
        _check_dataset(
            validation.dataset, validation.dataset_path, "validation.dataset", "validation.dataset_path"
        )
    elif validation.dataset_path is not None:
        raise refusal(
            config, "validation.dataset_path", f"needs validation.dataset, one of {', '.join(DATASETS)}"
        )
    elif config.data.validation_fraction == 0:
        raise refusal(
            config,
            "data.validation_fraction",
            "validation.enable = true has nothing to evaluate on: hold out a share of the documents"
            " (e.g. 0.02), or set validation.dataset",
        )
