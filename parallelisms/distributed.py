"""The processes of a run: joining, agreeing on host-side decisions, timeouts, leaving.

Three process groups exist. The default group carries tensors (NCCL on CUDA, gloo on CPU). The
*control* group (gloo) carries the few numbers that all hosts must agree on each step: tokens, a
rank's failure, a signal. The *checkpoint* group (gloo) coordinates saves, also from a background
thread; as it has its own sequence of collectives, a save never interleaves with training's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store, _world

from titanforge.parallelisms.flight_recorder import FlightRecorder
from titanforge.parallelisms.peers import PeerWatch, Progress

# One slow file system must not look like a hung rank: writing and verifying terabytes takes a while.
CHECKPOINT_TIMEOUT = timedelta(hours=2)

# Before torch 2.14 it had a private name, which now warns.
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


class PeerFailure(RuntimeError):
    """Another rank failed, and all agreed to stop; the message names it and says what it raised."""


class CommSettings(Protocol):
    """What ``init_distributed`` reads of the `[comm]` section."""

    init_timeout_seconds: int
    train_timeout_seconds: int
    trace_buf_size: int
    save_traces_folder: str
    save_traces_file_prefix: str


@dataclass
class Runtime:
    """This process's place among the others.

    Attributes:
        rank, local_rank, world_size: as torchrun numbers them; 0, 0, 1 without torchrun.
        device: where this process computes.
        control_group, checkpoint_group: gloo groups over all ranks (see the module's docstring).
        record: is told of each agreement: axis, purpose, payload in bytes, number of collectives.
        where: how far this rank is, and the same in words with the latest collective; for other ranks, if
            this one fails or hangs.
        recorder, watch: for that case, too; no watch for a single rank.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control_group: ProcessGroup
    checkpoint_group: ProcessGroup
    train_timeout: timedelta
    record: Callable[[str, str, int, int], object] | None = None
    where: Callable[[], tuple[Progress, str]] = lambda: (Progress(), "starting")
    recorder: FlightRecorder | None = None
    watch: PeerWatch | None = None
    _owns_group: bool = field(default=True, repr=False)
    _timeout_shortened: bool = field(default=False, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def host_group(self, sets: Sequence[Sequence[int]]) -> ProcessGroup | None:
        """A gloo group of this rank's set of ranks, None for a set of one; collective, with the same sets."""
        own = None
        for ranks in sets:
            if len(ranks) > 1:
                group = _host_group(self.train_timeout, ranks)
                own = group if self.rank in ranks else own
        return own

    def agree(
        self,
        sums: Sequence[int] = (),
        maxima: Sequence[int] = (),
        group: ProcessGroup | None = None,
        axis: str = "world",
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sum and maximise small integers over all ranks, on the hosts; every rank gets the same.

        Every rank must call it with the same lengths. Both reductions are in flight together.

        Args:
            group, axis: of `host_group`, and its name for the record; default: all ranks.

        Raises:
            RuntimeError: a rank is gone, or the timeout passed.
        """
        if self.world_size == 1:
            return tuple(sums), tuple(maxima)
        pending = []
        for values, op in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
            tensor = torch.tensor(list(values), dtype=torch.int64)
            among = group or self.control_group
            work = dist.all_reduce(tensor, op, group=among, async_op=True) if values else None
            if work is not None and self.record is not None:
                self.record(axis, "agreement", tensor.nbytes, 1)
            pending.append((tensor, work))
        try:
            for _, work in pending:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"the ranks could not agree over {axis} ({' '.join(str(error).split())[:200]}): one is gone "
                "or slower than comm.train_timeout_seconds. Resume from the last checkpoint, on fewer ranks "
                "if need be."
            ) from error
        (summed, _), (maximised, _) = pending
        return tuple(summed.tolist()), tuple(maximised.tolist())

    def all_gather_object(self, value: Any) -> list[Any]:
        """What every rank passed, by rank. For small host-side values."""
        gathered: list[Any] = [None] * self.world_size
        if self.world_size == 1:
            return [value]
        dist.all_gather_object(gathered, value, group=self.control_group)
        return gathered

    def raise_together(self, error: BaseException | None, failed_rank: int, doing: str) -> None:
        """End all ranks with the failing rank's own message; call it on every rank.

        Args:
            error: what this rank caught, None where nothing failed.
            failed_rank: the rank that all agreed on.
            doing: what was being done, for the message.

        Raises:
            The caught error where there is one; PeerFailure, which names the culprit, elsewhere.
        """
        messages = self.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        raise PeerFailure(f"rank {failed_rank} failed while {doing}: {messages[failed_rank]}")

    def failed(self, error: BaseException, traces: bool = True) -> str | None:
        """Call it with what ends this rank: writes the flight recorder's files and tells the other ranks.

        traces: False where nothing is to be written, for the folder may be another run's.
        Returns who is to blame, for an error that says no more than that a collective failed.
        """
        if traces:
            with contextlib.suppress(OSError):
                self.dump_traces()
        return None if self.watch is None else self.watch.failed(error)

    def dump_traces(self) -> None:
        """Write the flight recorder's files, if it is on."""
        if self.recorder is not None:
            self.recorder.dump(self.rank)

    def shorten_timeout(self) -> None:
        """Switch from the start-up timeout to the one for training; once, on all ranks together.

        Call it after the first step *of this process*: a resumed run compiles and warms up as a new one.
        """
        if self._timeout_shortened:
            return
        self._timeout_shortened = True
        # A rank still inside a slow first step must not meet peers that already use the short timeout.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self.control_group)
        for group in list(_world.pg_map):
            if group is not self.checkpoint_group and dist.get_rank(group) >= 0:
                _set_timeout(self.train_timeout, group)

    def close(self) -> None:
        """Leave the groups; safe to call twice."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def init_distributed(comm: CommSettings, device_type: str, dump_folder: str = ".") -> Runtime:
    """Join the processes of this run and choose this process's device.

    Works under torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and as a plain single
    process, where a group of one is made without any port. A group that already exists is used.

    Args:
        comm: timeouts in seconds and the flight recorder's settings.
        device_type: "cuda" or "cpu".
        dump_folder: what ``comm.save_traces_folder`` is relative to.

    Raises:
        ValueError: more ranks on this node than GPUs.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}. Start "
                "torchrun with --nproc-per-node no larger than that."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    recorder = FlightRecorder(comm, dump_folder, device_type)
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    owns_group = not dist.is_initialized()
    if owns_group:
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if world_size == 1:
            dist.init_process_group(
                backend, store=HashStore(), rank=0, world_size=1, timeout=timeout
            )  # no address needed
        else:
            dist.init_process_group(backend, timeout=timeout)
    runtime = Runtime(
        rank=dist.get_rank(),
        local_rank=local_rank,
        world_size=dist.get_world_size(),
        device=device,
        control_group=_host_group(timeout),
        checkpoint_group=_host_group(CHECKPOINT_TIMEOUT),
        train_timeout=timedelta(seconds=comm.train_timeout_seconds),
        recorder=recorder,
        _owns_group=owns_group,
    )
    if runtime.world_size > 1:
        runtime.watch = PeerWatch(
            _get_default_store(),
            runtime.rank,
            runtime.world_size,
            where=lambda: runtime.where(),
            before_exit=runtime.dump_traces,
        )
    return runtime


def _host_group(timeout: timedelta, ranks: Sequence[int] | None = None) -> ProcessGroup:
    """A new gloo group, by default over all ranks; collective over all of them. Not for use outside it."""
    return cast(ProcessGroup, dist.new_group(ranks, backend="gloo", timeout=timeout))
