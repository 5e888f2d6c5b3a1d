"""Sums over replicas in few bits: an all-to-all of codes, the sum of one's own piece, an all-gather of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titanforge.kernels.exchange_codes import EXCHANGE_CODES, ExchangeCode, Sent, decode, encode, sum_pieces
from titanforge.sync.ledger import CommLedger, Pending
from titanforge.sync.policy import REPLICATE_AXIS


def exchange_code(name: str) -> ExchangeCode | None:
    """The code of a `sync.exchange_dtype`; None for float32, which is sent as it is. Raises ValueError for
    another name.
    """
    if name == "float32":
        return None
    if name not in EXCHANGE_CODES:
        valid = ", ".join(("float32", *EXCHANGE_CODES))
        raise ValueError(f"sync.exchange_dtype = {name!r} is none that replicas can send; valid: {valid}")
    return EXCHANGE_CODES[name]


def sends_differences(code: ExchangeCode | None) -> bool:
    """Whether factors go as differences from what was sent: 4 bits are too few for them, as measured
    (docs/sync.md). Gradients are new each time and never do."""
    return code is not None and code.bits < 8


def sent_bytes(name: str, values: int, replicas: int) -> int:
    """Bytes that a replica keeps of so many values of factors that it has sent. name: of the code."""
    kept = sends_differences(exchange_code(name))
    return round(4 * (2 + 1 / replicas) * values) if kept else 0


@dataclass
class SentBefore:
    """What the exchanges of a step have sent in earlier steps, for the differences of this one. They come in
    one order and size at every step."""

    _all: list[Sent] = field(default_factory=list)
    _next: int = 0

    def begin_step(self) -> None:
        self._next = 0

    def next(self, values: int, ranks: int, device: torch.device) -> Sent:
        """That of the next exchange, of so many values."""
        if self._next == len(self._all):
            self._all.append(Sent.nothing(values, ranks, device))
        sent = self._all[self._next]
        assert sent.own.numel() == values, "exchanges of a step have come in another order"
        self._next += 1
        return sent

    def forget(self) -> None:
        """Nothing was sent yet."""
        self._all.clear()


@dataclass
class EncodedSum:
    """An all-reduce over replicas whose values are sent as codes: see `titanforge.kernels.exchange_codes`.

    Three calls, in one order on all ranks: `scatter`, `gather`, `wait`. Each waits for the one before, so
    that other sums may be under way in between; `wait` gathers if nobody has.

    buffer: fp32 [values], whole blocks for each rank (`exchange_codes.padded`): after `wait` the sum, the
    same bits on all ranks. sent: to send differences.
    """

    buffer: Tensor
    code: ExchangeCode
    group: ProcessGroup
    ledger: CommLedger
    purpose: str
    sent: Sent | None = None
    _codes: Tensor | None = None
    _received: Tensor | None = None
    _pending: Pending | None = None
    _gathers: bool = False

    def scatter(self, factor: float = 1.0, async_op: bool = False) -> None:
        """Send each rank its piece of factor * buffer."""
        self._codes = encode(self.buffer, self.code, self.group.size(), factor, self.sent)
        self._received = self._codes.new_empty(self._codes.shape)
        self._pending = self.ledger.all_to_all(
            self._received, self._codes, self.group,
            axis=REPLICATE_AXIS, purpose=self.purpose, async_op=async_op,
        )  # fmt: skip

    def gather(self, async_op: bool = False) -> None:
        """Send the sum of the own piece to all."""
        self._arrive()
        assert self._codes is not None and self._received is not None
        values = self.buffer.numel() // self.group.size()
        own = sum_pieces(self._received, self.code, values, self.sent, self.group.rank())
        self._received, self._gathers = own, True  # held until it was sent
        self._pending = self.ledger.all_gather(
            self._codes, own, self.group, axis=REPLICATE_AXIS, purpose=self.purpose, async_op=async_op
        )

    def wait(self) -> None:
        """Fill the buffer with the sum."""
        if not self._gathers:
            self.gather()
        self._arrive()
        assert self._codes is not None
        decode(self._codes, self.code, self.buffer, self.sent)
        self._codes = self._received = None

    def _arrive(self) -> None:
        """Wait for the collective under way, whose tensors may lie in memory of another stream."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        for tensor in (self._codes, self._received):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
