"""When second moments are captured, reduced and turned into bases: every T steps (Dobb, algorithm 3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titanforge.kernels.cholesky_qr import write_blocks
from titanforge.kernels.second_moments import largest_sums, take_sums
from titanforge.optim.dobb.reduction import Captured, Reduction, buckets
from titanforge.optim.dobb.refresh import eigenbases, refresh_bases
from titanforge.optim.dobb.rule import Dobb
from titanforge.optim.dobb.stacks import Stack
from titanforge.optim.links import DataLinks


@dataclass
class Fresh:
    """What a refresh has found for a stack, not yet in its states. failed: blocks, int64 scalar. sound: bool
    [N], of statistics that are finite: looked at beside backward, where the bases are found there.
    """

    stack: Stack
    statistics: Tensor
    bases: Tensor
    failed: Tensor
    sound: Tensor


class BasisKeeper(ABC):
    """Statistics and bases of all weights under Dobb: what sets them from step to step.

    steps: int64 scalar on the CPU, steps begun so far; saved with the states. failed_blocks: int64 scalar on
    the device, factorisations of this rank so far that failed, whose blocks kept their basis. all_failed: of
    all ranks, as far as they have told: with shards up to the refresh before the last.
    """

    reads_gradients: ClassVar[bool] = False

    def __init__(self, rule: Dobb, weights: Sequence[Captured], stacks: Sequence[Stack]) -> None:
        """stacks: from `stacked`, of these weights."""
        self.rule = rule
        self.options = rule.dobb
        self.weights = list(weights)
        self.stacks = list(stacks)
        self.steps = torch.zeros((), dtype=torch.int64)
        self._device = self.weights[0].basis.device
        self.failed_blocks = torch.zeros((), dtype=torch.int64, device=self._device)
        self.all_failed = self.failed_blocks
        self.links = DataLinks()
        self._begun = 0
        self._refreshing = False
        self._flags: Tensor | None = None
        self._flags_ready: torch.cuda.Event | None = None
        for weight in self.weights:
            weight.cold = list(range(len(weight.basis)))

    def begin_step(self, num_micro_batches: int) -> None:
        """A step of so many micro-batches starts."""
        self._refreshing = self._begun % self.options.period == 0
        self._begun += 1
        self.steps.fill_(self._begun)

    @property
    def refreshing(self) -> bool:
        """Whether this step's bases are still to come from `refresh`."""
        return self._refreshing

    def before_backward(self, micro_batch_index: int) -> None:  # noqa: B027
        """Before the backward of a micro-batch, after its forward."""

    def loaded(self) -> None:
        """The states, `steps` among them, were set from outside."""
        self._begun = int(self.steps)
        self._note_cold()
        self._read_cold()

    @abstractmethod
    def refresh(self, applies: Tensor, grad_scale: Tensor | None) -> None:
        """Statistics and bases of this step into the states; after backward, before weights are updated.

        applies: scalar on the device; where 0, states keep their bits (the capture of that step is lost).
        grad_scale: scalar on the device that multiplies gradients; None for 1.
        """

    # ------------------------------------------------------------ from statistics to bases

    def find_bases(
        self, stack: Stack, statistics: Tensor, seen: Tensor, largest: Tensor | None = None
    ) -> Fresh:
        """Algorithm 2 for a stack with its new statistics [N, w, w] and bool [N]: what was ever captured.

        largest: of `take_sums`; without it a pass over the statistics finds it. Reads states and writes none;
        the host does not wait, and has read which blocks are cold.
        """
        old, new, cold = stack.basis, statistics.to(stack.statistic.dtype), stack.cold()
        # A norm reads them once; `isfinite` of all would write them out twice.
        norms = largest_sums(new) if largest is None else largest
        sound = torch.isfinite(norms)
        if len(cold) == len(old):  # the first refresh of a run
            bases, failed = eigenbases(new, old, self.options)
            return Fresh(stack, new, torch.where(seen[:, None, None], bases, old), failed, sound)
        bases, failed = refresh_bases(new, old, self.options, norms)
        if cold:  # experts that had no token as yet may have had their first
            first, missed = eigenbases(new[cold], old[cold], self.options)
            bases[cold] = torch.where(seen[cold, None, None], first, old[cold])
            failed = failed + missed
        return Fresh(stack, new, bases, failed, sound)

    def commit(self, fresh: Sequence[Fresh], applies: Tensor) -> None:
        """Write what was found into the states, where the step is applied."""
        applied = applies != 0
        for found in fresh:
            stack = found.stack
            write_blocks(stack.basis, found.bases, applied.expand(len(stack.basis)))
            write_blocks(stack.statistic, found.statistics, found.sound & applied)
            self.failed_blocks += torch.where(applied, found.failed, 0)
        if any(weight.cold for weight in self.weights):
            self._note_cold()

    # Whether a block was ever captured decides how its basis is found, on the host; the device is asked right
    # after a refresh and answers by the next one, so that nobody waits. Until then a block counts as cold.

    def _note_cold(self) -> None:
        flags = [(stack.statistic == 0).all(dim=-1).all(dim=-1) for stack in self.stacks]
        if not flags:  # this rank has no block of any weight
            return
        self._flags = torch.cat(flags).to("cpu", non_blocking=True)
        if self._device.type == "cuda":
            self._flags_ready = torch.cuda.Event()
            self._flags_ready.record()

    def _read_cold(self) -> None:
        if self._flags is None:
            return
        if self._flags_ready is not None:
            self._flags_ready.synchronize()
        flags, self._flags = self._flags, None
        known = iter(flags.tolist())
        for stack in self.stacks:
            for weight in stack.weights:
                weight.cold = [block for block in range(len(weight.basis)) if next(known)]


