"""The record of every collective that titanforge issues: who talked along which axis, for what, how much."""

from __future__ import annotations

import contextlib
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


@dataclass
class LedgerEntry:
    """Payload bytes handed to collectives by this rank, the number of collectives, and the seconds that the
    host spent in them: of CPU tensors reduced in place (on a GPU the host only launches: 0)."""

    bytes: int = 0
    count: int = 0
    seconds: float = 0.0


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


class CommLedger:
    """Counts collectives by mesh axis and purpose.

    Bytes are the payload on this rank: the full tensor of an all-reduce or broadcast, the input of a
    reduce-scatter. They do not depend on the algorithm that moves them. Collectives that are issued elsewhere
    (ring, all-to-all, pipeline, a split vocabulary, sharded matrices) are told to `record`. What PyTorch
    issues by itself (FSDP2's gathers and reductions) is not in here, nor the activations that tensor
    parallelism exchanges between blocks, in compiled graphs too, and its sums of norms' gradients, nor what a
    load or a save sends.

    The methods that issue a collective skip it, and record nothing, for a group of one rank.

    degrees: what `CollectiveFailed` says of an axis.
    """

    def __init__(self, degrees: Callable[[str], str] = lambda axis: "") -> None:
        self._degrees = degrees
        self._entries: dict[tuple[str, str], LedgerEntry] = {}
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
        """Seconds so far, for the loggers: `comm/<axis>/<purpose>_seconds`, where the host waited."""
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
    def _timed(self, tensor: Tensor, operation: str, axis: str, purpose: str) -> Iterator[None]:
        begin = time.perf_counter()
        with self.named_failure(operation, purpose, axis):
            yield
        if tensor.device.type == "cpu":
            self._entries[axis, purpose].seconds += time.perf_counter() - begin

    def state_dict(self) -> dict[str, list[int]]:
        """Totals as plain numbers, so that a resumed run counts on; seconds are of one process alone."""
        return {f"{axis}/{purpose}": [e.bytes, e.count] for (axis, purpose), e in self._entries.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the totals by saved ones: what was sent in order to resume is no part of the run."""
        self._entries = {}
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
    ) -> Work | None:
        """Reduce in place over the group; returns the work to wait for if `async_op`.

        group: None stands for no communication (one rank), not for the default group.
        Raises CollectiveFailed; where the work is waited for elsewhere, `named_failure` does it.
        """
        if not self._note(tensor, group, "all-reduce", axis, purpose):
            return None
        if async_op:
            return dist.all_reduce(tensor, op=op, group=group, async_op=True)
        with self._timed(tensor, "all-reduce", axis, purpose):
            return dist.all_reduce(tensor, op=op, group=group)

    def broadcast(
        self, tensor: Tensor, group: ProcessGroup | None, *, group_src: int = 0, axis: str, purpose: str
    ) -> None:
        """Overwrite with the tensor of the group's rank `group_src`."""
        if self._note(tensor, group, "broadcast", axis, purpose):
            with self._timed(tensor, "broadcast", axis, purpose):
                dist.broadcast(tensor, group=group, group_src=group_src)

    def reduce_scatter(
        self,
        output: Tensor,
        tensor: Tensor,
        group: ProcessGroup | None,
        *,
        axis: str,
        purpose: str,
        async_op: bool = False,
    ) -> Work | None:
        """Sum over the group, of which each rank keeps its slice along dim 0; returns the work to wait for
        if `async_op`.
        """
        if not self._note(tensor, group, "reduce-scatter", axis, purpose):
            output.copy_(tensor.view_as(output))
            return None
        if async_op:
            return _reduce_scatter(output, tensor, group=group, async_op=True)
        with self._timed(tensor, "reduce-scatter", axis, purpose):
            return _reduce_scatter(output, tensor, group=group)

    def _note(
        self, tensor: Tensor, group: ProcessGroup | None, operation: str, axis: str, purpose: str
    ) -> bool:
        if group is None or dist.get_world_size(group) == 1:
            return False
        self.record(axis, purpose, tensor.numel() * tensor.element_size())
        self.latest = f"the {operation} of {purpose} over {axis}"
        return True
