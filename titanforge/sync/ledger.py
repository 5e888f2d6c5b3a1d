"""The record of every collective that titanforge issues: who talked along which axis, for what, how much."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

# The older name warns where the newer one exists.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class LedgerEntry:
    """Payload bytes handed to collectives by this rank, the number of collectives, and the seconds that it
    waited for them: the host for CPU tensors, the stream for those on a GPU."""

    bytes: int = 0
    count: int = 0
    seconds: float = 0.0


_MOST_SPANS = 256
"""Of waits on a GPU that are kept before they are looked at: a log line looks at all."""


@dataclass(frozen=True)
class _Span:
    """A wait on a GPU, between two events of one stream."""

    axis: str
    purpose: str
    begin: torch.cuda.Event
    end: torch.cuda.Event


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """This moment of the device's current stream; None while that is captured."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class CollectiveFailed(RuntimeError):
    """A collective did not complete.

    what: which one. axis: over which. cause: what the backend said. degrees: the configuration keys, with
    their values, that gave the axis its ranks; empty if nobody knows.
    """

    def __init__(self, what: str, axis: str, cause: Exception, degrees: str = "") -> None:
        along = f"{axis} ({degrees})" if degrees else axis
        super().__init__(
            f"{what} over {axis} failed ({' '.join(str(cause).split())[:200]}): a rank along {along} is gone "
            "or slower than comm.train_timeout_seconds. Resume from the last checkpoint, on fewer ranks if "
            "need be."
        )


@dataclass(frozen=True)
class Pending:
    """A collective that was launched. Waiting for it counts in the ledger, and raises CollectiveFailed."""

    work: Work
    waited: Callable[[], contextlib.AbstractContextManager[None]]

    def wait(self) -> None:
        """The host on a CPU, the current stream on a GPU."""
        with self.waited():
            self.work.wait()


