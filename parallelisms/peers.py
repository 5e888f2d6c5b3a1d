"""When a rank fails, hangs or dies, every rank stops and says which one it was.

Ranks talk about it through the process group's store, which works where a collective does not. A thread of
each rank looks there once a second, so that a rank that is stuck, be it in its own code or in a collective
that will never end, still answers where it is, and still ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_POLL_SECONDS = 1.0
# What other ranks' threads may take to notice and answer, and their main threads to end by themselves.
_ANSWER_SECONDS, _LEAVE_SECONDS = 6.0, 15.0
_LOST_CONNECTION = re.compile(r"gloo|nccl|connection|timed? ?out|broken pipe|socket", re.IGNORECASE)
_FAILURE, _TROUBLE = "failure", "trouble"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun sets it where the store is its own
_SHOWN = 16
_runs = itertools.count()


class Progress(NamedTuple):
    """How far a rank is. issued: collectives so far; ranks of one pipeline stage issue equally many."""

    step: int = 0
    issued: int = 0
    stage: int = 0


class PeerWatch:
    """One for each rank, made and closed by all together.

    where: how far this rank is, and the same in words with the latest collective; asked from another thread.
    before_exit: is called before a stuck process is ended.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        where: Callable[[], tuple[Progress, str]],
        before_exit: Callable[[], object] = lambda: None,
    ) -> None:
        # Not the same connection: a blocking call of the main thread would keep it.
        connection = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._store = PrefixStore(f"titanforge/peers/{next(_runs)}", connection)
        self._rank, self._ranks = rank, range(world_size)
        self._where, self._before_exit = where, before_exit
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._answered = False
        self._thread = threading.Thread(target=self._watch, name="peer watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking; before the store goes away."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _POLL_SECONDS)

    def failed(self, error: BaseException) -> str | None:
        """Tell the other ranks that this one stops, because of `error`.

        Returns who is to blame, in words, where the error is only that of a collective; it waits for the
        other ranks' answers then. None for an error of this rank's own. The rank that keeps the store also
        waits until others have heard.
        """
        with contextlib.suppress(Exception):
            if not is_lost_connection(error):
                message = " ".join(str(error).split())[:500]
                self._put(_FAILURE, f"rank {self._rank} failed: {type(error).__name__}: {message}")
                self._let_others_hear(self._ranks)
                return None
            self._answer()
            self._put(_TROUBLE, str(self._rank))
            verdict = self._verdict()
            self._let_others_hear([rank for rank in self._ranks if self._store.check([_answer_key(rank)])])
            return verdict
        host = "rank 0, which keeps" if os.environ.get(_AGENT_STORE) != "True" else "torchrun, which keeps"
        return f"{host} the store of the process group, cannot be reached: gone, or its machine"

    # ---------------------------------------------------------------- asking and answering

    def _verdict(self) -> str:
        end = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < end:
            if failure := self._get(_FAILURE):
                return failure
            if self._store.check([_answer_key(rank) for rank in self._ranks]):
                break
            time.sleep(0.1)
        answers = {rank: json.loads(text) for rank in self._ranks if (text := self._get(_answer_key(rank)))}
        verdict = blame(answers, self._ranks)
        self._put(_FAILURE, verdict)
        return self._get(_FAILURE) or verdict  # the first that came to one speaks for all

    def _let_others_hear(self, ranks: Sequence[int]) -> None:
        """With the store goes the reason to end, and a rank that hangs would stay for good."""
        self._store.set(_heard_key(self._rank), "")
        if self._rank != 0 or os.environ.get(_AGENT_STORE) == "True":
            return
        end = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < end and not self._store.check([_heard_key(rank) for rank in ranks]):
            time.sleep(0.1)

    def _answer(self) -> None:
        """Say where this rank is; once."""
        if self._answered:
            return
        self._answered = True
        progress, where = self._where()
        frame = sys._current_frames().get(self._main)
        stack = traceback.extract_stack(frame) if frame is not None else []
        place = f"{os.path.basename(stack[-1].filename)}:{stack[-1].lineno}" if stack else "?"
        self._store.set(_answer_key(self._rank), json.dumps([progress, where, place]))

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(_POLL_SECONDS):
                if self._store.check([_TROUBLE]):
                    self._answer()
                if failure := self._get(_FAILURE):
                    self._store.set(_heard_key(self._rank), "")
                    self._leave(failure)
                    return
        except Exception:
            return  # the store is gone; whoever waits for a rank will learn it from the collective

    def _leave(self, failure: str) -> None:
        if self._stopped.wait(_LEAVE_SECONDS):
            return
        _, where = self._where()
        print(
            f"error: rank {self._rank} is stopped ({where}): {failure}. It stood here:",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        faulthandler.dump_traceback(sys.stderr)
        with contextlib.suppress(Exception):
            self._before_exit()
        os._exit(1)

    # ---------------------------------------------------------------- the store

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _put(self, key: str, value: str) -> None:
        """Set a key that nobody has set yet."""
        self._store.compare_set(key, "", value)


def _answer_key(rank: int) -> str:
    return f"where/{rank}"


def _heard_key(rank: int) -> str:
    return f"heard/{rank}"


def blame(answers: dict[int, list[Any]], ranks: range) -> str:
    """Who holds the others up: those that give no answer, else those that are in an earlier step than others,
    or have issued fewer collectives than others of their stage.

    answers: by rank, what `PeerWatch._answer` stored.
    """
    silent = [rank for rank in ranks if rank not in answers]
    progress = {rank: Progress(*answer[0]) for rank, answer in answers.items()}
    latest = max((each.step for each in progress.values()), default=0)
    most: dict[int, int] = {}
    for each in progress.values():
        most[each.stage] = max(most.get(each.stage, 0), each.issued)
    late = [r for r, each in progress.items() if each.step < latest or each.issued < most[each.stage]]
    stand = {rank: f"{where}, in {place}" for rank, (_, where, place) in answers.items()}
    late = [f"rank {rank} is behind: {stand[rank]}" for rank in sorted(late, key=lambda r: (progress[r], r))]
    if silent:
        waits = f" (and {'; '.join(late)}: perhaps waiting for that)" if late else ""
        return f"{_named(silent)} gave no sign of life: gone, or stopped{waits}"
    if late:
        return "; ".join(late)
    if len({where for _, where, _ in answers.values()}) == 1:
        return (
            f"all ranks are in the same place ({answers[min(answers)][1]}): the network between them failed"
        )
    told = [f"rank {rank} {stand[rank]}" for rank in sorted(stand)[:_SHOWN]]
    return f"each waits for another, or the network between them failed: {'; '.join(told)}"


def _named(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + more
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says no more than that a collective did not complete."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        if type(seen) is RuntimeError and _LOST_CONNECTION.search(str(seen)):
            return True
        seen = seen.__cause__
    return False
