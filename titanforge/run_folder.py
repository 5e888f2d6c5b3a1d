"""The dump folder: one run at a time, as two would delete each other's saves; its configuration in a file."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


class FolderLock:
    """Holds ``folder`` until ``close`` or the process's end, however it ends; leaves no file behind.

    Where a file system has no locks a warning says that the folder is not guarded. The folder is made if it
    is not there.

    Raises:
        ValueError: another process holds it.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(
                f"job.dump_folder = {str(folder)!r}: another run is writing to it. Wait for that one to end, "
                "or choose another folder."
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): nothing keeps a second run out of it", folder, error)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def save_config(folder: Path, name: str, toml: str) -> None:
    """Write the merged configuration to ``folder / name``, in place of an older one.

    Raises:
        ValueError: naming the key, if it cannot be written.
    """
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(toml, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"job.save_config_file = {name!r}: cannot be written ({error}): choose another file"
        ) from error
