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
# Far longer than the first rank needs to fail the same way, and torchrun to notice and end its siblings.
_SECONDS_FOR_THE_FIRST = 15.0


RANK_LOST = (
    "a rank is gone or slower than comm.train_timeout_seconds. Resume from the last checkpoint, on fewer"
    " ranks if need be."
)
# What gloo says of a lost connection, before and after what happened.
_GLOO = re.compile(r"\[/\S+\.cc:\d+\] |\. This is typically caused by [^)]*?(GLHF! \S*|(?=\))|$)")


def names_key(error: BaseException) -> bool:
    """Whether the message names a configuration key, and so says what to do."""
    return _KEY.search(str(error)) is not None


def one_line(error: BaseException) -> str:
    """The message; with where it was raised if it names no configuration key, as it was not foreseen then."""
    message = _GLOO.sub("", " ".join(str(error).split()))
    if names_key(error):
        return message
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"


def tell(message: str, *, found_by_all: bool = False) -> None:
    """Print why this process is about to end.

    All but the first rank of a node wait: if that one fails the same way, torchrun ends them before they
    repeat it; if they ended first, torchrun would end that one before it could speak.

    Args:
        found_by_all: every rank makes this mistake out by itself, so the others stay silent altogether.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_SECONDS_FOR_THE_FIRST)
        if found_by_all:
            return
        message = f"rank {os.environ.get('RANK', '?')}: {message}"
    print(f"error: {message}", file=sys.stderr, flush=True)
