"""Replicas sum their gradients at every step, bucket by bucket, while backward still runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from titanforge.kernels.exchange_codes import ExchangeCode
from titanforge.sync.averaging import local_part, one_buffer
from titanforge.sync.encoded import EncodedSum
from titanforge.sync.ledger import CommLedger, Pending
from titanforge.sync.policy import REPLICATE_AXIS, Replication, SyncPolicy

_PURPOSE = "gradients"


@dataclass
class _Bucket:
    """Parameters reduced together; the layout is fixed when the policy attaches."""

    params: list[nn.Parameter]
    ready: set[int] = field(default_factory=set)
    buffer: Tensor | None = None
    pieces: list[Tensor] = field(default_factory=list)  # of the buffer, in the parameters' local shapes
    work: Pending | None = None
    encoded: EncodedSum | None = None
    events: list[torch.cuda.Event] = field(default_factory=list)
    done: bool = False

    @property
    def launched(self) -> bool:
        return self.buffer is not None or self.done

    def let_go(self) -> None:
        self.buffer = self.work = self.encoded = None
        self.pieces = []


class BackwardOptimizer(Protocol):
    """An optimizer that consumes gradients as they are complete."""

    def takes(self, param: Tensor) -> bool:
        """Whether it consumes this weight's gradient."""
        ...

    def take_reduced(self, arrived: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Consume weights' summed gradients, fp32 and of their local shapes."""
        ...


class EveryStep(SyncPolicy):
    """All-reduce of gradients over dp_replicate in fp32, overlapped with the last micro-batch's backward.

    Buckets take the parameters in reverse order, about the order in which backward finishes them, and go out
    in that fixed order on every rank, each when all its gradients of the last micro-batch have arrived. A
    parameter that got no gradient on this rank holds its bucket, and those behind it, back until
    `reduce_gradients`, which sends zeros for it: ranks may disagree about which weights were used (an expert
    without tokens) and still issue the same collectives. After the step all replicas hold a gradient for
    every parameter.

    Works on local tensors: with FSDP2 the shard of each parameter is reduced over the replicas of that shard.
    A reduced gradient comes back in the dtype of the gradient it replaces, after an fp32 sum.

    An optimizer that updates during backward takes the fp32 sum itself (`BackwardOptimizer`): a bucket's
    gradients are dropped when it leaves, its sums when the next one leaves, so that a few buckets are all
    there is of the gradient.

    bucket_mib: size of one reduction, in MiB of fp32.
    code: send codes in place of fp32 (`EncodedSum`): the first half of an exchange leaves with its bucket,
        the second with the next one.
    """

    def __init__(self, bucket_mib: float = 32.0, code: ExchangeCode | None = None) -> None:
        if not bucket_mib > 0:
            raise ValueError(f"sync.bucket_mib must be positive, not {bucket_mib}")
        self._bucket_elements, self._code = max(1, int(bucket_mib * 2**20 / 4)), code
        self._group: ProcessGroup | None = None
        self._ledger = CommLedger()
        self._optimizer: BackwardOptimizer | None = None
        self._buckets: list[_Bucket] = []
        self._handles: list[RemovableHandle] = []
        self._names: dict[int, str] = {}
        self._num_micro_batches = 1
        self._in_step = False
        self._armed = False
        self._next_bucket = 0

    def attach(
        self,
        model: nn.Module,
        replication: Replication | None,
        ledger: CommLedger,
        optimizer: Any = None,
    ) -> None:
        self.close()
        if replication is None or replication.replicas.size() == 1:
            return
        self._group, self._ledger = replication.replicas, ledger
        self._optimizer = optimizer if hasattr(optimizer, "take_reduced") else None
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        self._names = {id(param): name for name, param in named}
        self._buckets = self._deal([param for _, param in reversed(named)])
        for index, bucket in enumerate(self._buckets):
            for param in bucket.params:
                hook = self._hook(index)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def _deal(self, params: list[nn.Parameter]) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        filled = math.inf
        for param in params:
            size = local_part(param.detach()).numel()
            if filled + size > self._bucket_elements:
                buckets.append(_Bucket([]))
                filled = 0
            buckets[-1].params.append(param)
            filled += size
        return buckets

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(param: Tensor) -> None:
            if self._armed:
                self._arrived(index, param)

        return on_gradient

    def _arrived(self, index: int, param: Tensor) -> None:
        bucket = self._buckets[index]
        if bucket.launched:
            raise RuntimeError(
                f"the gradient of {self._names[id(param)]!r} grew after its bucket was reduced: one backward "
                "pass per micro-batch, and before_backward ahead of each"
            )
        bucket.ready.add(id(param))
        if param.is_cuda:
            # FSDP2 finishes a shard on a stream of its own; whoever launches the bucket may be on another.
            event = torch.cuda.Event()
            event.record()
            bucket.events.append(event)
        while self._next_bucket < len(self._buckets):
            waiting = self._buckets[self._next_bucket]
            if len(waiting.ready) < len(waiting.params):
                break
            self._launch(waiting)

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        """Sum a bucket over the replicas; asynchronous."""
        for event in bucket.events:
            event.wait()
        bucket.events.clear()
        assert self._group is not None
        locals_ = [local_part(param.detach()) for param in bucket.params]
        buffer, bucket.pieces = one_buffer(locals_, self._code, self._group.size())
        targets, sources = [], []
        for param, piece in zip(bucket.params, bucket.pieces):
            if param.grad is None:
                piece.zero_()
            else:
                targets.append(piece)
                sources.append(local_part(param.grad))
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        if self._optimizer is not None:
            for param in bucket.params:
                if self._optimizer.takes(param):
                    if param.grad is not None and param.is_cuda:
                        # Made on the stream of the hook it came by, which may use its memory again.
                        local_part(param.grad).record_stream(torch.cuda.current_stream())
                    param.grad = None
        bucket.buffer = buffer
        # Empty shards are empty on every replica of them, so none waits for the others here.
        if buffer.numel() and self._code is None:
            bucket.work = self._ledger.all_reduce(
                buffer, self._group, axis=REPLICATE_AXIS, purpose=_PURPOSE, async_op=True
            )
        elif buffer.numel() and self._code is not None:
            bucket.encoded = EncodedSum(buffer, self._code, self._group, self._ledger, _PURPOSE)
            bucket.encoded.scatter(async_op=True)
        index = self._next_bucket
        self._next_bucket += 1
        over = index - 1  # whose sums should be there by now
        if self._code is not None:
            if index >= 1 and (encoded := self._buckets[index - 1].encoded) is not None:
                encoded.gather(async_op=True)
            over -= 1
        if self._optimizer is not None and over >= 0:
            self._finish(self._buckets[over])

    def _finish(self, bucket: _Bucket) -> None:
        """Wait for a bucket's sums and hand them over."""
        if bucket.buffer is not None:
            if bucket.work is not None:
                bucket.work.wait()
            if bucket.encoded is not None:
                bucket.encoded.wait()
            self._write_back(bucket, bucket.buffer)
            bucket.let_go()
            bucket.done = True

    def begin_step(
        self, num_micro_batches: int, tokens_by_replica: Sequence[int] = (), agreed: bool = True
    ) -> None:
        self._num_micro_batches = num_micro_batches
        self._in_step = True
        self._armed = False
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.ready.clear()
            bucket.events.clear()
            bucket.let_go()
            bucket.done = False

    def before_backward(self, micro_batch_index: int) -> None:
        # Earlier micro-batches only accumulate: a gradient is complete on this replica after the last.
        self._armed = bool(self._buckets) and micro_batch_index == self._num_micro_batches - 1

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        self._armed = False
        if self._buckets and not self._in_step:
            raise RuntimeError("gradients were reduced already: begin_step must come before each step")
        self._in_step = False
        while self._next_bucket < len(self._buckets):
            self._launch(self._buckets[self._next_bucket])
        for bucket in self._buckets:
            self._finish(bucket)

    def _write_back(self, bucket: _Bucket, buffer: Tensor) -> None:
        targets, sources = [], []
        taken = []
        for param, piece in zip(bucket.params, bucket.pieces):
            if self._optimizer is not None and self._optimizer.takes(param):
                taken.append((param, piece))
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            targets.append(local_part(param.grad))
            sources.append(piece)
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        if taken and self._optimizer is not None:
            self._optimizer.take_reduced(taken)
        if buffer.is_cuda:
            # Allocated on the stream of whoever launched the bucket, read on this one.
            buffer.record_stream(torch.cuda.current_stream())

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._buckets, self._names = [], [], {}
        self._group = self._optimizer = None
        self._armed = False
