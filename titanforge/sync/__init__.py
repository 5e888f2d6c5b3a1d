"""When replicas talk: policies that own every collective over dp_replicate, and the ledger of them all.

Imports torch, and kernels for the codes of what is sent. A policy sees a model, a process group and the
ledger; it knows no optimizer.
"""

from __future__ import annotations

from titanforge.sync.every_step import EveryStep
from titanforge.sync.ledger import CollectiveFailed, CommLedger
from titanforge.sync.local_steps import LocalSteps, StatesEveryStep
from titanforge.sync.policy import LocalUpdate, Replication, SyncPolicy
from titanforge.sync.registry import POLICIES, build_sync_policy
from titanforge.sync.rmmc import Rmmc
from titanforge.sync.scheduled import Scheduled

__all__ = [
    "POLICIES",
    "CollectiveFailed",
    "CommLedger",
    "EveryStep",
    "LocalSteps",
    "LocalUpdate",
    "Replication",
    "Rmmc",
    "Scheduled",
    "StatesEveryStep",
    "SyncPolicy",
    "build_sync_policy",
]
