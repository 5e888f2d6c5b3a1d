"""The schedule against values computed by hand."""

from __future__ import annotations

import math

import pytest

from titanforge.optim.lr_schedule import lr_factor


def factors(total: int, warmup: int, **options: object) -> list[float]:
    return [lr_factor(step, warmup, total, **options) for step in range(total)]  # pyright: ignore


def test_linear_warmup_then_decay() -> None:
    # 10 steps, 2 of warm-up, 8 of decay that would end one step after the last.
    expected = [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert factors(10, 2) == pytest.approx(expected)


def test_warmup_stable_decay() -> None:
    # decay_ratio 0.4: four decay steps, the first of them virtual.
    expected = [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert factors(10, 2, decay_ratio=0.4) == pytest.approx(expected)


def test_sqrt_and_cosine() -> None:
    progress = [1 / 4, 2 / 4, 3 / 4]
    sqrt = factors(10, 2, decay_ratio=0.4, decay_type="sqrt")
    assert sqrt[-3:] == pytest.approx([1 - math.sqrt(p) for p in progress])
    cosine = factors(10, 2, decay_ratio=0.4, decay_type="cosine")
    assert cosine[-3:] == pytest.approx([0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4])


def test_floor() -> None:
    assert factors(10, 2, decay_ratio=0.4, min_lr_factor=0.1)[-1] == pytest.approx(0.1 + 0.9 * 0.25)
    assert lr_factor(10, 2, 10, 0.4, "linear", 0.1) == pytest.approx(0.1)
    assert lr_factor(10_000, 2, 10, 0.4, "linear", 0.1) == pytest.approx(0.1)


def test_cut_short_where_it_does_not_fit() -> None:
    assert factors(4, 10) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    # warm-up 3 of 4: one decay step is left, and that one is virtual
    assert factors(4, 3, decay_ratio=1.0) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert factors(4, 0, decay_ratio=0.0) == [1.0] * 4
    assert factors(1, 0) == [1.0]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"total_steps": 0}, "lr_scheduler.total_steps"),
        ({"warmup_steps": -1}, "lr_scheduler.warmup_steps"),
        ({"decay_ratio": 1.5}, "lr_scheduler.decay_ratio"),
        ({"decay_type": "step"}, "lr_scheduler.decay_type"),
        ({"min_lr_factor": -0.1}, "lr_scheduler.min_lr_factor"),
    ],
)
def test_errors_name_the_key(options: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        lr_factor(**{"step": 0, "warmup_steps": 2, "total_steps": 10, **options})
