"""When replicas talk: policies that own every collective over dp_replicate, and the ledger of them all.

Imports torch only. A policy sees a model, a process group and the ledger; it knows no optimizer.
"""

from __future__ import annotations

from titanforge.sync.every_step import EveryStep
from titanforge.sync.ledger import CommLedger
from titanforge.sync.policy import SyncPolicy
from titanforge.sync.registry import POLICIES, build_sync_policy

__all__ = ["POLICIES", "CommLedger", "EveryStep", "SyncPolicy", "build_sync_policy"]
