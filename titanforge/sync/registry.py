"""Sync policies by name."""

from __future__ import annotations

from collections.abc import Callable

from titanforge.sync.every_step import EveryStep
from titanforge.sync.policy import SyncPolicy

POLICIES: dict[str, Callable[[float], SyncPolicy]] = {
    "every_step": lambda bucket_mib: EveryStep(bucket_mib),
}
"""Builders `(bucket_mib) -> policy` by the value of sync.policy."""


def build_sync_policy(policy: str, bucket_mib: float) -> SyncPolicy:
    """The policy of that name; ValueError with the valid names otherwise."""
    if policy not in POLICIES:
        raise ValueError(f"sync.policy = {policy!r} is no sync policy; valid: {', '.join(POLICIES)}")
    return POLICIES[policy](bucket_mib)
