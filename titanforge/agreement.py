"""What ranks agree on between steps: tokens, failures, signals. Always all of them, or seldom where replicas
train by themselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from titanforge.checkpoint import CheckpointError
from titanforge.data import IGNORED, Batch

if TYPE_CHECKING:
    from titanforge.trainer import Trainer

logger = logging.getLogger(__name__)

_PART_OF_TIMEOUT = 4
_NEVER = 2**62


class GlobalBatch(NamedTuple):
    """A step's data.

    batches: this rank's micro-batches; none if its replica has no data left and only keeps step with others.
    tokens: valid target tokens of each replica; unless they are `known`, those of this rank's and 0 else.
    known: whether replicas have agreed on the numbers.
    """

    batches: list[Batch]
    tokens: list[int]
    known: bool


class Agreement:
    """Fetches each step's data and has ranks agree on it, so that they all go on, stop or fail together.

    All ranks agree before a step that is known to synchronise replicas, and after an evaluation, a save or an
    alarm. In between each replica goes on by itself: its ranks talk to one another, not to other replicas. A
    signal, or the end of a rank's data, waits for the next agreement, and a replica without data keeps step
    until then. All ranks also agree early enough that none waits for longer than a
    quarter of `job.stop_timeout_seconds` (and of `comm.train_timeout_seconds`) as fast as steps went so far.
    """

    def __init__(self, trainer: Trainer) -> None:
        config, dims = trainer.config, trainer.dims
        self.trainer = trainer
        self._replicas = dims.degree("dp_replicate")
        self._replica = dims.get_mesh("dp_replicate").get_local_rank()
        self._by_themselves = self._replicas > 1 and config.sync.policy != "every_step"
        self._group = trainer.runtime.host_group(dims.ranks_by_replica() if self._by_themselves else [])
        self._bound = min(config.job.stop_timeout_seconds, config.comm.train_timeout_seconds)
        self._bound /= _PART_OF_TIMEOUT
        self._next = 0  # the step before which all ranks agree at the latest
        self._last = (trainer.step, time.monotonic())
        # Since all ranks agreed:
        self._alone = False  # whether replicas have taken steps
        self._tokens = 0  # of this rank in them
        self._replica_tokens = 0  # of this replica in them
        self._replica_sources = [0] * len(trainer.loader.source_tokens())
        self._positions: dict[int, dict[str, Any]] = {}  # in the data before each
        self._failure: Exception | None = None
        self._failed_at = 0  # the first step that this replica has no data for
        self._idle = False  # all ranks of this replica know that

    @property
    def attention(self) -> bool:
        """Whether this rank has something to tell the others."""
        return bool(self._failed_at or self.trainer.stop_signal.received)

    def soon(self) -> None:
        """Have all ranks agree before the next step; call it on all of them."""
        self._next = 0

    def settle(self) -> None:
        """Tell one another, between steps, what replicas have done by themselves.

        Raises what `next_batch` does for a rank without data.
        """
        if self._alone:
            self._agree(0)
        self.soon()

    def next_batch(self) -> GlobalBatch:
        """The data of the coming step.

        Raises:
            Interrupted: a rank was signalled; what was trained is saved.
            PeerFailure: a rank has no data, likewise; on that rank, its own error.
        """
        trainer, step = self.trainer, self.trainer.step + 1
        all_ranks = not self._by_themselves or trainer.sync.syncs_next or step >= self._next
        batches: list[Batch] = []
        position: dict[str, Any] = {}
        if not self._idle:
            position = self._positions[step] = trainer.loader.state_dict()
            # After a signal, which the data's workers may have died of, no more than has to be trained.
            if not (all_ranks and trainer.stop_signal.received):
                batches = self._fetch(step)
        own = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
        if not all_ranks:
            return self._of_replica(batches, own)
        tokens, signalled = self._agree(own)
        if signalled:
            trainer.stop_signal.heeded()
            trainer.save_between_steps(position)
            trainer.interrupt(signalled)
        return GlobalBatch(batches, tokens, True)

    def _fetch(self, step: int) -> list[Batch]:
        with self.trainer.metrics.data_loading():
            try:
                return [next(self.trainer.loader) for _ in range(self.trainer.micro_batches)]
            except Exception as error:
                self._failure, self._failed_at = error, step
                return []

    def _of_replica(self, batches: list[Batch], own: int) -> GlobalBatch:
        """What the ranks of this replica have, as they alone agree on it."""
        self._alone = True
        if not self._idle:
            sums, maxima = [own, *self.trainer.loader.source_tokens().values()], [self._failed_at]
            if self._group is not None:
                sums, maxima = self.trainer.runtime.agree(sums, maxima, self._group, axis="replica")
            total, *self._replica_sources = (count // self.trainer.dims.sharers for count in sums)
            self._failed_at = maxima[0]
            self._idle = self._failed_at > 0
        tokens = [0] * self._replicas
        if self._idle:
            return GlobalBatch([], tokens, False)
        self._tokens += own
        self._replica_tokens += total
        tokens[self._replica] = total
        return GlobalBatch(batches, tokens, False)

    def told(self, batch: GlobalBatch) -> list[int]:
        """What this replica has to tell where a step that it takes by itself is logged, to be summed over
        replicas: tokens of the step, tokens of all steps that not all ranks know of, tokens of each source.
        """
        own = batch.tokens[self._replica]
        if batch.known:
            return [own, own, *(0 for _ in self._replica_sources)]
        return [own, self._replica_tokens, *self._replica_sources]

    def heard(self, batch: GlobalBatch, totals: Sequence[int]) -> int:
        """Take over the sums; returns the tokens of the run up to this step."""
        _, tokens, *sources = totals
        if not batch.known:
            self.trainer.source_tokens = dict(zip(self.trainer.source_tokens, sources))
        return self.trainer.tokens_seen + tokens

    def _agree(self, own: int) -> tuple[list[int], int]:
        """All ranks together: each replica's tokens of the coming step, and a signal's number or 0."""
        trainer, runtime = self.trainer, self.trainer.runtime
        tokens = [0] * self._replicas
        tokens[self._replica] = own
        from_sources = trainer.loader.source_tokens()
        sums = [*tokens, *from_sources.values()]
        maxima = [runtime.rank + 1 if self._failure else 0, trainer.stop_signal.received]
        if self._by_themselves:
            sums.append(self._tokens)
            maxima += [-(self._failed_at or _NEVER), self._milliseconds_of_a_step()]
        sums, (failed, signalled, *more) = runtime.agree(sums, maxima)
        # Ranks that share sequences have all counted the same tokens.
        totals = [count // trainer.dims.sharers for count in sums]
        trainer.source_tokens = dict(zip(from_sources, totals[self._replicas :]))
        failed_at = trainer.step + 1
        if self._by_themselves:
            failed_at, milliseconds = -more[0], more[1]
            trainer.tokens_seen += totals[-1]
            self._alone, self._tokens, self._replica_tokens = False, 0, 0
            self._last = (trainer.step, time.monotonic())
            # Nothing is known of the first step, or it took long and says little: then of the next one.
            steps = int(1e3 * self._bound / milliseconds) if milliseconds else 1
            self._next = trainer.step + 1 + max(1, steps)
        if failed:
            self._fail(failed - 1, failed_at)
        self._positions.clear()
        return totals[: self._replicas], signalled

    def _milliseconds_of_a_step(self) -> int:
        """The mean since all ranks agreed, at least 1; 0 if there was no step."""
        step, then = self._last
        steps = self.trainer.step - step
        return 1 + int(1e3 * (time.monotonic() - then) / steps) if steps else 0

    def _fail(self, rank: int, failed_at: int) -> None:
        """End the run for want of data, which all ranks know of between two steps.

        What was trained since the last save need not be lost. Other replicas may have gone on without the one
        that failed: the resumed run reads again what they alone have read.
        """
        trainer = self.trainer
        # Nothing trained, nothing to save: a checkpoint would only tie a corrected dataset to this one.
        if trainer.step > trainer.loaded_step:
            try:
                trainer.save_between_steps(self._positions[failed_at])
            except CheckpointError as error:  # on every rank alike; it must not hide the other
                logger.error("%s", error)
        trainer.runtime.raise_together(self._failure, rank, "loading data")
