"""Learning-rate schedule: linear warm-up, stable, decay to a floor. A pure function of the step.

Nothing is kept between steps, so a resumed run has nothing to restart; `total_steps` lets a run stop early
and keep the schedule of the long one.
"""

from __future__ import annotations

import math


def lr_factor(
    step: int,
    warmup_steps: int,
    total_steps: int,
    decay_ratio: float | None = None,
    decay_type: str = "linear",
    min_lr_factor: float = 0.0,
) -> float:
    """Share of the peak learning rate at 0-based `step`.

    Warm-up is (step + 1) / warmup_steps. The decay takes the last round(total_steps x decay_ratio) steps, or
    all after warm-up when `decay_ratio` is None, and ends as if the schedule were one step longer: the last
    step trains at a rate above the floor. Past the end the floor holds (the peak, without a decay). A warm-up
    or decay that does not fit in `total_steps` is cut short, as torchtitan does. Raises ValueError for values
    outside their range.
    """
    if step < 0:
        raise ValueError(f"step must not be negative, not {step}")
    if total_steps < 1:
        raise ValueError(f"lr_scheduler.total_steps must be at least 1, not {total_steps}")
    if warmup_steps < 0:
        raise ValueError(f"lr_scheduler.warmup_steps must not be negative, not {warmup_steps}")
    if decay_ratio is not None and not 0.0 <= decay_ratio <= 1.0:
        raise ValueError(f"lr_scheduler.decay_ratio must be between 0 and 1, not {decay_ratio}")
    if not 0.0 <= min_lr_factor <= 1.0:
        raise ValueError(f"lr_scheduler.min_lr_factor must be between 0 and 1, not {min_lr_factor}")
    if decay_type not in ("linear", "sqrt", "cosine"):
        raise ValueError(f"lr_scheduler.decay_type must be linear, sqrt or cosine, not {decay_type!r}")

    warmup_steps = min(warmup_steps, total_steps)
    decay_steps = total_steps - warmup_steps
    if decay_ratio is not None:
        decay_steps = min(round(total_steps * decay_ratio), decay_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    # One virtual stable step, so that the last real step does not train at the floor.
    decay_start = total_steps + 1 - decay_steps
    if decay_steps == 0 or step < decay_start:
        return 1.0
    progress = min((step + 1 - decay_start) / decay_steps, 1.0)
    if decay_type == "linear":
        factor = 1.0 - progress
    elif decay_type == "sqrt":
        factor = 1.0 - math.sqrt(progress)
    else:
        factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr_factor + (1.0 - min_lr_factor) * factor
