"""Orthonormalising (C + eps I) U, batched over blocks (Dobb, algorithm 4): a pass of Cholesky QR and,
in place of a second one, corrections to first order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import INTERPRET, LAUNCH_OPTIONS, cdiv, next_power_of_2, runs_triton
from titanforge.kernels.cholesky_factor_kernel import advance_kernel, invert_kernel, scale_kernel
from titanforge.kernels.cholesky_qr_kernel import (
    correct_kernel,
    gram_kernel,
    orthonormal_kernel,
    product_kernel,
    restore_kernel,
    split_kernel,
)
from titanforge.kernels.second_moments import largest_sums

PRECISION = "ieee" if INTERPRET else "tf32x3"
"""Of the small products within a diagonal tile; the others take two bf16 planes a factor."""
LEAST_EDGE = 64 if not INTERPRET else 32
"""Rows and columns that products take of the last panel at least."""


@dataclass(frozen=True)
class CholeskyConfig:
    """tile: edge of the tiles. block_k: columns summed at a step. warps: of products. stages: of all.

    factor_warps: of the two launches of a panel. invert_warps: of a launch of its own for the diagonal tiles;
    0: they go with the updates of other tiles. planes: whether C is split into planes by a launch of its own,
    once for all the tiles that read it.
    """

    tile: int = 128
    block_k: int = 32
    warps: int = 4
    stages: int = 3
    factor_warps: int = 4
    invert_warps: int = 0
    planes: bool = True

    def edge(self, width: int) -> int:
        """Rows and columns of the last panel that products take: a power of two, and all of a block's."""
        rest = (width - 1) % self.tile + 1
        return min(self.tile, max(LEAST_EDGE, self.block_k, next_power_of_2(rest)))


def config_for(width: int) -> CholeskyConfig:
    """The tiles for blocks of a width."""
    if INTERPRET:
        return CholeskyConfig(64, planes=width > 64)
    if width > 512:
        return CholeskyConfig()
    if width > 64:
        return CholeskyConfig(invert_warps=2, planes=width > 128)  # mostly diagonal tiles
    return CholeskyConfig(64, planes=False)


