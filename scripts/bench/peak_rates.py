"""Which of the peak rates that were tried is best, and whether a better one may lie beyond them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def best_rate(losses: Mapping[float, float]) -> float:
    """The rate of the lowest loss. NaN, of a rate that diverged, is above all."""
    return min(losses, key=lambda rate: math.inf if math.isnan(losses[rate]) else losses[rate])


def beyond(losses: Mapping[float, float]) -> float | None:
    """The next rate past the edge at which the best one lies, as far off as its neighbour; None: it lies
    between others, or nothing was compared."""
    rates = sorted(losses)
    if len(rates) < 2 or all(math.isnan(loss) for loss in losses.values()):
        return None
    best = best_rate(losses)
    neighbour = {rates[0]: rates[1], rates[-1]: rates[-2]}.get(best)
    return None if neighbour is None else best * best / neighbour


def next_rate(losses: Mapping[float, float]) -> float | None:
    """What an arm tries after these: beyond the edge at which its best rate lies, else between the best and
    the better of its neighbours (geometric mean). Of rates that all diverged: well below the lowest. None:
    there are fewer than two.
    """
    rates = sorted(losses)
    if len(rates) < 2:
        return None
    if all(math.isnan(loss) for loss in losses.values()):
        return rates[0] * rates[0] / rates[-1]
    further = beyond(losses)
    if further is not None:
        return further
    best = best_rate(losses)
    index = rates.index(best)
    neighbour = best_rate({rate: losses[rate] for rate in (rates[index - 1], rates[index + 1])})
    return math.sqrt(best * neighbour)


def losses_of_rates(probes: Iterable[Mapping[str, Any]]) -> dict[str, dict[float, float]]:
    """Validation loss by rate of each arm, from results with `arm`, `lr` and `validation_loss`."""
    found: dict[str, dict[float, float]] = {}
    for probe in probes:
        found.setdefault(probe["arm"], {})[probe["lr"]] = probe["validation_loss"]
    return found


def at_edge(losses: Mapping[float, float]) -> str:
    """A sentence where a better rate may lie beyond those that were tried; else nothing."""
    further = beyond(losses)
    if further is None:
        return ""
    best = best_rate(losses)
    which = "lowest" if further < best else "highest"
    return f"The best, {best:.3g}, is the {which} that was tried: {further:.3g} may be better."