class CommLedger:
    """Counts collectives by mesh axis and purpose.

    Bytes are the payload on this rank: the full tensor of an all-reduce or broadcast, the input of a
    reduce-scatter. They do not depend on the algorithm that moves them: of an all-reduce each of N ranks
    sends 2 (N - 1) / N of them around a ring. An all-to-all and an all-gather are the halves of an all-reduce
    here, send half of that, and count half of the full tensor each. Collectives that are issued elsewhere
    (ring, all-to-all, pipeline, a split vocabulary, sharded matrices) are told to `record`. What PyTorch
    issues by itself (FSDP2's gathers and reductions) is not in here, nor the activations that tensor
    parallelism exchanges between blocks, in compiled graphs too, and its sums of norms' gradients, nor what a
    load or a save sends.

    The methods that issue a collective skip it, and record nothing, for a group of one rank.

    Seconds are from where this rank has come to a collective until it can go on, a slower rank's delay
    included. On a GPU they are read, without waiting, once the stream has come past them; of steps in a
    captured graph there are none.

    degrees: what `CollectiveFailed` says of an axis.
    """

    def __init__(self, degrees: Callable[[str], str] = lambda axis: "") -> None:
        self._degrees = degrees
        self._entries: dict[tuple[str, str], LedgerEntry] = {}
        self._spans: list[_Span] = []
        self.latest = "nothing sent yet"
        """The collective that was issued last, in words: where this rank is if it hangs."""
        self.issued = 0
        """Collectives of this process, in which one that hangs lags behind the others."""

    def record(self, axis: str, purpose: str, bytes: int, count: int = 1) -> None:
        """Add `count` collectives with `bytes` in all, issued elsewhere."""
        self.latest = f"the {purpose} over {axis}"
        self.issued += count
        entry = self._entries.setdefault((axis, purpose), LedgerEntry())
        entry.bytes += bytes
        entry.count += count

    def entries(self) -> Mapping[tuple[str, str], LedgerEntry]:
        """What was recorded, by (axis, purpose)."""
        return self._entries

    def total(self, axis: str | None = None, purpose: str | None = None) -> LedgerEntry:
        """Sum over the entries of an axis, a purpose, both, or all."""
        self._read_spans()
        total = LedgerEntry()
        for (entry_axis, entry_purpose), entry in self._entries.items():
            if axis in (None, entry_axis) and purpose in (None, entry_purpose):
                total.bytes += entry.bytes
                total.count += entry.count
                total.seconds += entry.seconds
        return total

    def metrics(self) -> dict[str, int]:
        """Totals so far, for the loggers: `comm/<axis>/<purpose>_bytes` and `…_count`."""
        flat: dict[str, int] = {}
        for (axis, purpose), entry in sorted(self._entries.items()):
            flat[f"comm/{axis}/{purpose}_bytes"] = entry.bytes
            flat[f"comm/{axis}/{purpose}_count"] = entry.count
        return flat

    def timings(self) -> dict[str, float]:
        """Seconds so far, for the loggers: `comm/<axis>/<purpose>_seconds`, where this rank waited."""
        self._read_spans()
        return {
            f"comm/{axis}/{purpose}_seconds": entry.seconds
            for (axis, purpose), entry in sorted(self._entries.items())
            if entry.seconds
        }

    @contextlib.contextmanager
    def named_failure(self, operation: str, purpose: str, axis: str) -> Iterator[None]:
        """Raise what a backend raises inside as the failure of this collective."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            what = f"the {operation} of {purpose}"
            raise CollectiveFailed(what, axis, error, self._degrees(axis)) from error

    @contextlib.contextmanager
    def waited(self, operation: str, purpose: str, axis: str, device: torch.device) -> Iterator[None]:
        """`named_failure` around a wait for a collective on tensors of the device, whose time counts."""
        on_gpu = device.type == "cuda"
        mark, begin = _mark(device) if on_gpu else None, time.perf_counter()
        with self.named_failure(operation, purpose, axis):
            yield
        if not on_gpu:
            entry = self._entries.setdefault((axis, purpose), LedgerEntry())
            entry.seconds += time.perf_counter() - begin
        elif mark is not None and (end := _mark(device)) is not None:
            self._spans.append(_Span(axis, purpose, mark, end))
            if len(self._spans) > _MOST_SPANS:
                self._read_spans()

    def _read_spans(self) -> None:
        """Add the seconds of waits that are over on the device; the others keep their place."""
        waiting = []
        for span in self._spans:
            if span.end.query():
                entry = self._entries.setdefault((span.axis, span.purpose), LedgerEntry())
                entry.seconds += span.begin.elapsed_time(span.end) / 1e3
            else:
                waiting.append(span)
        self._spans = waiting

    def state_dict(self) -> dict[str, list[int]]:
        """Totals as plain numbers, so that a resumed run counts on; seconds are of one process alone."""
        return {f"{axis}/{purpose}": [e.bytes, e.count] for (axis, purpose), e in self._entries.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the totals by saved ones: what was sent in order to resume is no part of the run."""
        self._entries, self._spans = {}, []
        for key, (bytes, count) in state.items():
            axis, _, purpose = key.partition("/")
            self._entries[axis, purpose] = LedgerEntry(bytes, count)

    def all_reduce(
        self,
        tensor: Tensor,
        group: ProcessGroup | None,
        *,
        axis: str,
        purpose: str,
        op: Any = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Pending | None:
        """Reduce in place over the group; returns the `Pending` to wait for if `async_op`.

        group: None stands for no communication (one rank), not for the default group.
        Raises CollectiveFailed, here or from `Pending.wait`.
        """
        if not self._note(_bytes(tensor), group, "all-reduce", axis, purpose):
            return None
        return self._issue(
            functools.partial(dist.all_reduce, tensor, op=op, group=group),
            "all-reduce", purpose, axis, tensor.device, async_op,
        )  # fmt: skip

    def broadcast(
        self, tensor: Tensor, group: ProcessGroup | None, *, group_src: int = 0, axis: str, purpose: str
    ) -> None:
        """Overwrite with the tensor of the group's rank `group_src`."""
        if self._note(_bytes(tensor), group, "broadcast", axis, purpose):
            call = functools.partial(dist.broadcast, tensor, group=group, group_src=group_src)
            self._issue(call, "broadcast", purpose, axis, tensor.device, async_op=False)

    def reduce_scatter(
        self,
        output: Tensor,
        tensor: Tensor,
        group: ProcessGroup | None,
        *,
        axis: str,
        purpose: str,
        async_op: bool = False,
    ) -> Pending | None:
        """Sum over the group, of which each rank keeps its slice along dim 0; returns the `Pending` to wait
        for if `async_op`.
        """
        if not self._note(_bytes(tensor), group, "reduce-scatter", axis, purpose):
            output.copy_(tensor.view_as(output))
            return None
        return self._issue(
            functools.partial(_reduce_scatter, output, tensor, group=group),
            "reduce-scatter", purpose, axis, tensor.device, async_op,
        )  # fmt: skip

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        group: ProcessGroup | None,
        *,
        axis: str,
        purpose: str,
        async_op: bool = False,
    ) -> Pending | None:
        """Send each rank its row of `tensor` [ranks, *]; row r of `output` is what rank r has sent. Returns
        the `Pending` to wait for if `async_op`.
        """
        if not self._note(_bytes(output) // 2, group, "all-to-all", axis, purpose):
            output.copy_(tensor)
            return None
        return self._issue(
            functools.partial(dist.all_to_all_single, output, tensor, group=group),
            "all-to-all", purpose, axis, tensor.device, async_op,
        )  # fmt: skip

    def all_gather(
        self,
        output: Tensor,
        tensor: Tensor,
        group: ProcessGroup | None,
        *,
        axis: str,
        purpose: str,
        async_op: bool = False,
    ) -> Pending | None:
        """Row r of `output` [ranks, *] is the `tensor` [*] of rank r; returns the `Pending` to wait for if
        `async_op`.
        """
        if not self._note(_bytes(output) // 2, group, "all-gather", axis, purpose):
            output.copy_(tensor)
            return None
        gathered = output.view(-1)  # gloo takes no rows
        return self._issue(
            functools.partial(_all_gather, gathered, tensor, group=group),
            "all-gather", purpose, axis, tensor.device, async_op,
        )  # fmt: skip

    def _issue(
        self, collective: Callable[..., Work | None], operation: str, purpose: str, axis: str,
        device: torch.device, async_op: bool,
    ) -> Pending | None:  # fmt: skip
        if not async_op:
            with self.waited(operation, purpose, axis, device):
                collective()
            return None
        with self.named_failure(operation, purpose, axis):
            work = collective(async_op=True)
        if work is None:
            return None
        return Pending(work, functools.partial(self.waited, operation, purpose, axis, device))

    def _note(self, bytes: int, group: ProcessGroup | None, operation: str, axis: str, purpose: str) -> bool:
        """Record a collective; False, and nothing, for a group of one rank."""
        if group is None or dist.get_world_size(group) == 1:
            return False
        self.record(axis, purpose, bytes)
        self.latest = f"the {operation} of {purpose} over {axis}"
        return True


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
