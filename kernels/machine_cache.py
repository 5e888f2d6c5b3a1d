"""Files in which this machine keeps what was found out on it: tuned tiles, forms that were checked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def cache_path() -> Path:
    """File of tuned configurations: `$TITANFORGE_CACHE_DIR/tiles.json`, by default under
    `~/.cache/titanforge`. The others lie beside it.
    """
    folder = os.environ.get("TITANFORGE_CACHE_DIR") or Path.home() / ".cache" / "titanforge"
    return Path(folder) / "tiles.json"


def device_name(device: torch.device) -> str:
    """The card's name, under which what was found on it is kept."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def add_entry(path: Path, key: str, entry: Any) -> None:
    """Put one entry into a JSON file of them. Written aside and renamed, so that a reader never sees half of
    it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(path.read_text()) if path.exists() else {}
    entries[key] = entry
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(json.dumps(entries, indent=1, sort_keys=True))
    aside.replace(path)
