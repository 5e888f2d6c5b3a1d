"""Which form a symmetric product takes: the triangular kernel, with which tile, or the library's product.

Half the products are saved where there are many tiles; where there are few, the diagonal and the library's
better tiles outweigh it. `symmetric.autotune_symmetric` measures on this machine and writes what
`choose_symmetric` reads.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from titanforge.kernels._triton import INTERPRET, cdiv, next_power_of_2
from titanforge.kernels.machine_cache import add_entry, cache_path, device_name, known_entries


@dataclass(frozen=True)
class SymmetricConfig:
    """Tiles of `block` x `block`, `block_k` of the summed axis a step."""

    block: int
    block_k: int
    warps: int
    stages: int


_DEFAULT = SymmetricConfig(128, 64, 8, 4)
_INTERPRETED = SymmetricConfig(16, 32, 4, 1)
_FEWEST_TILES = 4
"""Tiles along an edge below which the whole product is taken: (T + 1) / 2T of the work, at the lesser rate of
a kernel without the library's hand-made schedule, is no gain."""
_FEWEST_PROGRAMS = 96
"""Below so many tiles in all, most multiprocessors would idle."""


def candidates() -> list[SymmetricConfig]:
    """What the autotuner tries."""
    return [
        SymmetricConfig(128, 64, 8, 4),
        SymmetricConfig(128, 64, 4, 4),
        SymmetricConfig(128, 128, 8, 3),
        SymmetricConfig(128, 32, 4, 4),
    ]


def tuned_path() -> Path:
    """File of what was measured: `symmetric.json` beside the tiles of the fused kernel."""
    return cache_path().with_name("symmetric.json")


def _key(name: str, m: int, k: int, count: int) -> str:
    return f"{name}/{m}x{k}/{next_power_of_2(max(count, 1))}"


@functools.cache
def _tuned() -> dict[str, SymmetricConfig | None]:
    return known_entries(tuned_path(), lambda entry: None if entry is None else SymmetricConfig(**entry))


def choose_symmetric(m: int, k: int, count: int, device: torch.device) -> SymmetricConfig | None:
    """For X X^T of `count` matrices X [m, k]: the kernel's tile, or None for the library's product."""
    if device.type != "cuda":
        return _INTERPRETED if INTERPRET else None
    tuned = _tuned()
    if tuned:
        key = _key(device_name(device), m, k, count)
        if key in tuned:
            return tuned[key]
    edge = cdiv(m, _DEFAULT.block)
    programs = count * edge * (edge + 1) // 2
    return _DEFAULT if edge >= _FEWEST_TILES and programs >= _FEWEST_PROGRAMS else None


def remember_symmetric(
    m: int, k: int, count: int, device: torch.device, best: SymmetricConfig | None
) -> None:
    """Add one entry to the file."""
    entry = None if best is None else asdict(best)
    add_entry(tuned_path(), _key(device_name(device), m, k, count), entry)
    _tuned.cache_clear()
