"""Orthonormalising (C + eps I) U by two passes of Cholesky QR, batched over blocks (Dobb, algorithm 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import INTERPRET, LAUNCH_OPTIONS, cdiv, runs_triton
from titanforge.kernels.cholesky_qr_kernel import (
    advance_kernel,
    gram_kernel,
    invert_kernel,
    product_kernel,
    scale_kernel,
    solve_kernel,
)

PRECISION = "ieee" if INTERPRET else "tf32x3"
"""Of the small products within a diagonal tile; the others take two bf16 planes a factor."""


@dataclass(frozen=True)
class CholeskyConfig:
    """tile: edge of the tiles. block_k: columns summed at a step. rows: of a solve's program. The rest: warps
    of each kernel, and stages of all.

    invert_warps: of a launch of its own for the diagonal tiles; 0: they go with the updates of other tiles.
    lean: for bf16 bases, two thirds of the products. Whatever triangle the first pass divides by, the second
    one makes up for, so its solve takes the triangle's high plane. What it leaves is near orthonormal: the
    high plane of that is what the second pass orthonormalises, by a triangle near the identity. A basis is
    then off by the rounding to bf16 twice; it is as orthonormal as before.
    """

    tile: int = 128
    block_k: int = 32
    rows: int = 128
    product_warps: int = 8
    gram_warps: int = 4
    factor_warps: int = 8
    solve_warps: int = 8
    stages: int = 3
    invert_warps: int = 0
    lean: bool = False


def config_for(width: int) -> CholeskyConfig:
    """The tiles for blocks of a width."""
    if INTERPRET:
        return CholeskyConfig(64, 32, 32)
    if width > 512:
        return CholeskyConfig(factor_warps=4, lean=True)
    if width > 64:
        return CholeskyConfig(invert_warps=2, lean=True)  # mostly diagonal tiles: a launch that only inverts
    return CholeskyConfig(64, 32, 64, product_warps=4, factor_warps=4, solve_warps=4)


def cholesky_qr_refresh(
    statistic: Tensor, basis: Tensor, relative_shift: float, config: CholeskyConfig | None = None
) -> tuple[Tensor, Tensor]:
    """One orthogonal iteration: U <- CholeskyQR((C + eps I) U), eps = omega max_i sum_j |C_ij|, per block.

    statistic: fp32 [N, w, w], symmetric and positive semidefinite. basis: [N, w, w], fp32 or bf16; the result
    has its dtype. relative_shift: omega; the condition number of what is factorised stays below (1 + omega) /
    omega for an orthonormal U. config: tiles, on a GPU; a block's result depends on them and on its own
    values, not on the blocks beside it.
    Returns the bases, and bool [N]: a block that failed (not finite, not positive definite) keeps its basis.
    The host does not wait for the device.
    """
    if not runs_triton(statistic):
        return reference_refresh(statistic, basis, relative_shift)
    failed = torch.zeros(len(basis), dtype=torch.int32, device=basis.device)
    fresh = _triton_refresh(
        statistic.contiguous(), basis.contiguous(), relative_shift, failed,
        config or config_for(basis.shape[-1]),
    )  # fmt: skip
    bad = (failed != 0) | ~torch.isfinite(fresh).all(dim=-1).all(dim=-1)
    return torch.where(bad[:, None, None], basis, fresh), bad


def reference_refresh(statistic: Tensor, basis: Tensor, relative_shift: float) -> tuple[Tensor, Tensor]:
    """The same through torch.linalg, on any device."""
    u = basis.float()
    largest = statistic.abs().sum(dim=-1).amax(dim=-1)[:, None, None]
    # Scale does not matter to Q; without this the Gram matrix of a tiny statistic would underflow.
    q = torch.where(largest > 0, (statistic @ u) / largest + relative_shift * u, 0.0)
    failed = torch.zeros(len(q), dtype=torch.bool, device=q.device)
    for _ in range(2):
        lower, info = torch.linalg.cholesky_ex(q.mT @ q)
        failed |= info != 0
        q = torch.linalg.solve_triangular(lower.mT, q, upper=True, left=False)
    bad = failed | ~torch.isfinite(q).all(dim=-1).all(dim=-1)
    return torch.where(bad[:, None, None], basis, q.to(basis.dtype)), bad


def _triton_refresh(c: Tensor, u: Tensor, omega: float, failed: Tensor, config: CholeskyConfig) -> Tensor:
    """Two passes; the bases, in u's dtype. failed: int32 [N], set to 1.

    Workspace: 8 bytes an element of the padded blocks.
    """
    count, width = u.shape[0], u.shape[-1]
    tile = config.tile
    panels = cdiv(width, tile)
    padded = panels * tile
    device = u.device
    largest = torch.linalg.vector_norm(c, ord=1, dim=-1).amax(dim=-1)
    q = torch.empty(2, count, padded, padded, dtype=torch.bfloat16, device=device)
    gram = torch.empty(count, padded, padded, dtype=torch.float32, device=device)
    inverse = torch.zeros(2, count, panels, tile, tile, dtype=torch.bfloat16, device=device)
    fresh = torch.empty_like(u)
    factor, plane, d_low = gram.view(torch.bfloat16), q[0].numel(), inverse[0].numel()
    options: dict[str, Any] = {
        "TILE": tile, "BLOCK_K": config.block_k, "TO_FP32": INTERPRET, "num_stages": config.stages,
        **LAUNCH_OPTIONS,
    }  # fmt: skip
    factor_options = {**options, "num_warps": config.factor_warps}
    product_kernel[(count, panels, panels)](
        c, u, largest, q, plane, width, padded, omega,
        MASKED=width != padded, U_SPLIT=u.dtype == torch.float32,
        num_warps=config.product_warps, **options,
    )  # fmt: skip
    lean = config.lean and u.dtype == torch.bfloat16
    for last in (False, True):
        both = not (lean and last)  # planes of what this pass begins with
        gram_kernel[(count, panels, panels)](
            q, gram, plane, padded, SPLIT=both, num_warps=config.gram_warps, **options
        )
        for panel in range(panels):
            below = panels - panel - 1
            tasks = 1 if panel == 0 or not below else below + 2
            if panel or not config.invert_warps:  # the first panel lacks nothing
                advance_kernel[(count, tasks)](
                    gram, factor, inverse, failed, d_low, padded, panel, panels,
                    SPLIT=both, INVERT=not config.invert_warps, PRECISION=PRECISION, **factor_options,
                )  # fmt: skip
            if config.invert_warps:
                invert_kernel[(count,)](
                    gram, inverse, failed, d_low, padded, panel, panels,
                    TILE=tile, PRECISION=PRECISION, num_warps=config.invert_warps, **LAUNCH_OPTIONS,
                )  # fmt: skip
            if below:
                scale_kernel[(count, below)](
                    gram, factor, inverse, d_low, padded, panel, panels, **factor_options
                )
        solve_kernel[(count, padded // config.rows)](
            q, factor, inverse, fresh, plane, d_low, width, padded, panels,
            LAST=last, Q_SPLIT=both, L_SPLIT=not lean, ROWS=config.rows,
            num_warps=config.solve_warps, **options,
        )  # fmt: skip
    return fresh
