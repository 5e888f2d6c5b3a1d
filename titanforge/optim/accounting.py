"""What rules of matrices send and store for one m x n matrix, as scalars (Dobb, section 5 and appendix C).

Payloads are logical: without the factors of a collective's algorithm and without bytes per scalar, and apart
from forward, backward and the data-parallel sum of gradients. With a Dobb block inside one shard. What ranks
really hand over is less where matrices are dealt to them: see `exchanges.step_payload`.
"""

from __future__ import annotations

import math
from typing import Literal

from titanforge.optim.matrix_options import DobbOptions

ShardedAxis = Literal["none", "output", "input"]
"""Axis of the matrix that shards split: m is the output axis, n the input axis."""


def dion_rank(rows: int, columns: int, rank_fraction: float) -> int:
    """r = max(1, floor(rho min(m, n)))."""
    return max(1, math.floor(rank_fraction * min(rows, columns)))


def cross_shard_payload(
    name: str,
    rows: int,
    columns: int,
    sharded: ShardedAxis,
    *,
    rank_fraction: float = 1.0,
    dobb: DobbOptions | None = None,
) -> int:
    """Scalars that devices with different shards of the matrix exchange in a step (Tables 3 and 7).

    Dobb's second moments, once each T steps over ranks with other data, are `second_moment_entries`. Raises
    ValueError for a rule that is no rule of matrices.
    """
    if name not in ("adamw", "muon", "scion", "dion", "rmnp", "dobb"):
        raise ValueError(f"no accounting for optimizer.name = {name!r}")
    if sharded == "none" or name == "adamw":
        return 0
    if name in ("muon", "scion"):
        return rows * columns
    if name == "dion":
        return dion_rank(rows, columns, rank_fraction) * (rows + columns)
    if name == "rmnp":  # squared norms of rows that are cut
        return rows if sharded == "input" else 0
    dobb = dobb or DobbOptions()
    if dobb.norm == "linf":
        return 0
    # A coefficient column runs along the output axis for side A, along the input axis for side G.
    if dobb.side == "A":
        return columns if sharded == "output" else 0
    return rows if sharded == "input" else 0


def second_moment_entries(rows: int, columns: int, dobb: DobbOptions) -> int:
    """Scalars of one matrix's block second moment, sent once per refresh: n^2 / B, or m^2 / B for side G."""
    length = columns if dobb.side == "A" else rows
    blocks = length // dobb.block_width if dobb.block_width else dobb.blocks
    return length * length // blocks


def state_entries(
    name: str, rows: int, columns: int, *, rank_fraction: float = 1.0, dobb: DobbOptions | None = None
) -> int:
    """Scalars that stay from step to step: momentum, Dion's factor, Dobb's second moment and basis."""
    momentum = rows * columns
    if name in ("muon", "scion", "rmnp"):
        return momentum
    if name == "adamw":
        return 2 * momentum
    if name == "dion":
        return momentum + dion_rank(rows, columns, rank_fraction) * min(rows, columns)
    if name == "dobb":
        return momentum + 2 * second_moment_entries(rows, columns, dobb or DobbOptions())
    raise ValueError(f"no accounting for optimizer.name = {name!r}")
