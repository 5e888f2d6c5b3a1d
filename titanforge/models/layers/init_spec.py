"""How a module says what its parameters start as. Data only: ``models.initialization`` draws the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0 and standard deviation ``std``, cut at ``cutoff`` standard deviations.

    Like ``torch.nn.init.trunc_normal_``, ``std`` is that of the normal before the cut (a cut at 3 lowers the
    real one by 1.3 %).
    """

    std: float
    cutoff: float = math.inf


InitSpec = Constant | Normal
