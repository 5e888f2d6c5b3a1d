"""Table 1 of the Dobb paper: how orthogonal updates of synthetic 768 x 768 gradients are (its appendix D).

    python scripts/papers/dobb_table1.py [--seed N] [--size N]

Prints each row beside the paper's number; exits 1 where one is off by more than 0.005 at its size. The
updates are those of titanforge's Dobb rule, with the exact eigenbasis of the activations.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from titanforge.optim.dobb.rule import Dobb
from titanforge.optim.matrix_options import DobbOptions, MatrixOptions

PANEL_A = {80: (0.736, 0.775), 50: (0.412, 0.643), 20: (0.205, 0.543), 5: (0.109, 0.457)}
"""Effective rank of Y in percent: orthogonality of Y and of sign(Y)."""
PANEL_B = {
    88: (0.854, 0.864),
    80: (0.846, 0.849),
    72: (0.839, 0.834),
    55: (0.820, 0.796),
    38: (0.796, 0.748),
    22: (0.762, 0.680),
}
"""Effective rank of G in percent: orthogonality with sign and with column normalisation."""
TOLERANCE = 0.005
POSITIONS = 2048
ACTIVATION_SHARE, ACTIVATION_POWER = 0.25, 0.94


def orthogonality(update: Tensor) -> float:
    """|O|_* / (sqrt(min(m, n)) |O|_F): 1 exactly when all singular values are equal."""
    values = torch.linalg.svdvals(update)
    return float(values.sum() / (math.sqrt(min(update.shape)) * values.square().sum().sqrt()))


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of the normalised values, as a percentage of their number."""
    p = values / values.sum()
    return float(torch.exp(-(p * p.log()).sum())) / len(values) * 100


def power_law(size: int, exponent: float) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64) ** -exponent


def with_effective_rank(size: int, target: float) -> Tensor:
    """The power law of that effective rank, by bisection on its exponent."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if effective_rank(power_law(size, middle)) > target else (low, middle)
    return power_law(size, low)


def orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Uniformly distributed with orthonormal columns."""
    q, r = torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def panel_a(size: int, target: float, generator: torch.Generator) -> tuple[float, float]:
    values = with_effective_rank(size, target)
    left, right = orthogonal(size, size, generator), orthogonal(size, size, generator)
    y = (left * values) @ right.T
    return orthogonality(y), orthogonality(torch.sign(y))


def panel_b(size: int, target: float, generator: torch.Generator) -> tuple[float, float]:
    tail = power_law(size, ACTIVATION_POWER)[1:]
    activation = torch.cat(
        [torch.tensor([ACTIVATION_SHARE]).double(), (1 - ACTIVATION_SHARE) * tail / tail.sum()]
    )
    output = with_effective_rank(size, target)
    n = POSITIONS
    basis = orthogonal(size, size, generator)
    x = math.sqrt(n) * (basis * activation.sqrt()) @ orthogonal(n, size, generator).T
    left = orthogonal(size, size, generator)
    d = math.sqrt(n) * (left * output.sqrt()) @ orthogonal(n, size, generator).T
    gradient = d @ x.T / n
    u = torch.linalg.eigh(x @ x.T / n).eigenvectors[None]
    updates = []
    for norm in ("linf", "l2"):
        rule = Dobb(MatrixOptions(dobb=DobbOptions(norm=norm)))
        updates.append(orthogonality(rule.direction(gradient, (u, u), torch.empty(0))[0]))
    return updates[0], updates[1]


def rows(size: int, seed: int) -> list[tuple[str, int, tuple[float, float], tuple[float, float]]]:
    """(panel, effective rank, measured, the paper's) of each row."""
    generator = torch.Generator().manual_seed(seed)
    tables: list[tuple[str, dict[int, tuple[float, float]], Callable]] = [
        ("a", PANEL_A, panel_a),
        ("b", PANEL_B, panel_b),
    ]
    return [
        (panel, target, make(size, target, generator), paper)
        for panel, table, make in tables
        for target, paper in table.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=768)
    arguments = parser.parse_args()
    worst = 0.0
    print("panel  effective rank  measured         paper            difference")
    for panel, target, measured, paper in rows(arguments.size, arguments.seed):
        off = max(abs(a - b) for a, b in zip(measured, paper))
        worst = max(worst, off)
        print(
            f"({panel})    {target:>3} %            {measured[0]:.3f}  {measured[1]:.3f}     {paper[0]:.3f}  "
            f"{paper[1]:.3f}     {off:.3f}"
        )
    print(f"largest difference {worst:.4f}, tolerance {TOLERANCE}")
    return int(arguments.size == 768 and worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
