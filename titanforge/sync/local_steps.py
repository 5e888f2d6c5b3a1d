"""Replicas step by themselves between synchronisations; subclasses say when to synchronise.

A step is A, the decision, U. Rules whose A is affine in the gradient (Muon, Dion, Dobb, SGD with momentum)
fold their own replica's gradient into the momentum and wait: at a sync the momentum is averaged, the weights
too if they have come apart, and then every replica takes the same full update; otherwise each takes a local
step. All other rules take their whole step after the decision: at a sync on the mean gradient, once states
and weights that have come apart were averaged, otherwise on the replica's own (local SGD).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titanforge.kernels.exchange_codes import ExchangeCode
from titanforge.sync.averaging import average, local_part, share_copies
from titanforge.sync.encoded import SentBefore, sends_differences
from titanforge.sync.ledger import CommLedger
from titanforge.sync.policy import (
    REPLICATE_AXIS,
    WORLD_AXIS,
    LocalUpdate,
    Replicated,
    Replication,
    SplitOptimizer,
    SyncPolicy,
)

_AHEAD = 1 / 8
"""Of decisions. With Dion, whose launches keep the host as long as the GPU, a late launch costs about
an eighth of U (docs/sync.md): at more syncs than that, to run U twice at each costs more."""
_NEWEST = 1 / 8
"""What the latest decision counts for in their running mean."""


class LocalSteps(SyncPolicy):
    """Base of the policies that leave replicas alone for some steps.

    Gradients are means over the replica's own target tokens, and the mean over replicas weighs each by the
    tokens that it trained on since the last sync: a token counts the same wherever it was read.

    Between syncs a replica that leaves a step out (`apply_flag` 0) does so by itself: its weights and states
    keep their bits, its tokens do not count. No step becomes a sync while that is so: one that was wanted is
    made up for in the next step, on which replicas agree beforehand.

    local: what a rule that waits for the decision does on a step without communication.
    warmup_steps: the first steps of the run, all of which synchronise.
    max_interval: greatest number of consecutive local steps; 0: no bound.
    average_parameters: whether a sync averages weights (a forced one always does).
    low_rank: at a sync reduce momenta by their factors where the rule can (Dion). The update is that of the
        mean; the momenta themselves stay apart, with the same mean, until a forced sync averages them.
    bucket_mib: size of one reduction, in MiB of fp32.
    code: how what is formed anew for each exchange is sent: factors, and gradients of the rules that take
        whole steps. States and weights, which the mean overwrites, go as fp32 always.
    """

    name = "local"

    def __init__(
        self,
        *,
        local: LocalUpdate | None = None,
        warmup_steps: int = 0,
        max_interval: int = 0,
        average_parameters: bool = True,
        low_rank: bool = True,
        bucket_mib: float = 32.0,
        code: ExchangeCode | None = None,
    ) -> None:
        self._local, self._low_rank, self._code = local or LocalUpdate(), low_rank, code
        self._sent = SentBefore() if sends_differences(code) else None
        self._warmup_steps, self._max_interval = warmup_steps, max_interval
        self._average_parameters = average_parameters
        self._bucket_elements = max(1, int(bucket_mib * 2**20 / 4))
        self._group: ProcessGroup | None = None
        self._world_group: ProcessGroup | None = None
        self._shard_group: ProcessGroup | None = None
        self._ledger = CommLedger()
        self._replica, self._tokens, self._share = 0, [0], 1.0
        self._step_tokens = [0]
        self._told = True  # every replica knows the tokens of all of them since the last sync
        self._trained = torch.zeros((), dtype=torch.int64)  # this replica's, without steps left out
        self._left_out = self._owed = False
        # Local steps are launched before the decision is known while fewer than this of the recent ones were
        # for a sync, at which U then runs twice. On a CPU never: there it is not launched but done.
        self._ahead = 0.0
        self._recent_syncs = 0.0  # of decisions, as a running mean
        self._buffers: list[Tensor] = []
        self._events: list[dict[str, Any]] = []
        self._steps = self._syncs = 0
        self.local_steps = 0
        """Consecutive steps without a sync."""
        # Which weights replicas may disagree on: those of rules that split, and the others.
        self._apart = {True: False, False: False}
        self._momenta_apart = False
        self._drift: Tensor | float = 0.0

    # ---------------------------------------------------------------- what a policy is

    @abstractmethod
    def wants_sync(self, apply_flag: Tensor | None = None, attention: bool = False) -> bool:
        """The decision, after A and before U, once per step; the same answer on every rank. Arguments as of
        `step`. What `ask` has begun, if it was called, is waited for."""

    def ask(self, apply_flag: Tensor | None = None, attention: bool = False) -> Tensor | None:
        """Begin with the decision, before `wants_sync`, where the device takes it: launches, and the host
        waits for none of them. Arguments as of `step`.

        Returns a bool scalar on the device, the same on all ranks: whether the step is local, if it was not
        known before that it synchronises. None: there is nothing to wait for.
        """
        return None

    def will_sync(self) -> bool:
        """What `wants_sync` will say, where that does not depend on the step; False where it does."""
        return False

    def watches_whole_steps(self) -> bool:
        """Whether `wants_sync` looks at states of rules that do not wait for it."""
        return False

    def after_average(self, kept: Collection[str] = ()) -> None:
        """States were averaged, but for the momenta of the weights `kept`: these are as A has left them."""

    # ---------------------------------------------------------------- the contract

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
        if not getattr(optimizer, "splits_steps", False):
            raise ValueError(
                f"sync.policy = {self.name!r} needs a step that can be cut in two: set "
                'optimizer.implementation = "native" and forge.enable = false'
            )
        self._optimizer: SplitOptimizer = optimizer
        self._group, self._shard_group = replication.replicas, replication.shards
        self._world_group = replication.world or replication.replicas
        self._ledger = ledger
        self._replica, replicas = self._group.rank(), self._group.size()
        self._tokens, self._share = [0] * replicas, 1 / replicas
        self._tensors = list(optimizer.replicated_tensors())
        whole = {item.name for item in self._tensors if not item.splits}
        self._stepping = [param for name, param in model.named_parameters() if name in whole]
        self._buffers = _moving_buffers(model)
        device = self._tensors[0].tensor.device
        self._trained = torch.zeros((), dtype=torch.int64, device=device)
        self._ahead = _AHEAD if device.type == "cuda" else 0.0
        self.after_average()

    def close(self) -> None:
        self._group = None
        self._forget_sent()
        self._tensors: list[Replicated] = []
        self._stepping: list[nn.Parameter] = []

    @property
    def encodes(self) -> bool:
        factors = self._low_rank and any(item.factored and item.splits for item in self._tensors)
        return self._group is None or factors or bool(self._stepping)

    @property
    def syncs_next(self) -> bool:
        return self._group is None or self._sync_is_certain(self._steps + 1)

    @property
    def apart(self) -> bool:
        return self._group is not None and self.local_steps > 0

    @property
    def local_gradients(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._group is not None

    def gradient_divisor(self, tokens_by_replica: Sequence[int]) -> int:
        if self._group is None:
            return super().gradient_divisor(tokens_by_replica)
        return max(tokens_by_replica[self._replica], 1)

    def begin_step(
        self, num_micro_batches: int, tokens_by_replica: Sequence[int] = (), agreed: bool = True
    ) -> None:
        if self._group is None:
            return
        if len(tokens_by_replica) != len(self._tokens):
            raise ValueError(
                f"token counts of {len(tokens_by_replica)} replicas were given, there are {len(self._tokens)}"
            )
        self._tokens = [old + new for old, new in zip(self._tokens, tokens_by_replica)]
        self._step_tokens = list(tokens_by_replica)
        self._told &= agreed

    def before_backward(self, micro_batch_index: int) -> None:
        """Nothing: gradients stay where they are."""

    def reduce_gradients(self) -> None:
        """Nothing: gradients stay where they are."""

    def step(
        self,
        optimizer: Any,
        apply_flag: Tensor | None,
        grad_scale: Tensor | None,
        attention: bool = False,
    ) -> None:
        if self._group is None:
            super().step(optimizer, apply_flag, grad_scale)
            return
        self._steps += 1
        certain = self._sync_is_certain(self._steps)
        whole = self.watches_whole_steps() and not certain
        self._optimizer.accumulate_step(apply_flag, grad_scale, whole)
        self._momenta_apart |= self._low_rank and any(item.factored for item in self._tensors)
        own = self._step_tokens[self._replica]
        self._trained += own if apply_flag is None else own * (apply_flag != 0).to(self._trained)
        finished = not certain and self._finish_ahead(apply_flag, attention)
        reason = self._reason(apply_flag, attention)
        if not certain:
            self._recent_syncs += (float(reason is not None) - self._recent_syncs) * _NEWEST
        if reason is None:
            if not finished:
                self._optimizer.finish_step(self._local)
            self._apart = {True: True, False: True}
            self.local_steps += 1
            return
        self._apart[False] |= whole
        self._average(reason, weights=self._average_parameters, dense=not self._low_rank)
        if not whole:
            self._average_gradients()
        if self._sent is not None:
            self._sent.begin_step()
        self._optimizer.finish_step(mean=self._mean_of_factors if self._low_rank else None)

    def _finish_ahead(self, apply_flag: Tensor | None, attention: bool) -> bool:
        """Launch the local step before it is known whether the step is one; whether that was done.

        It takes effect only if the step is local (`finish_step_if`): then it is all that is left to do, else
        nothing has happened. A device that goes through launches by itself need not wait for the host to
        hear the decision and to launch U after it.
        """
        if self._recent_syncs >= self._ahead or not self._optimizer.finishes_if:
            return False
        is_local = self.ask(apply_flag, attention)
        if is_local is None:
            return False
        self._optimizer.finish_step_if(is_local, self._local)
        return True

    @property
    def _at_bound(self) -> bool:
        return bool(self._max_interval) and self.local_steps >= self._max_interval

    def _sync_is_certain(self, step: int) -> bool:
        """Whether this step synchronises, as is known without its gradients."""
        return step <= self._warmup_steps or self._at_bound or self._owed or self.will_sync()

    def _reason(self, apply_flag: Tensor | None, attention: bool) -> str | None:
        # Asked always: it keeps the policy's own history.
        wanted = self.wants_sync(apply_flag, attention)
        if self._steps <= self._warmup_steps:
            return "warm-up"
        if self._owed or (wanted and (self.will_sync() or not self._left_out)):
            return self.name
        if self._at_bound:
            return "max_interval"
        self._owed = wanted
        return None

    def synchronize(self, reason: str) -> None:
        if self._group is None:
            return
        self._forget_sent()  # a run that resumes from here knows nothing of it
        if self.local_steps or self._momenta_apart or any(self._apart.values()):
            self._average(reason, weights=True, dense=True)

    def _average(self, reason: str, weights: bool, dense: bool) -> None:
        """Average what replicas may disagree on. dense: also the momenta that go by their factors."""
        assert self._group is not None
        if not self._told:
            self._tell()
        if any(self._tokens):  # else nothing was trained on since the last sync, whose share holds
            self._share = _share(self._tokens, self._replica)
        states = [
            item.tensor
            for item in self._tensors
            if item.slot != "weight"
            and item.has_mean
            and (item.splits or self._apart[False])
            and (dense or not item.factored)
        ]
        # Only U writes these, so they differ where it ran by itself.
        bases = [item.tensor for item in self._tensors if not item.has_mean and self._apart[item.splits]]
        apart = [item.tensor for item in self._tensors if item.slot == "weight" and self._apart[item.splits]]
        self._mean(states, "states")
        share_copies(bases, self._group, self._ledger, purpose="states")
        self._drift = self._mean_of_weights(apart) if weights else float("nan")
        self._momenta_apart &= not dense
        if weights:
            if any(self._apart.values()):
                self._mean(self._buffers, "buffers")
            self._optimizer.write_weights()
            self._apart = {True: False, False: False}
        self.after_average(() if dense else {item.name for item in self._tensors if item.factored})
        self._syncs += 1
        self._events.append(
            {"sync": reason, "sync/local_steps": self.local_steps, "sync/drift": self._drift, **self.event()}
        )
        self.local_steps = 0
        self._tokens = [0] * len(self._tokens)
        self._trained.zero_()
        self._told, self._owed = True, False

    @torch.no_grad()
    def _tell(self) -> None:
        """Learn what the others have trained on since the last sync, and count steps alike from here on."""
        told = self._trained.new_zeros(3, len(self._tokens))
        told[0, self._replica] = self._trained
        told[1, self._replica] = self._step_tokens[self._replica]
        told[2, self._replica] = self._optimizer.step_count
        self._ledger.all_reduce(told, self._group, axis=REPLICATE_AXIS, purpose="tokens")
        self._tokens, self._step_tokens, counts = told.tolist()
        if len(set(counts)) > 1:  # a replica left steps out
            self._optimizer.set_step_count(max(counts))

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """Of the weights whose rules take whole steps."""
        if not self._stepping or self._group is None:
            return
        for param in self._stepping:
            if param.grad is None:  # a weight that was not used here may have been used elsewhere
                param.grad = torch.zeros_like(param)
        average(
            [local_part(param.grad) for param in self._stepping if param.grad is not None],
            _share(self._step_tokens, self._replica), self._group, self._ledger,
            purpose="gradients", bucket_elements=self._bucket_elements, code=self._code,
        )  # fmt: skip

    def _mean(
        self,
        tensors: Sequence[Tensor],
        purpose: str,
        measure: bool = False,
        code: ExchangeCode | None = None,
        sent: SentBefore | None = None,
    ) -> Tensor | None:
        assert self._group is not None
        return average(
            tensors, self._share, self._group, self._ledger,
            purpose=purpose, bucket_elements=self._bucket_elements, measure=measure, code=code, sent=sent,
        )  # fmt: skip

    def _mean_of_factors(self, tensors: Sequence[Tensor]) -> None:
        # Columns of a factor are of very different sizes, so that blocks of codes go along one.
        along = tensors if self._code is None else [tensor.mT for tensor in tensors]
        self._mean(along, "factors", code=self._code, sent=self._sent)

    def _forget_sent(self) -> None:
        if self._sent is not None:
            self._sent.forget()

    def _mean_of_weights(self, weights: list[Tensor]) -> Tensor | float:
        """Returns the drift: root mean square over replicas of |W_r - mean|, relative to |mean|."""
        if not weights:
            return 0.0
        squares = self._mean(weights, "weights", measure=True)
        assert squares is not None
        # Both sums hold once per replica, so their ratio is the mean over replicas.
        self._ledger.all_reduce(squares, self._world_group, axis=WORLD_AXIS, purpose="drift")
        return torch.where(squares[1] > 0, (squares[0] / squares[1]).sqrt(), torch.zeros_like(squares[0]))

    # ---------------------------------------------------------------- what is told of it

    def event(self) -> dict[str, Any]:
        """More about the sync that is happening, for its line in the log."""
        return {}

    def take_events(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def metrics(self) -> dict[str, Any]:
        if self._group is None:
            return {}
        return {
            "sync/rate": self._syncs / max(self._steps, 1),
            "sync/count": self._syncs,
            "sync/local_steps": self.local_steps,
            "sync/last_drift": self._drift,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "syncs": self._syncs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._syncs = state.get("steps", 0), state.get("syncs", 0)
        self.local_steps = 0
        # What a run before the load trained on and decided is not of the one that goes on.
        self._tokens, self._share = [0] * len(self._tokens), 1 / len(self._tokens)
        self._trained.zero_()
        self._told, self._left_out, self._owed = True, False, False
        self._recent_syncs = 0.0
        self._apart = {True: False, False: False}
        self._momenta_apart = False
        self._forget_sent()
        if self._group is not None:
            self.after_average()


def _moving_buffers(model: nn.Module) -> list[Tensor]:
    """Buffers that training moves (the bias of a router): those in floating point that a checkpoint keeps."""
    return [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and buffer.is_floating_point()
    ]


def _share(tokens: Sequence[int], replica: int) -> float:
    total = sum(tokens)
    return tokens[replica] / total if total else 1 / len(tokens)


class StatesEveryStep(LocalSteps):
    """Every step synchronises, by averaging states in place of gradients: `sync.reduce = "states"`."""

    name = "every_step"

    def wants_sync(self, apply_flag: Tensor | None = None, attention: bool = False) -> bool:
        return True

    def will_sync(self) -> bool:
        return True
