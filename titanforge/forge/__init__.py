"""FORGE: the optimizer runs where the weight gradient is made, so that no gradient is stored.

`plan` says at which granule a weight's gradient is consumed, `coverage` which weights can be, `sinks` consume.
Imports `titanforge.optim` and `titanforge.kernels`. `engine.attach` is the way in.
"""

from __future__ import annotations

from titanforge.forge.engine import ForgeOptimizer, attach
from titanforge.forge.plan import Granule, ParamPlan, Placement, Schedule, plan

__all__ = ["ForgeOptimizer", "Granule", "ParamPlan", "Placement", "Schedule", "attach", "plan"]
