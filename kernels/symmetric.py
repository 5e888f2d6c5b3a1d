"""Symmetric products X X^T, batched: on a GPU half of the tiles are computed and mirrored."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import INTERPRET, LAUNCH_OPTIONS, cdiv
from titanforge.kernels.symmetric_config import SymmetricConfig, candidates, remember_symmetric
from titanforge.kernels.symmetric_kernel import symmetric_product_kernel

logger = logging.getLogger(__name__)

_GROUP = 8
"""Tiles are walked in squares of this edge, whose operands the cache then holds."""


def symmetric_product(
    x: Tensor,
    out: Tensor,
    *,
    tall: bool = False,
    alpha: float = 1.0,
    add: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    config: SymmetricConfig | None = None,
) -> Tensor:
    """out = alpha X X^T + beta add + diagonal I, fp32 accumulation, rounded once.

    x: contiguous [N, m, k]; tall: contiguous [N, k, m], and the product is X^T X. out: contiguous [N, m, m]
    of x's dtype, not x itself. add: symmetric, as out; diagonal only counts with it. config: the kernel's
    tile (see `choose_symmetric`), or None for the library's product.
    """
    if config is None:
        return reference_symmetric_product(
            x, out, tall=tall, alpha=alpha, add=add, beta=beta, diagonal=diagonal
        )
    count = x.shape[0]
    m, k = (x.shape[2], x.shape[1]) if tall else (x.shape[1], x.shape[2])
    order = _tile_order(cdiv(m, config.block), x.device)
    symmetric_product_kernel[(order.shape[0], count)](
        x, add, out, order, m, k, alpha, beta, diagonal,
        TALL=tall, ADD=add is not None, MASK_M=m % config.block != 0, MASK_K=k % config.block_k != 0,
        BLOCK=config.block, BLOCK_K=config.block_k, TO_FP32=INTERPRET,
        num_warps=config.warps, num_stages=config.stages, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def reference_symmetric_product(
    x: Tensor,
    out: Tensor,
    *,
    tall: bool = False,
    alpha: float = 1.0,
    add: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """The same through torch, on any device; in bf16 the diagonal is a rounding of its own."""
    left, right = (x.mT, x) if tall else (x, x.mT)
    if add is None:
        torch.bmm(left, right, out=out)
        return out if alpha == 1.0 else out.mul_(alpha)
    torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)
    out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out


@functools.lru_cache(maxsize=256)
def _tile_order(edge: int, device: torch.device) -> Tensor:
    """int32 [tiles, 2]: tiles (row, column), row <= column, square by square."""
    tiles = sorted(
        ((row, column) for row in range(edge) for column in range(row, edge)),
        key=lambda place: (place[0] // _GROUP, place[1] // _GROUP, place),
    )
    return torch.tensor(tiles, dtype=torch.int32).to(device)


def autotune_symmetric(
    m: int,
    k: int,
    count: int,
    device: torch.device,
    *,
    measure: Callable[[Sequence[Callable[[], Any]]], float],
    remember: bool = True,
) -> tuple[SymmetricConfig | None, list[tuple[float, SymmetricConfig | None]]]:
    """The fastest form for `count` bf16 matrices [m, k], and all as (milliseconds, form); None is torch.bmm.

    measure: time of functions that do the same on different buffers, as `kernels.timing.replay_time`.
    """
    copies = max(2, min(6, 1 + (200 << 20) // max(2 * count * m * (k + m), 1)))
    inputs = [torch.randn(count, m, k, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    outputs = [torch.empty(count, m, m, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    timed: list[tuple[float, SymmetricConfig | None]] = []
    for config in (None, *candidates()):

        def call(index: int, config: SymmetricConfig | None = config) -> None:
            symmetric_product(inputs[index], outputs[index], config=config)

        try:
            time = measure([functools.partial(call, index) for index in range(copies)])
        except Exception as error:
            # Triton raises its own types for shared memory and registers; which, differs between versions.
            logger.warning("symmetric product %dx%d, %s: %s: %s", m, k, config, type(error).__name__, error)
            continue
        timed.append((time, config))
    timed.sort(key=lambda entry: entry[0])
    best = timed[0][1]
    if remember:
        remember_symmetric(m, k, count, device, best)
    return best, timed