class DobbCapture(BasisKeeper):
    """The hooks of all weights under Dobb, the reduction of what they add up, and refreshes.

    A step is `begin_step`, forwards and backwards with `before_backward` between the two, and `refresh`
    before weights are updated. Steps t = 0, T, 2T, ... capture; in all others, and outside training, hooks do
    nothing. What was captured is reduced behind the backward that follows (side A) or from within it (G).

    A refresh reads no gradient: with `overlap_refresh` and side A it follows the reductions at once, on a
    stream of its own and beside backward, and `refresh` is left to write the states. The bits are the same.
    Cold blocks, whose eigendecomposition the host waits for, and side G stay in `refresh`.
    """

    def __init__(self, rule: Dobb, weights: Sequence[Captured], stacks: Sequence[Stack]) -> None:
        super().__init__(rule, weights, stacks)
        self._buckets, self._apart = buckets(self.weights), False
        self._micro_batches = self._captured_micro_batches = 1
        self._next_bucket = 0
        self._watched = True  # readers may be open, by this or an earlier optimizer
        self._gate = torch.ones((), dtype=torch.bool)
        self._missing: list[set[str]] = []
        self._sums: list[tuple[Tensor, Tensor]] | None = None  # of the stacks, where nothing is sent
        self._reductions: list[Reduction] = []
        self._prepared: list[Fresh] = []
        self._last: Reduction | None = None  # of weights that shards share, the latest
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def begin_step(self, num_micro_batches: int) -> None:
        if self.links.experts is not None and not self._apart:  # experts have other partners
            self._apart = True
            dense = [weight for weight in self.weights if not weight.experts]
            self._buckets = buckets(dense) + buckets([weight for weight in self.weights if weight.experts])
        super().begin_step(num_micro_batches)
        self._micro_batches = num_micro_batches
        self._captured_micro_batches = 1 if self.options.capture == "first" else num_micro_batches
        self._reductions, self._prepared, self._missing = [], [], []
        self._next_bucket = len(self._buckets)
        self._sums = None
        alone = self._refreshing and self._alone()
        if alone:
            self._sums = [stack.new_sums() for stack in self.stacks]
        if self._refreshing or self._watched:
            for weight in self.weights:
                if not alone:
                    weight.sums = weight.new_sums() if self._refreshing else None
                if weight.sums is None:
                    weight.reader.close()
                else:
                    weight.reader.open(*weight.sums, self._gate)
                weight.reader.when_gradient_seen(None)
            self._watched = self._refreshing
        if self._refreshing:
            if not alone:
                self._next_bucket = 0
            self._gate.data.fill_(True)

    def _alone(self) -> bool:
        """Whether this rank keeps what it captures, and all of it: nothing is sent, nor copied to be."""
        every = (self.links, self.links.experts)
        if any(links is not None and (links.reduce_scatter or links.all_reduce) for links in every):
            return False
        return all(len(weight.basis) == weight.blocks > 0 for weight in self.weights)

    def before_backward(self, micro_batch_index: int) -> None:
        """After the last forward that counts all inputs are there; the output gradients follow in its
        backward, and each exchange is launched as soon as all of its weights have been seen, in one order on
        all ranks (of compiled blocks, which do not tell, in `refresh`).

        What runs again in backward as compiled code stays open until `refresh`, for it must be the code that
        ran; the gate keeps it from adding anything.
        """
        if not self._refreshing:
            return
        # Of the next forward, or of this backward; as `.data`, for autograd may have saved it.
        next_captured = micro_batch_index + (1 if self.options.side == "A" else 0)
        self._gate.data.fill_(next_captured < self._captured_micro_batches)
        if micro_batch_index + 1 < self._captured_micro_batches:
            return
        for weight in self.weights:
            if not weight.reader.runs_again:
                weight.reader.close()  # of side A this frees the sums, once they are on their way
        if self.options.side == "A" or micro_batch_index >= self._captured_micro_batches:
            self._launch(len(self._buckets))
            if self._overlaps():
                self._prepare_beside()
            return
        if self._sums is not None:
            return
        self._missing = [{weight.name for weight in bucket} for bucket in self._buckets]
        for index, bucket in enumerate(self._buckets):
            for weight in bucket:
                weight.reader.when_gradient_seen(_Tick(self, index, weight.name))

    def _overlaps(self) -> bool:
        options = self.options
        if not options.overlap_refresh or options.side != "A" or options.iterations == 0:
            return False
        if self._side is None and (self.links.reduce_scatter or self.links.all_reduce):
            return False  # the caller would wait for the exchange before backward, not behind it
        self._read_cold()
        return not any(weight.cold for weight in self.weights)

    def _prepare_beside(self) -> None:
        if self._side is None:
            self._prepare()
            return
        # What it reads comes from the current stream; what it allocates is read when `refresh` has waited.
        self._side.wait_stream(torch.cuda.current_stream())
        for made in self._sums or ():
            for tensor in made:  # dropped before that stream has read them: backward would get their memory
                tensor.record_stream(self._side)
        with torch.cuda.stream(self._side):
            self._prepare()

    def gradient_seen(self, bucket: int, name: str) -> None:
        self._missing[bucket].discard(name)
        ready = self._next_bucket
        while ready < len(self._buckets) and not self._missing[ready]:
            ready += 1
        self._launch(ready)

    def _launch(self, end: int) -> None:
        """Launch the exchanges of all buckets before `end` that have not been."""
        with torch.no_grad():
            while self._next_bucket < end:
                bucket = self._buckets[self._next_bucket]
                self._next_bucket += 1
                links = self.links.experts if bucket[0].experts else None
                self._reductions.append(Reduction(bucket, links or self.links, self.failed_blocks))
                if links is None:
                    self._last = self._reductions[-1]

    def _captured(self) -> Iterator[tuple[Stack, Tensor, Tensor, list[Tensor]]]:
        """Each stack with the sums [N, w, w], its own to overwrite, and positions [N] of its blocks, and for
        side G each weight's positions []; once for a refresh. The current stream waits for the reductions.
        """
        if self._sums is not None:
            sums, self._sums = self._sums, None
            for stack, (totals, counts) in zip(self.stacks, sums):
                of_weights = []
                for weight in stack.weights:
                    if self.options.side == "G" and weight.sums is not None:
                        of_weights.append(weight.sums[1].sum())
                    weight.sums = None
                yield stack, totals, counts[stack.position_of], of_weights
            return
        found = {part[0].name: part[1:] for reduction in self._reductions for part in reduction.wait()}
        self._reductions = []
        for stack in self.stacks if found else ():
            sums, counts, positions = zip(*(found.pop(weight.name) for weight in stack.weights))
            yield stack, torch.cat(sums), torch.cat(counts), list(positions)

    @torch.no_grad()
    def _prepare(self) -> None:
        """C <- beta_C C + S and the bases from it, for weights whose reduction was launched; `refresh` writes
        them. The current stream waits for the reductions.
        """
        self._read_cold()
        for stack, sums, counted, positions in self._captured():
            factor = None
            if self.options.side == "G":
                # Losses were divided by the tokens of the whole step; the paper's g_i were not. Of experts:
                # by the rows of all of them, whose scale no eigenvector depends on.
                share = self._micro_batches / self._captured_micro_batches
                rows = [one.expand(size) for one, size in zip(positions, stack.sizes)]
                factor = (torch.cat(rows) * share) ** 2
            # No position at all (an expert without tokens) leaves the statistic as it is.
            largest = take_sums(sums, counted, stack.statistic, self.options.decay, factor)
            self._prepared.append(self.find_bases(stack, sums, counted > 0, largest))

    @torch.no_grad()
    def refresh(self, applies: Tensor, grad_scale: Tensor | None) -> None:
        if not self._refreshing:
            return
        for weight in self.weights:
            weight.reader.close()
        self._launch(len(self._buckets))
        if self.links.shards > 1 and self._last is not None:
            self.all_failed = self._last.beside().to(torch.int64)
        self._prepare()
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        self._refreshing = False
        prepared, self._prepared = self._prepared, []
        self.commit(prepared, applies)


@dataclass(frozen=True)
class _Tick:
    """One weight's output gradients of the last captured micro-batch were added."""

    capture: DobbCapture
    bucket: int
    name: str

    def __call__(self) -> None:
        self.capture.gradient_seen(self.bucket, self.name)
