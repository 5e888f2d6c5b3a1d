"""Sync policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from titanforge.sync.encoded import exchange_code
from titanforge.sync.every_step import EveryStep
from titanforge.sync.local_steps import StatesEveryStep
from titanforge.sync.policy import LocalUpdate, LocalUpdateKind, SyncPolicy
from titanforge.sync.rmmc import Rmmc
from titanforge.sync.scheduled import Scheduled


class SyncOptions(Protocol):
    """The keys of `[sync]`; `titanforge.config.sections.Sync` has them."""

    @property
    def policy(self) -> str: ...
    @property
    def reduce(self) -> str: ...
    @property
    def exchange_dtype(self) -> str: ...
    @property
    def local_update(self) -> LocalUpdateKind: ...

    interval: int
    threshold: float
    local_lr: float | None
    warmup_steps: int
    max_interval: int
    average_parameters: bool
    low_rank: bool
    bucket_mib: float


def _local_options(options: SyncOptions) -> dict[str, Any]:
    return {
        "local": LocalUpdate(options.local_update, options.local_lr),
        "warmup_steps": options.warmup_steps,
        "max_interval": options.max_interval,
        "average_parameters": options.average_parameters,
        "low_rank": options.low_rank,
        "bucket_mib": options.bucket_mib,
        "code": exchange_code(options.exchange_dtype),
    }


def _every_step(options: SyncOptions) -> SyncPolicy:
    code = exchange_code(options.exchange_dtype)
    if options.reduce == "states":
        return StatesEveryStep(low_rank=options.low_rank, bucket_mib=options.bucket_mib, code=code)
    return EveryStep(options.bucket_mib, code)


POLICIES: dict[str, Callable[[SyncOptions], SyncPolicy]] = {
    "every_step": _every_step,
    "scheduled": lambda options: Scheduled(options.interval, **_local_options(options)),
    "rmmc": lambda options: Rmmc(options.threshold, **_local_options(options)),
}
"""Builders by the value of sync.policy."""


def build_sync_policy(options: SyncOptions) -> SyncPolicy:
    """The policy of the `[sync]` section; ValueError with the valid names for an unknown one."""
    if options.policy not in POLICIES:
        raise ValueError(f"sync.policy = {options.policy!r} is no sync policy; valid: {', '.join(POLICIES)}")
    return POLICIES[options.policy](options)
