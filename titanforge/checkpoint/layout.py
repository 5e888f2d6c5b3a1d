"""Checkpoint folders: names, the completion marker, and moving folders safely.

::

    <folder>/step-500/            complete: written aside as step-500.tmp and renamed
        complete.json             the marker, written last: size and CRC-32 of every file
        state.json                what is not a tensor; names the tensors
        rank-00000.json ...       what belongs to one rank (random generators)
        config.toml               the merged configuration
        .metadata, __0_0.distcp   torch.distributed.checkpoint's own files
    <folder>/export-step-1000/    weights alone, as safetensors; never resumed from

Every function here is local to the calling process; the manager runs them on the main rank.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MARKER = "complete.json"
STATE = "state.json"
CONFIG = "config.toml"
_FORMAT = "titanforge-checkpoint"
_VERSION = 1
_STEP_FOLDER = re.compile(r"step-(\d+)")
_EXPORT_FOLDER = re.compile(r"export-step-(\d+)")
_CHUNK = 8 << 20  # bytes per read when a checksum is computed


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def export_folder(folder: Path, step: int) -> Path:
    return folder / f"export-step-{step}"


def temporary(folder: Path) -> Path:
    """Where ``folder`` is written before it is renamed."""
    return folder.with_name(folder.name + ".tmp")


def make_empty(folder: Path) -> None:
    """Create a folder, or clear the one of that name."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def list_steps(folder: Path) -> list[int]:
    """Steps of all ``step-N`` folders, complete or not, ascending."""
    return _numbered(folder, _STEP_FOLDER)


def list_exports(folder: Path) -> list[int]:
    """Steps of all ``export-step-N`` folders, ascending."""
    return _numbered(folder, _EXPORT_FOLDER)


def _numbered(folder: Path, pattern: re.Pattern) -> list[int]:
    if not folder.is_dir():
        return []
    matches = [pattern.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir()]
    return sorted(int(match[1]) for match in matches if match)


# ------------------------------------------------------------------ marker


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and CRC-32 of a file; one sequential read, usually from the page cache just written."""
    checksum, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_CHUNK):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def write_synced(path: Path, text: str) -> None:
    """Write text and force it to the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (new files, renames) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_marker(folder: Path, files: Mapping[str, Mapping[str, Any]], **facts: Any) -> None:
    """Write the marker of a folder whose other files are all there; the last file to be written."""
    content = {"format": _FORMAT, "version": _VERSION, **facts, "files": dict(sorted(files.items()))}
    write_synced(folder / MARKER, json.dumps(content, indent=1) + "\n")
    sync_folder(folder)


def read_marker(folder: Path) -> dict[str, Any]:
    """The marker's content.

    Raises:
        ValueError: no marker, or not one of ours; the message is the reason to show.
    """
    try:
        content = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"has no {MARKER}: unfinished, or not written by titanforge") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{MARKER} cannot be read ({error})") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{MARKER} is not a titanforge marker")
    if content.get("version") != _VERSION:
        raise ValueError(f"{MARKER} has version {content.get('version')!r}; this code reads {_VERSION}")
    files = content.get("files")
    if not isinstance(files, dict) or not all(map(_is_fingerprint, files.values())):
        raise ValueError(f"{MARKER} lists no files")
    # Nothing outside the folder may be reached through a name.
    if any(Path(name).name != name or name in ("", ".", "..") for name in files):
        raise ValueError(f"{MARKER} names a file outside its folder")
    return content


def _is_fingerprint(facts: Any) -> bool:
    if not isinstance(facts, dict):
        return False
    return isinstance(facts.get("bytes"), int) and isinstance(facts.get("crc32"), str)


def why_incomplete(folder: Path) -> str | None:
    """The reason why a folder is no complete checkpoint, or None. Looks at sizes, reads no content."""
    try:
        files = read_marker(folder)["files"]
    except ValueError as error:
        return str(error)
    for name, facts in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != facts["bytes"]:
            return f"{name} has {size} bytes, {facts['bytes']} were written: truncated or altered"
    return None


def why_corrupt(folder: Path, names: Iterable[str]) -> str | None:
    """The first of ``names`` whose content differs from the marker's checksum, as a reason; or None."""
    files = read_marker(folder)["files"]
    for name in names:
        try:
            found = fingerprint(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if found["crc32"] != files[name]["crc32"]:
            return f"{name} has checksum {found['crc32']}, {files[name]['crc32']} was written: altered"
    return None


# ------------------------------------------------------------------ moving


def publish(written: Path, final: Path) -> None:
    """Give a finished temporary folder its name, replacing an older one of that name.

    At every instant one of the two is there under a name that ``tidy`` recovers.
    """
    replaced = final.with_name(final.name + ".replaced.tmp")
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(final, replaced)
    os.rename(written, final)
    sync_folder(final.parent)
    remove(replaced)


def remove(folder: Path) -> bool:
    """Delete a folder; a failure is a warning, never an error. Returns whether it is gone."""
    if not folder.exists():
        return True
    # Renamed first: what a crash leaves half deleted must not look like a checkpoint.
    doomed = folder if folder.name.endswith(".tmp") else folder.with_name(folder.name + ".deleted.tmp")
    try:
        if doomed != folder:
            os.rename(folder, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        logger.warning("could not delete %s (%s); delete it by hand, training goes on", doomed, error)
        return False
    return True


def tidy(folder: Path) -> list[str]:
    """Finish or clear what a killed process left; returns a line for each thing done.

    A temporary folder that was complete but not yet renamed gets its name; a replaced one whose
    successor never came gets its name back; every other temporary folder is deleted.
    """
    done: list[str] = []
    if not folder.is_dir():
        return done
    leftovers = [entry for entry in folder.iterdir() if entry.is_dir() and entry.name.endswith(".tmp")]
    leftovers = [e for e in leftovers if _STEP_FOLDER.match(e.name) or _EXPORT_FOLDER.match(e.name)]
    # "step-5.tmp" before "step-5.replaced.tmp": the newer one wins the name.
    for entry in sorted(leftovers, key=lambda entry: entry.name.count(".")):
        final = folder / entry.name.split(".", 1)[0]
        deleted = entry.name.endswith(".deleted.tmp")
        if not deleted and not final.exists() and why_incomplete(entry) is None:
            os.rename(entry, final)
            done.append(f"{entry.name} was complete: renamed to {final.name}")
        elif remove(entry):
            done.append(f"{entry.name} was left by a stopped save: deleted")
    return done


def purge(folder: Path, keep: int, saved: int | None = None) -> list[int]:
    """Delete all but the ``keep`` newest complete checkpoints; returns the deleted steps.

    Incomplete and foreign folders neither count nor are touched, so the last good one always stays. Nor do
    steps after the one just ``saved``: a run that went back (`checkpoint.load_step`) left them behind; they
    must not push out its own.
    """
    complete = [step for step in list_steps(folder) if why_incomplete(step_folder(folder, step)) is None]
    complete = [step for step in complete if saved is None or step <= saved]
    return [step for step in complete[:-keep] if remove(step_folder(folder, step))] if keep > 0 else []