def cholesky_qr_refresh(
    statistic: Tensor,
    basis: Tensor,
    relative_shift: float,
    config: CholeskyConfig | None = None,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One orthogonal iteration: U <- CholeskyQR((C + eps I) U), eps = omega max_i sum_j |C_ij|, per block.

    statistic: fp32 [N, w, w], symmetric and positive semidefinite. basis: [N, w, w], fp32 or bf16; the result
    has its dtype. relative_shift: omega; the condition number of what is factorised stays below (1 + omega) /
    omega for an orthonormal U. config: tiles, on a GPU; a block's result depends on them and on its own
    values, not on the blocks beside it. largest: fp32 [N], of `largest_sums`, where it is known already.
    Returns the bases, and bool [N]: a block that failed (not finite, not positive definite, or too near to
    singular to be corrected, which begins at omega of about 0.002) keeps its basis.
    The host does not wait for the device.
    """
    if not runs_triton(statistic):
        return reference_refresh(statistic, basis, relative_shift)
    failed = torch.zeros(len(basis), dtype=torch.int32, device=basis.device)
    u = basis.contiguous()
    c = statistic.contiguous()
    sums = largest_sums(c) if largest is None else largest
    fresh = _triton_refresh(c, sums, u, relative_shift, failed, config or config_for(basis.shape[-1]))
    numel = u[0].numel()
    restore_kernel[(len(u), cdiv(numel, 4096))](failed, u, fresh, numel, BLOCK=4096, **LAUNCH_OPTIONS)
    return fresh, failed != 0


def write_blocks(target: Tensor, values: Tensor, chosen: Tensor) -> None:
    """In place: target[i] = values[i] where chosen[i]; nothing is read or written of the others.

    target, values: [N, w, w] of one dtype, which may be the same tensor; the target contiguous. chosen: bool
    [N].
    """
    if not runs_triton(target):
        torch.where(chosen[:, None, None], values, target, out=target)
        return
    numel = target[0].numel()
    values = values.contiguous()  # libraries return eigenvectors and Q by columns
    restore_kernel[(len(target), cdiv(numel, 4096))](
        chosen.to(torch.int32), values, target, numel, BLOCK=4096, **LAUNCH_OPTIONS
    )


def corrections(relative_shift: float, dtype: torch.dtype) -> int:
    """How many first-order corrections a basis of this dtype needs.

    Q of the Cholesky pass is off by E = Q^T Q - I, of norm about kappa^2 2^-17 where C has eigenvalues near
    zero: kappa = (1 + omega) / omega, and the relative error of products of planes. Each correction squares
    it. What is left is to be of the size that rounding to bf16 makes, twice its unit (fp32: 2^-14). Measured
    at omega = 0.01, bf16: elements of E up to 3.1e-3 at such a C, 0.6e-3 to 1.4e-3 at others, where the exact
    basis, rounded, has 0.7e-3 to 2.0e-3. A basis begins the next iteration only as what its columns span, so
    that nothing of E adds up from refresh to refresh.
    """
    off = ((1 + relative_shift) / relative_shift) ** 2 * 2.0**-17
    target = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-14
    rounds = 1
    while rounds < 4 and off ** (2**rounds) > target:
        rounds += 1
    return rounds


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


def _triton_refresh(
    c: Tensor, largest: Tensor, u: Tensor, omega: float, failed: Tensor, config: CholeskyConfig
) -> Tensor:
    """The bases, in u's dtype: a Cholesky pass, then corrections. failed: int32 [N], set to 1.

    The second pass of Cholesky QR divides by the triangle of a matrix I + E. To first order in E that is
    I + X^T, X the lower triangle of E with half of its diagonal: two products, where a factorisation would
    be a chain of small steps. For bf16 bases the high plane of what the first pass leaves is corrected: a
    basis is then off by the rounding to bf16 twice, and as orthonormal.

    Workspace: 10 bytes an element of the padded blocks, 12 for fp32 bases.
    """
    count, width = u.shape[0], u.shape[-1]
    tile = config.tile
    panels = cdiv(width, tile)
    padded = panels * tile
    device = u.device
    split = u.dtype == torch.float32
    a = torch.empty(2, count, padded, padded, dtype=torch.bfloat16, device=device)
    gram = torch.empty(count, padded, padded, dtype=torch.float32, device=device)
    inverse = torch.zeros(2, count, panels, tile, tile, dtype=torch.bfloat16, device=device)
    q = torch.empty(2 if split else 1, count, padded, padded, dtype=torch.bfloat16, device=device)
    fresh = torch.empty_like(u)
    # Before the Gram matrix its place has C's planes; after it L's and V's, and X's at last.
    planes, plane, d_low = gram.view(torch.bfloat16), a[0].numel(), inverse[0].numel()
    factor_options: dict[str, Any] = {
        "TILE": tile, "BLOCK_K": config.block_k, "TO_FP32": INTERPRET, "num_stages": config.stages,
        "num_warps": config.factor_warps, **LAUNCH_OPTIONS,
    }  # fmt: skip
    options = {**factor_options, "EDGE": config.edge(width), "num_warps": config.warps}
    filled = padded - tile + config.edge(width)
    tiles = (count, panels, panels)
    if config.planes:
        split_kernel[(count, filled // 16)](
            c, planes, plane, padded, filled, width,
            ROWS=16, WIDTH=config.edge(width), num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip
    product_kernel[tiles](
        planes if config.planes else c, u, largest, a, plane, padded, omega, panels, width,
        MASKED=width != padded, C_PLANES=config.planes, U_SPLIT=split, **options,
    )  # fmt: skip
    gram_kernel[tiles](a, gram, failed, plane, padded, panels, width, SPLIT=True, NEAR=False, **options)
    for panel in range(panels):
        below = panels - panel - 1
        if panels > 1 or not config.invert_warps:
            tasks = panel + (below + 2 if below else 1)
            advance_kernel[(count, tasks)](
                gram, planes, inverse, failed, d_low, padded, panel, panels,
                INVERT=not config.invert_warps, PRECISION=PRECISION, **factor_options,
            )  # fmt: skip
        if config.invert_warps:
            invert_kernel[(count,)](
                gram, inverse, failed, d_low, padded, panel, panels,
                TILE=tile, PRECISION=PRECISION, num_warps=config.invert_warps, **LAUNCH_OPTIONS,
            )  # fmt: skip
        scale_kernel[(count, panels)](planes, inverse, d_low, padded, panel, panels, **factor_options)
    orthonormal_kernel[tiles](a, planes, q, plane, padded, panels, SPLIT=split, **options)
    rounds = corrections(omega, u.dtype)
    for number in range(rounds):
        last = number == rounds - 1
        gram_kernel[tiles](q, planes, failed, plane, padded, panels, width, SPLIT=split, NEAR=True, **options)
        correct_kernel[tiles](
            q, planes, fresh if last else a, plane, padded, panels, width, SPLIT=split, LAST=last, **options
        )
        q, a = a, q
    return fresh
