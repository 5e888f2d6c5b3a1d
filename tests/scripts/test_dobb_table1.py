"""The script of the Dobb paper's Table 1: its metric, which way its rows go, and one row of each panel."""

from __future__ import annotations

import math

import pytest
import torch

from scripts.papers import dobb_table1


def test_orthogonality_and_effective_rank_are_those_of_the_caption() -> None:
    q = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)).double()).Q
    assert dobb_table1.orthogonality(3 * q[:, :5]) == pytest.approx(1)
    assert dobb_table1.orthogonality(q[:, :3] @ q[:3]) == pytest.approx(math.sqrt(3 / 12))
    assert dobb_table1.effective_rank(torch.ones(7)) == pytest.approx(100)
    for target in (80, 20):
        values = dobb_table1.with_effective_rank(96, target)
        assert dobb_table1.effective_rank(values) == pytest.approx(target, abs=1e-3)


def test_the_sign_gains_the_further_the_spectrum_is_from_flat() -> None:
    """At 96 instead of 768, where the numbers are near the paper's and their order is the same."""
    found = dobb_table1.rows(96, seed=0)
    panels = {key: [row for row in found if row[0] == key] for key in "ab"}
    assert [len(rows) for rows in panels.values()] == [4, 6]
    for _, _, (of_y, of_sign), _ in panels["a"]:
        assert of_sign > of_y
    for column in (0, 1):
        falling = [row[2][column] for row in panels["b"]]
        assert falling == sorted(falling, reverse=True)
        assert falling == pytest.approx([row[3][column] for row in panels["b"]], abs=0.05)
    gains = [sign - columns for _, _, (sign, columns), _ in panels["b"]]
    assert gains == sorted(gains) and gains[-1] > 0.05


def test_a_row_of_each_panel_is_the_papers_at_its_size() -> None:
    """The flattest of (a) and the steepest of (b); the whole table takes seven seconds."""
    generator = torch.Generator().manual_seed(0)
    size, near = 768, dobb_table1.TOLERANCE
    assert dobb_table1.panel_a(size, 80, generator) == pytest.approx(dobb_table1.PANEL_A[80], abs=near)
    assert dobb_table1.panel_b(size, 22, generator) == pytest.approx(dobb_table1.PANEL_B[22], abs=near)
