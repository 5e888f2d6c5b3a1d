"""Files in which this machine keeps what was found out on it: tuned tiles, forms that were checked."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")


def cache_path() -> Path:
    """File of tuned configurations: `$TITANFORGE_CACHE_DIR/tiles.json`, by default under
    `~/.cache/titanforge`. The others lie beside it.
    """
    folder = os.environ.get("TITANFORGE_CACHE_DIR") or Path.home() / ".cache" / "titanforge"
    return Path(folder) / "tiles.json"


def device_name(device: torch.device) -> str:
    """The card's name, under which what was found on it is kept."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def read_entries(path: Path) -> dict[str, Any]:
    """What a file of entries holds; nothing where there is none.

    Raises RuntimeError, naming the file, where it is not such a file.
    """
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:  # not JSON, or not text
        raise RuntimeError(f"{path} cannot be read ({error}): delete it, and measure anew") from error
    if not isinstance(entries, dict):
        raise RuntimeError(f"{path} holds no entries by key: delete it, and measure anew")
    return entries


def known_entries(path: Path, made: Callable[[Any], T]) -> dict[str, T]:
    """`made` of each entry of a file. Those of another release, at whose fields or values `made` raises
    TypeError or ValueError, are left out, and a warning says so.
    """
    known, foreign = {}, []
    for key, entry in read_entries(path).items():
        try:
            known[key] = made(entry)
        except (TypeError, ValueError):
            foreign.append(key)
    if foreign:
        logger.warning(
            f"{path}: {len(foreign)} of its entries are of another release of titanforge and not taken "
            f"({foreign[0]}): tune these shapes again, or delete the file"
        )
    return known


def add_entry(path: Path, key: str, entry: Any) -> None:
    """Put one entry into a JSON file of them. Written aside and renamed, so that a reader never sees half of
    it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = read_entries(path)
    entries[key] = entry
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(json.dumps(entries, indent=1, sort_keys=True))
    aside.replace(path)
