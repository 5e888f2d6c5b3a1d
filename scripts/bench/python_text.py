"""Real text that is on every machine: Python sources of the standard library and of installed packages."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_sources() -> list[Path]:
    """Python files of the standard library and of every folder of packages on `sys.path`, once each.

    In the order of their names' hashes: a beginning of it holds some of every package.
    """
    roots = {Path(sysconfig.get_paths()["stdlib"])}
    roots |= {Path(entry) for entry in sys.path if entry and Path(entry).is_dir()}
    found = {
        Path(folder, name): hashlib.blake2b(f"{Path(folder).name}/{name}".encode()).digest()
        for root in roots
        if root not in (ROOT, Path.cwd())
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith(".py")
    }
    return sorted(found, key=found.__getitem__)


def write_corpus(path: Path, most_bytes: int) -> dict[str, int]:
    """JSON Lines of distinct files, up to `most_bytes` of text.

    Files of a few lines and generated tables are left out: it takes those of 512 bytes to 256 KiB.
    """
    seen: set[bytes] = set()
    total = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as lines:
        for file in python_sources():
            if total >= most_bytes:
                break
            try:
                content = file.read_bytes() if 512 <= file.stat().st_size <= 1 << 18 else b""
                text = content.decode("utf-8")
            except (OSError, UnicodeDecodeError):  # unreadable, or of another encoding
                continue
            digest = hashlib.blake2b(content, digest_size=16).digest()
            if content and digest not in seen:
                seen.add(digest)
                lines.write(json.dumps({"text": text}) + "\n")
                total += len(content)
    unfinished.rename(path)
    return {"documents": len(seen), "bytes": total}
