"""The training loader: the same global batches for any number of ranks and workers, resumable anywhere.

Workers walk streams (`packing.Stream`) and send samples with the position after each; the loader assembles
micro-batches and remembers the positions of what it has handed out. What was loaded ahead is forgotten by
that.
"""

from __future__ import annotations

import atexit
import hashlib
import signal
import traceback
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from titanforge.data.dealing import rank_samples, worker_of
from titanforge.data.errors import DataError, DataExhausted
from titanforge.data.mix import TrainingMix
from titanforge.data.packing import Batch, Stream, StreamState, make_batch, state_width
from titanforge.data.split import Walk
from titanforge.data.state import check_complete, initial_streams
from titanforge.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Plan:
    """Everything that decides which samples a rank hands out when, but for the position."""

    mix: TrainingMix
    walk: Walk
    tokenizer: Tokenizer
    seq_len: int
    local_batch_size: int
    global_batch_size: int
    dp_rank: int
    dp_world: int

    @property
    def num_streams(self) -> int:
        return self.walk.num_streams

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.global_batch_size // (self.local_batch_size * self.dp_world)


_SECONDS_AFTER_SIGTERM = 120


class _Part(NamedTuple):
    """A worker's share of one micro-batch: `rows` [n] of it, stacked samples [n, T + 1], and, [n, 1 + width],
    the stream and its state after each, and, [n, sources], the tokens that it took of each source."""

    rows: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray
    states: np.ndarray
    taken: np.ndarray


class _Failure(NamedTuple):
    """What a worker could not load. Sent in place of the micro-batch it belongs to, because exceptions lose
    their text between processes, and because samples before it are still good."""

    exhausted: bool
    message: str


class _Parts(IterableDataset):
    """Parts of the micro-batches from a position on, without end; each worker those of its own streams."""

    def __init__(self, plan: Plan, consumed: int, streams: np.ndarray) -> None:
        self._plan, self._consumed, self._start = plan, consumed, streams

    def __iter__(self) -> Iterator[_Part | _Failure]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        try:
            yield from self._parts(worker, workers)
        except DataExhausted as error:
            yield _Failure(True, str(error))
        except DataError as error:
            yield _Failure(False, str(error))
        except Exception:
            yield _Failure(False, f"the data loader failed:\n{traceback.format_exc()}")

    def _parts(self, worker: int, workers: int) -> Iterator[_Part]:
        plan, consumed = self._plan, self._consumed
        lanes = plan.mix.lanes(plan.walk)
        streams: dict[int, Stream] = {}
        while True:
            samples = rank_samples(
                consumed, plan.global_batch_size, plan.num_streams, plan.dp_rank, plan.dp_world
            )
            for first in range(0, len(samples), plan.local_batch_size):
                batch = samples[first : first + plan.local_batch_size]
                mine = worker_of(batch % plan.num_streams, plan.num_streams, plan.dp_world, workers) == worker
                yield self._part(batch, np.flatnonzero(mine), streams, lanes)
            consumed += plan.global_batch_size

    def _part(self, batch: np.ndarray, rows: np.ndarray, streams: dict[int, Stream], lanes: Any) -> _Part:
        plan = self._plan
        length = plan.seq_len + 1
        part = _Part(
            rows,
            np.empty((len(rows), length), np.int32),
            np.empty((len(rows), length), bool),
            np.empty((len(rows), 1 + state_width(len(plan.mix))), np.int64),
            np.empty((len(rows), len(plan.mix)), np.int64),
        )
        for i, row in enumerate(rows):
            ordinal, index = divmod(int(batch[row]), plan.num_streams)
            if index not in streams:
                streams[index] = Stream(
                    index,
                    lanes(index),
                    plan.mix.weights,
                    plan.tokenizer,
                    plan.seq_len,
                    seed=plan.walk.seed,
                    state=StreamState.from_row(self._start[index].tolist()),
                )
            stream = streams[index]
            while stream.state.ordinal < ordinal:  # samples that other ranks take
                stream.next_sample()
            assert stream.state.ordinal == ordinal, "samples of a stream are dealt in order"
            before = list(stream.tokens_taken)
            part.tokens[i], part.starts[i] = stream.next_sample()
            part.states[i] = [index, *stream.state.row]
            part.taken[i] = np.subtract(stream.tokens_taken, before)
        return part


