"""Replicas as threads of one process: the sync policies' own code, with collectives that are sums in memory.

For questions of quality (which policy trains as well), where many replicas of a small model are to share
one device and nobody times the network. A policy sees a group with a rank and a size, and a ledger that
reduces in the order of the ranks: every replica gets the same bits, and bytes count as over a network.
Replicas take turns from one collective to the next: threads that ran at the same time would wait for each
other's interpreter lock, up to 5 ms at each hand-over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from titanforge.sync import CommLedger

T = TypeVar("T")


class ThreadGroup:
    """Stands in for a process group: `rank` is that of the calling thread."""

    def __init__(self, size: int) -> None:
        self._size, self._own = size, threading.local()
        self._slots: list[Any] = [None] * size
        self._barrier, self._turn = threading.Barrier(size), threading.Lock()
        self._told: Any = None

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._own.rank

    @contextlib.contextmanager
    def replica(self, rank: int) -> Iterator[None]:
        """Within, the calling thread is this replica, and runs while no other does."""
        self._own.rank = rank
        with self._turn:
            yield

    def abort(self) -> None:
        """Let no replica wait for one that failed."""
        self._barrier.abort()

    def _meet(self) -> None:
        """Wait for all replicas; others run meanwhile."""
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()

    def tell(self, found: Callable[[], T]) -> T:
        """What `found` returns to replica 0, for all of them."""
        if self.rank() == 0:
            self._told = found()
        self._meet()
        told = self._told
        self._meet()
        return told

    @torch.no_grad()
    def exchange(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> None:
        """Overwrite every replica's tensor with what `combine` makes of all, by rank."""
        self._slots[self.rank()] = tensor
        self._meet()
        if self.rank() == 0:
            total = combine(self._slots)
            for slot in self._slots:
                slot.copy_(total)
        self._meet()

    @torch.no_grad()
    def deal(self, output: Tensor, tensor: Tensor, piece: Callable[[Tensor, int], Tensor]) -> None:
        """Fill row s of every replica's output with `piece(tensor of replica s, own rank)`."""
        self._slots[self.rank()] = (output, tensor)
        self._meet()
        if self.rank() == 0:
            for rank, (into, _) in enumerate(self._slots):
                into.copy_(torch.stack([piece(own, rank) for _, own in self._slots]))
        self._meet()


class _Pending:
    """A reduction that happens when it is waited for: backward of all replicas may share one thread."""

    def __init__(self, reduce: Callable[[], None]) -> None:
        self._reduce = reduce

    def wait(self) -> None:
        self._reduce()


class ThreadLedger(CommLedger):
    """A replica's ledger whose collectives go over its `ThreadGroup`."""

    def all_reduce(
        self,
        tensor: Tensor,
        group: Any,
        *,
        axis: str,
        purpose: str,
        op: Any = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Any:
        if group is None or group.size() == 1:
            return None
        self.record(axis, purpose, tensor.numel() * tensor.element_size())
        combine = _largest if op == ReduceOp.MAX else _sum
        pending = _Pending(lambda: group.exchange(tensor, combine))
        if async_op:
            return pending
        pending.wait()
        return None

    def broadcast(self, tensor: Tensor, group: Any, *, group_src: int = 0, axis: str, purpose: str) -> None:
        if group is None or group.size() == 1:
            return
        self.record(axis, purpose, tensor.numel() * tensor.element_size())
        group.exchange(tensor, lambda slots: slots[group_src].clone())

    def all_to_all(
        self, output: Tensor, tensor: Tensor, group: Any, *, axis: str, purpose: str, async_op: bool = False
    ) -> Any:
        return self._deal(output, tensor, group, axis, purpose, async_op, lambda own, rank: own[rank])

    def all_gather(
        self, output: Tensor, tensor: Tensor, group: Any, *, axis: str, purpose: str, async_op: bool = False
    ) -> Any:
        return self._deal(output, tensor, group, axis, purpose, async_op, lambda own, rank: own)

    def _deal(
        self, output: Tensor, tensor: Tensor, group: Any, axis: str, purpose: str, async_op: bool, piece: Any
    ) -> Any:
        self.record(axis, purpose, output.numel() * output.element_size() // 2)
        pending = _Pending(lambda: group.deal(output, tensor, piece))
        if async_op:
            return pending
        pending.wait()
        return None


def _sum(slots: list[Tensor]) -> Tensor:
    total = slots[0].clone()
    for slot in slots[1:]:
        total += slot
    return total


def _largest(slots: list[Tensor]) -> Tensor:
    return torch.stack(slots).amax(0)


def run_replicas(count: int, train: Callable[[ThreadGroup], Any]) -> list[Any]:
    """`train(group)` on `count` threads; what each returned, by rank. Raises the first failure."""
    group, results, failures = ThreadGroup(count), [None] * count, []

    def work(rank: int) -> None:
        try:
            with group.replica(rank):
                results[rank] = train(group)
        except BaseException as error:
            failures.append(error)
            group.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        # Those that waited for the one that failed only say that the barrier broke.
        raise next((e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0])
    return results
