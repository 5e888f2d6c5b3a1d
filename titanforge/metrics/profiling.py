"""torch.profiler traces and CUDA memory snapshots, by the [profiling] keys."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Allocator events kept for a snapshot: about 100 MB of host memory, some tens of steps.
_SNAPSHOT_ENTRIES = 100_000


def absolute_schedule(
    start_step: int, freq: int, active: int, warmup: int
) -> Callable[[int], torch.profiler.ProfilerAction]:
    """A torch.profiler schedule in steps of the *run*: a resumed run traces the steps that it would have.

    A trace ends with each step that is a multiple of ``freq`` and covers the last ``active`` steps.

    Raises:
        ValueError: ``freq`` has no room for ``active`` and ``warmup``.
    """
    if active < 1 or warmup < 0 or freq < active + warmup:
        raise ValueError(
            f"profiling.profile_freq = {freq} has no room for profiling.profiler_warmup = {warmup} and "
            f"profiling.profiler_active = {active}: make it at least their sum, with active >= 1"
        )
    schedule = torch.profiler.schedule(wait=freq - active - warmup, warmup=warmup, active=active)
    return lambda step: schedule(start_step + step)


class Profiler:
    """Records around each step: ``with profiler.recording(step): …``; ``close()`` at the end.

    Writes ``<dump_folder>/<save_traces_folder>/step_<n>/rank<r>_trace.json`` (open in Perfetto or
    chrome://tracing) and ``<dump_folder>/<save_memory_snapshot_folder>/step_<n>[_oom]/rank<r>_memory.pickle``
    (open in https://pytorch.org/memory_viz). An out-of-memory error leaves a snapshot of the moment and
    goes on upwards; nothing that fails while writing it can hide it.

    Args:
        config: the ``Profiling`` section.
        dump_folder: ``job.dump_folder``.
        rank: names the files.
        start_step: last step done before this process began (0, or the checkpoint's).
        device_type: ``"cuda"`` or ``"cpu"`` (no memory snapshots there); default: what this machine has.
    """

    def __init__(
        self,
        config: Any,
        dump_folder: str | Path,
        rank: int = 0,
        start_step: int = 0,
        device_type: str | None = None,
    ) -> None:
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        self.config = config
        self.rank = rank
        self.step_number = start_step
        self._started = False
        self.traces_folder = Path(dump_folder) / config.save_traces_folder
        self.snapshots_folder = Path(dump_folder) / config.save_memory_snapshot_folder
        self._profile: torch.profiler.profile | None = None
        self._snapshots = config.enable_memory_snapshot and device_type == "cuda"
        if config.enable_profiling:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if device_type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(
                activities=activities,
                schedule=absolute_schedule(
                    start_step, config.profile_freq, config.profiler_active, config.profiler_warmup
                ),
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )

    @contextlib.contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Around step ``step`` (1-based); an out-of-memory error in it leaves a snapshot and surfaces."""
        self._start()
        try:
            yield
        except torch.OutOfMemoryError:
            logger.error("out of memory in step %d", step)
            if self._snapshots:
                self.write_snapshot(f"step_{step}_oom")
            raise
        self.step_number = step
        if self._profile is not None:
            self._profile.step()
        if self._snapshots and step % self.config.profile_freq == 0:
            self.write_snapshot(f"step_{step}")

    def _start(self) -> None:
        """At the first step, not at construction: set-up is no part of a step."""
        if self._started:
            return
        self._started = True
        if self._snapshots:
            # Not of what is freed: with it torch 2.11 loses the exception that ends a recomputation early,
            # and the step of a fused, selectively checkpointed model dies of a SystemError.
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES, context="alloc")
        if self._profile is not None:
            self._profile.start()

    def close(self) -> None:
        """Stop recording; a trace that is not complete is not written. Calling it again does nothing."""
        if not self._started:
            return
        self._started = False
        if self._snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._profile is not None:
            # Stopping in mid-trace would hand out fewer steps than `profiler_active` under a full name.
            self._profile.on_trace_ready = None
            self._profile.stop()
            self._profile = None

    def write_snapshot(self, name: str) -> Path | None:
        """Dump the allocator's history; None, with the error in the log, if that failed."""
        path = self.snapshots_folder / name / f"rank{self.rank}_memory.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except Exception:
            logger.exception("could not write the memory snapshot %s", path)
            return None
        logger.info("memory snapshot: %s", path)
        return path

    def _write_trace(self, profile: torch.profiler.profile) -> None:
        path = self.traces_folder / f"step_{self.step_number}" / f"rank{self.rank}_trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
        logger.info("profiler trace: %s", path)