def _as_is(item: Any) -> Any:
    return item


def _start_worker(worker: int) -> None:
    """Let the trainer decide about signals: Ctrl-C and a scheduler's SIGTERM reach workers too, and a
    worker that dies of them takes the step away that the trainer wants to finish and save. A second SIGTERM
    does end it, or the time that a step may take."""

    def postpone(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(_SECONDS_AFTER_SIGTERM)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, postpone)


def _close_at_exit(loader: weakref.ref[TrainLoader]) -> None:
    if alive := loader():
        alive.close()


@dataclass(eq=False)
class TrainLoader:
    """Iterator over one rank's micro-batches (`Batch`), endless with `data.repeat`.

    Raises DataError naming file and line when the micro-batch that needs a broken record is due,
    DataExhausted when the data has ended; then again at every further call.
    """

    plan: Plan
    document_mask: bool
    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    samples: int = 0
    """Samples consumed by all ranks in the steps done."""
    _streams: torch.Tensor = field(init=False)
    _micro_batch: int = field(init=False, default=0)
    _pending: list[list[int]] = field(init=False, default_factory=list)
    """Streams and their states after the samples of the step under way."""
    _taken: np.ndarray = field(init=False)
    """Tokens of each source in the steps done, as `source_tokens` tells them. int64 [sources]."""
    _pending_taken: list[np.ndarray] = field(init=False, default_factory=list)
    _parts: Iterator[_Part | _Failure] | None = field(init=False, default=None)
    _error: DataError | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._streams = initial_streams(self.plan.num_streams, state_width(len(self.plan.mix)))
        self._taken = np.zeros(len(self.plan.mix), np.int64)

    @property
    def epoch(self) -> int:
        """Passes completed by the farthest of the streams that this rank has read."""
        return int(self._streams[:, 0].max())

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error
        try:
            batch = self._assemble()
        except DataError as error:
            self._error = error
            self.close()
            raise
        self._micro_batch += 1
        if self._micro_batch == self.plan.micro_batches:
            self._finish_step()
        return batch

    def _finish_step(self) -> None:
        # In the order of each stream's samples: a stream is one worker's, so its last state stays.
        for index, *state in self._pending:
            self._streams[index] = torch.tensor(state)
        self._taken += sum(self._pending_taken)
        self._pending.clear()
        self._pending_taken.clear()
        self._micro_batch = 0
        self.samples += self.plan.global_batch_size

    def _assemble(self) -> Batch:
        plan = self.plan
        parts = [self._next_part() for _ in range(max(1, self.num_workers))]
        tokens = np.empty((plan.local_batch_size, plan.seq_len + 1), np.int32)
        starts = np.empty(tokens.shape, bool)
        for part in parts:
            tokens[part.rows], starts[part.rows] = part.tokens, part.starts
        self._pending += [row for part in parts for row in part.states.tolist()]
        self._pending_taken += [part.taken.sum(axis=0) for part in parts]
        batch = make_batch(tokens, starts, self.document_mask)
        return batch.pin_memory() if self.pin_memory else batch

    def _next_part(self) -> _Part:
        if self._parts is None:
            self._parts = iter(self._start())
        try:
            part = next(self._parts)
        except (RuntimeError, StopIteration) as error:
            raise DataError(f"a data-loading worker of rank {self.plan.dp_rank} has died: {error}") from error
        if isinstance(part, _Failure):
            raise (DataExhausted if part.exhausted else DataError)(part.message)
        return part

    def _start(self) -> StatefulDataLoader:
        parts = _Parts(self.plan, self.samples, self._streams.numpy().copy())
        workers: dict[str, Any] = {}
        if self.num_workers:
            # Before multiprocessing's own handler, which waits for workers after one SIGTERM.
            atexit.register(_close_at_exit, weakref.ref(self))
            # spawn: fork would copy the locks of communication threads in mid-use and a CUDA context that
            # is no use; a fork server dies of a SIGTERM to the process group, and its workers with it.
            workers = {
                "multiprocessing_context": "spawn",
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
                "worker_init_fn": _start_worker,
            }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*set_vital.*")  # torchdata 0.11 with torch 2.13
            return StatefulDataLoader(
                parts,
                batch_size=None,
                num_workers=self.num_workers,
                collate_fn=_as_is,
                # Positions travel with the parts, so the loader takes no snapshots of its own.
                snapshot_every_n_steps=0,
                # Starting workers must not draw from the global generator.
                generator=torch.Generator().manual_seed(0),
                **workers,
            )

    def source_tokens(self) -> dict[str, int]:
        """Tokens of the run that came from each source of a mix, by name; empty for a single source.

        The sum over all data-parallel ranks is the whole run's, on any number of ranks and after resuming:
        each rank counts its own samples, and rank 0 what had been read when the state was saved.
        """
        if len(self.plan.mix) == 1:
            return {}
        return dict(zip(self.plan.mix.labels, self._taken.tolist()))

    def _identity(self) -> dict[str, int]:
        plan = self.plan
        name = hashlib.blake2b(plan.tokenizer.name.encode(), digest_size=7).digest()
        return {
            "seed": plan.walk.seed,
            "shuffle": int(plan.walk.shuffle),
            **plan.mix.identity(plan.walk),
            "tokenizer": int.from_bytes(name),
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's view of the position after the last step: ints, and `streams`, int64 [V, n]. To be
        joined by `merge_states`. Raises RuntimeError within a step: its samples are then neither done nor
        due."""
        if self._micro_batch:
            raise RuntimeError(
                f"state_dict() after micro-batch {self._micro_batch} of {self.plan.micro_batches}: "
                "a position in the data exists only between steps"
            )
        return {"samples": self.samples, "streams": self._streams.clone(), **self._identity()}

    def load_state_dict(self, merged: dict[str, Any]) -> None:
        """Go on from a merged state, possibly of another number of ranks, workers, or another global batch
        size.

        Raises ValueError naming the key if the order of the data has changed, RuntimeError if the state is
        not a merged one.
        """
        keys = {
            "seed": "debug.seed",
            "shuffle": "data.shuffle",
            "held_out": "data.validation_fraction",  # before the number of documents, which follows from it
            "documents": "training.dataset or training.dataset_path (number of documents)",
            "source": "training.dataset or training.dataset_path (names, sizes, lengths of the files)",
            "weights": "data.sources (weights)",
            "window": "data.shuffle_window",
            "tokenizer": "data.tokenizer",
        }
        hint = "Restore it, or start the data over with checkpoint.exclude_from_loading = ['dataloader']."
        if len(merged["streams"]) != self.plan.num_streams:
            raise ValueError(
                f"data.num_streams is {self.plan.num_streams}, in the checkpoint "
                f"{len(merged['streams'])}. {hint}"
            )
        identity = self._identity()
        if merged["streams"].shape[1] != self._streams.shape[1] or set(identity) != set(merged) & set(keys):
            raise ValueError(
                f"data.sources: the checkpoint's position is in another number or kind of sources. {hint}"
            )
        for name in (name for name in keys if name in identity):
            if merged[name] != identity[name]:
                raise ValueError(f"{keys[name]} differs from the checkpoint's ({name}). {hint}")
        check_complete(merged)
        self.close()
        self.samples = int(merged["samples"])
        self._streams = merged["streams"].clone()
        self._taken[:] = 0
        if len(self.plan.mix) > 1 and self.plan.dp_rank == 0:
            self._taken[:] = self._streams[:, 7::3].sum(dim=0).numpy()
        self._error = None

    def close(self) -> None:
        """Stop the workers. The next batch starts new ones, at the first micro-batch of a step that was not
        done."""
        self._parts = None
        self._pending.clear()
        self._pending_taken.clear()
        self._micro_batch = 0
