"""FORGE: the optimizer runs where the weight gradient is made, so that no gradient is stored.

`plan` says at which granule a weight's gradient is consumed, `coverage` which weights can be, `sinks` consume
them. Imports `titanforge.optim` and `titanforge.kernels`, nothing else of ours.
"""

from __future__ import annotations

from titanforge.forge.arguments import Steps
from titanforge.forge.build import attach, build_forge_optimizer, preview
from titanforge.forge.engine import ForgeOptimizer
from titanforge.forge.plan import Granule, ParamPlan, Placement, Schedule, plan
from titanforge.forge.ranks import Ranks
from titanforge.forge.report import plan_report

__all__ = [
    "ForgeOptimizer",
    "Granule",
    "ParamPlan",
    "Placement",
    "Ranks",
    "Schedule",
    "Steps",
    "attach",
    "build_forge_optimizer",
    "plan",
    "plan_report",
    "preview",
]
