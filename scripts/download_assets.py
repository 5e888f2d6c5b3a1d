"""Tokenizer, configuration and weights of a model, or files of a dataset, from the Hugging Face hub:
``python scripts/download_assets.py meta-llama/Llama-3.1-8B`` brings the tokenizer.

Run it where there is a network, and copy the folder where there is none. Files that are there are not brought
again. Access to gated models comes from ``huggingface-cli login``, HF_TOKEN, or --hf_token.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

# Runs from a bare checkout too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from titanforge.data import build_tokenizer

ASSETS = {
    "tokenizer": (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("tokenizer.model", "original/tokenizer.model", "*.tiktoken", "vocab.json", "merges.txt"),
    ),
    "config": ("config.json", "generation_config.json"),
    "weights": ("*.safetensors", "model.safetensors.index.json"),
}
"""What --assets takes -> names in the repository."""


class DownloadError(RuntimeError):
    """Nothing could be brought; the message says why and what to do."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Bring a model's or dataset's files from the Hugging Face hub."
    )
    parser.add_argument("repo_id", help="owner/name on the hub, e.g. meta-llama/Llama-3.1-8B or allenai/c4")
    parser.add_argument(
        "--assets", nargs="+", choices=[*ASSETS, "all"], default=["tokenizer"], help="default: tokenizer"
    )
    parser.add_argument("--dataset", action="store_true", help="repo_id is a dataset")
    parser.add_argument(
        "--files", nargs="+", help="names or patterns in place of --assets, e.g. 'en/c4-train.0000*.json.gz'"
    )
    parser.add_argument("--revision", help="branch, tag or commit; default: main")
    parser.add_argument("--local_dir", default="./assets/hf", help="files go to LOCAL_DIR/NAME (%(default)s)")
    parser.add_argument("--hf_token", help="access token, for gated or private repositories")
    return parser.parse_args(argv)


def download(options: argparse.Namespace) -> Path:
    """The folder with the files. Raises DownloadError."""
    repo_id = options.repo_id
    kind = "dataset" if options.dataset else "model"
    if options.files:
        patterns = list(options.files)
    elif options.dataset:
        patterns = ["*"]
    else:
        names = ASSETS if "all" in options.assets else options.assets
        patterns = [pattern for name in names for pattern in ASSETS[name]]
    folder = Path(options.local_dir, repo_id.rpartition("/")[2])
    try:
        huggingface_hub.snapshot_download(
            repo_id,
            repo_type=kind,
            revision=options.revision,
            local_dir=folder,
            allow_patterns=patterns,
            token=options.hf_token,
        )
    except GatedRepoError as error:
        raise DownloadError(
            f"{repo_id} is gated: accept its conditions on https://huggingface.co/{repo_id}, then log in "
            "with `huggingface-cli login` or pass --hf_token"
        ) from error
    except RevisionNotFoundError as error:
        raise DownloadError(f"{repo_id} has no revision {options.revision!r}: correct --revision") from error
    except RepositoryNotFoundError as error:
        raise DownloadError(
            f"no {kind} {repo_id!r} on the hub, or a private one: check the name, log in, or "
            f"{'leave out' if options.dataset else 'add'} --dataset"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DownloadError(
            f"the Hugging Face hub cannot be reached for {repo_id}: {reason} Run this where there is a "
            f"network and copy {folder} here; behind a mirror, set HF_ENDPOINT."
        ) from error
    except ValueError as error:  # a name that cannot be one
        raise DownloadError(f"{repo_id!r}: {error}") from error
    # Without a network an existing folder is taken for complete.
    if not _found(folder, patterns):
        raise DownloadError(f"{repo_id} holds none of {', '.join(patterns)}, or the hub cannot be reached")
    return folder


def _found(folder: Path, patterns: list[str]) -> list[str]:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    names = [name for name in names if not name.startswith(".cache/")]
    return sorted(name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns))


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    try:
        folder = download(options)
        print(f"{folder} holds:")
        for name in sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()):
            if not name.startswith(".cache/"):
                print(f"  {name}")
        if options.dataset:
            print(f'training.dataset = "huggingface"\ntraining.dataset_path = "{folder}"')
            return
        if options.files is None and {"tokenizer", "all"} & set(options.assets):
            tokenizer = build_tokenizer("auto", str(folder))
            print(f"tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} tokens")
        print(f'model.hf_assets_path = "{folder}"')
    except (DownloadError, ValueError, FileNotFoundError) as error:
        raise SystemExit(f"download_assets: {error}") from None


if __name__ == "__main__":
    main()
