"""How an error that ends a run is told: one line where its message says what to do, a traceback elsewhere."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
import traceback
from pathlib import Path

from titanforge.config import JobConfig

_KEY = re.compile(rf"\b({'|'.join(field.name for field in dataclasses.fields(JobConfig))})\.[a-z_]+\b")
# Longer than torchrun takes to notice a rank that ended and to end its siblings.
_SECONDS_FOR_THE_FIRST = 3.0


def one_line(error: BaseException) -> str:
    """The message; with where it was raised if it names no configuration key, as it was not foreseen then."""
    message = " ".join(str(error).split())
    if _KEY.search(message):
        return message
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"


def tell_all_alike(message: str) -> None:
    """Print a mistake that every rank finds for itself: the first rank of each node does."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)


def tell(message: str) -> None:
    """Print an error that the other ranks may or may not share.

    All but the first rank of a node wait a moment: if that one fails the same way, torchrun ends them
    before they repeat it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_SECONDS_FOR_THE_FIRST)
        message = f"rank {os.environ.get('RANK', '?')}: {message}"
    print(f"error: {message}", file=sys.stderr, flush=True)
