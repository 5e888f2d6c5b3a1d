"""Replicas synchronise when the momentum of some layer changes: CurvaDion, section 2."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from titanforge.sync.local_steps import LocalSteps
from titanforge.sync.policy import WORLD_AXIS, Replicated

_TOP_LAYERS = 3


class Rmmc(LocalSteps):
    """Relative maximum momentum change above a threshold (CurvaDion, equation 1).

    RMMC of layer l at step t = | |M(t)| - |M(t-1)| | / |M(t-1)|, Frobenius norms over the whole weight: the
    squares are summed over the ranks of a replica first. |M(t)| is this replica's, after A and before the
    decision; |M(t-1)| is what the step before left, so the averaged momentum's after a sync. A zero previous
    norm counts as an infinite change, unless the momentum is still zero. The greatest value of any layer on
    any rank is compared with the threshold: a sync where it is above. One all-reduce(max) of two fp32 values
    is all that a step without a sync sends between replicas: the greatest value, and 2 if a rank leaves the
    step out (its loss or gradient is not finite), else 1 if one needs attention (a signal, no data).

    Where a kernel does A it leaves the squares of each momentum, and the decision reads no momentum again.
    Otherwise, and after momenta were averaged, norms are one pass over them.

    A layer is a weight of a rule that waits for the decision; if no rule of the run does, a weight that has
    a first moment.
    """

    name = "rmmc"

    def __init__(self, threshold: float, **options: Any) -> None:
        super().__init__(**options)
        if math.isnan(threshold):
            raise ValueError("sync.threshold = nan: must be a number (inf: never reached)")
        self.threshold = threshold
        self.last = self._largest_since_read = 0.0
        self._previous = self._change = torch.zeros(0)
        self._layers: list[Replicated] | None = None
        self._names: frozenset[str] = frozenset()
        self._squares: Mapping[str, Tensor] = {}
        self._squares_in_order = torch.zeros(0)
        self._answer: _Answer | None = None
        self._limits = torch.zeros(0)

    def attach(self, *args: Any, **options: Any) -> None:
        self._squares = {}
        super().attach(*args, **options)
        if self._group is not None and not self.layers:
            raise ValueError(
                'sync.policy = "rmmc" watches the momentum, and no weight has one: take an optimizer.name '
                'with momentum, or sync.policy = "scheduled"'
            )
        if self._group is not None:
            names, self._squares_in_order = self._optimizer.watch_momenta()
            self._squares = dict(zip(names, self._squares_in_order.unbind(0)))
            limits = [self.threshold, 1.0]  # of the greatest change; of what a rank has to tell
            self._limits = torch.tensor(limits, dtype=torch.float64, device=self._previous.device)

    def close(self) -> None:
        super().close()
        self._layers = self._answer = None

    @property
    def layers(self) -> list[Replicated]:
        """This rank's part of each momentum that is watched, once attached."""
        if self._layers is None:
            momenta = [item for item in self._tensors if item.slot == "m"]
            self._layers = [item for item in momenta if item.splits] or momenta
            self._names = frozenset(item.name for item in self._layers)
        return self._layers

    @property
    def squares(self) -> Mapping[str, Tensor]:
        """The sums of squares that kernels leave of the momenta they update, by the layer's name: fp32
        scalars on the device, of this rank's part. A layer without one has its momentum read for each
        decision.
        """
        return self._squares

    @torch.no_grad()
    def norms(self, unchanged: Collection[str] = ()) -> Tensor:
        """fp32 [layers], on the device; the same bits on all ranks of a replica.

        unchanged: names of weights whose momenta are as the last A left them: A's own squares are taken where
            it has left any.
        """
        layers = self.layers
        if not layers:
            return torch.zeros(0)
        known = self._squares.keys() & unchanged
        if self._names <= known:
            total = self._squares_in_order.clone()  # the layers are the weights that it is of
        elif known:
            read = [item for item in layers if item.name not in known]
            squares = {name: self._squares[name] for name in known}
            squares |= {item.name: square for item, square in zip(read, _squares_of(read).unbind(0))}
            total = torch.stack([squares[item.name] for item in layers])
        else:
            total = _squares_of(layers)
        self._ledger.all_reduce(total, self._shard_group, axis="replica", purpose="rmmc norms")
        return total.sqrt()

    @torch.no_grad()
    def ask(self, apply_flag: Tensor | None = None, attention: bool = False) -> Tensor:
        norms, previous = self.norms(self._squares), self._previous
        self._change = relative_change(norms, previous)
        self._previous = norms
        # No more than 8 bytes: gloo's ring goes round once more for each rank's share of a larger tensor.
        needs = float(attention)
        flag = norms.new_full((), needs) if apply_flag is None else torch.where(apply_flag != 0, needs, 2.0)
        told = torch.stack((self._change.max(), flag))
        # Over all ranks, since not all of a replica's need to see the same layers.
        self._ledger.all_reduce(told, self._world_group, axis=WORLD_AXIS, purpose="decision", op=ReduceOp.MAX)
        self._answer = _Answer(told)
        # In float64, as the host compares what it reads: there the threshold is what was configured.
        wanted, left_out = (told > self._limits).unbind()
        return wanted <= left_out

    def wants_sync(self, apply_flag: Tensor | None = None, attention: bool = False) -> bool:
        if self._answer is None:
            self.ask(apply_flag, attention)
            assert self._answer is not None
        self.last, heard = self._answer.read()
        self._answer = None
        self._left_out, self.alarm = heard > 1, heard > 0
        self._largest_since_read = max(self._largest_since_read, self.last)
        return self.last > self.threshold

    def will_sync(self) -> bool:
        return self.threshold < 0

    def watches_whole_steps(self) -> bool:
        return not any(item.splits for item in self.layers)

    def after_average(self, kept: Collection[str] = ()) -> None:
        self._previous = self.norms(kept)

    def event(self) -> dict[str, Any]:
        return {"sync/rmmc_max": self.last}

    def metrics(self) -> dict[str, Any]:
        if self._group is None:
            return {}
        figures = {"sync/rmmc_max": self._largest_since_read}
        self._largest_since_read = self.last
        if self._change.numel():
            names = [item.name for item in self.layers]
            values, places = self._change.topk(min(_TOP_LAYERS, len(names)))
            figures |= {
                f"sync/rmmc/{names[place]}": value for value, place in zip(values.tolist(), places.tolist())
            }
        return super().metrics() | figures

    def state_dict(self) -> dict[str, Any]:
        # The norm of the step before cannot be had from the momentum where U has changed it since.
        names = [item.name for item in self.layers]
        return super().state_dict() | {"norms": dict(zip(names, self._previous.tolist()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        norms, names = state.get("norms", {}), [item.name for item in self.layers]
        if names and all(name in norms for name in names):
            self._previous = torch.tensor([norms[name] for name in names], device=self._previous.device)


class _Answer:
    """What ranks have told one another, on its way to the host.

    told: fp32 on the device, complete once the current stream has come so far.
    """

    def __init__(self, told: Tensor) -> None:
        self._values, self._arrived = told, None
        if told.is_cuda:
            self._values = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            self._values.copy_(told, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(told.device))

    def read(self) -> list[float]:
        """Waits for it, but for nothing that was launched after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


def _squares_of(momenta: Sequence[Replicated]) -> Tensor:
    """fp32 [momenta]: the sums of squares of these parts, by a pass over them."""
    norms = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
        [item.tensor for item in momenta], 2.0, dtype=torch.float32
    )
    return torch.stack(list(norms)).square()


def relative_change(norms: Tensor, previous: Tensor) -> Tensor:
    """Equation 1, elementwise: infinite where the previous norm is 0 and the norm is not, or if undefined."""
    change = (norms - previous).abs_().div_(previous)
    change.masked_fill_(norms + previous == 0, 0.0)
    # A NaN would compare differently from rank to rank.
    return change.nan_to_num_(nan=math.inf, posinf=math.inf)
