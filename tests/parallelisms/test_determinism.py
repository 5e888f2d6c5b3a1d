"""Seeding and the deterministic switch."""

from __future__ import annotations

import random

import pytest
import torch

from titanforge.parallelisms import set_determinism


@pytest.fixture(autouse=True)
def _restore():
    yield
    torch.use_deterministic_algorithms(False)


def _draw(seed: int, **options) -> tuple[float, float]:
    set_determinism(seed, options.pop("deterministic", False), False, torch.device("cpu"), **options)
    return random.random(), torch.rand(()).item()


def test_same_seed_same_numbers_and_an_offset_changes_them():
    assert _draw(7) == _draw(7)
    assert _draw(7)[1] != _draw(8)[1]
    assert _draw(7, rank_offset=1) == _draw(8)


def test_deterministic_refuses_what_has_no_deterministic_form():
    set_determinism(0, True, False, torch.device("cpu"))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    set_determinism(0, True, True, torch.device("cpu"))
    assert torch.is_deterministic_algorithms_warn_only_enabled()
