"""The Triton Cholesky QR, interpreted, against torch.linalg and against what it must be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titanforge.kernels._triton import HAS_TRITON

REPOSITORY = Path(__file__).resolve().parents[2]


def check_all() -> None:
    """In a process of its own, where kernels are interpreted."""
    import torch

    from titanforge.kernels.cholesky_qr import TILE, cholesky_qr_refresh, reference_refresh

    generator = torch.Generator().manual_seed(0)
    # One tile, two whole ones, and widths that are no multiple of a tile.
    for width in (5, TILE, 2 * TILE, 2 * TILE + 7):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(3, width, 4 * width, generator=generator)
            x *= 0.8 ** torch.arange(width)[None, :, None]  # spectra over decades, as activations have
            c = x @ x.mT
            start = torch.randn(3, width, width, generator=generator)
            basis = torch.linalg.qr(start).Q.to(dtype)
            c[1, 0, 0] = torch.nan
            mine, failed = cholesky_qr_refresh(c, basis, 1e-2)
            other, other_failed = reference_refresh(c, basis, 1e-2)
            assert failed.tolist() == other_failed.tolist() == [False, True, False]
            assert torch.equal(mine[1], basis[1]) and mine.dtype == dtype
            tolerance = 2e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)
            if dtype == torch.float32:
                identity = torch.eye(width)
                for index in (0, 2):
                    torch.testing.assert_close(mine[index].T @ mine[index], identity, rtol=0, atol=1e-5)
    # Not positive definite: two equal columns of U, and nothing at all.
    basis = torch.eye(20).repeat(2, 1, 1)
    basis[0, :, 1] = basis[0, :, 0]
    c = torch.eye(20).repeat(2, 1, 1)
    c[1] = 0.0
    mine, failed = cholesky_qr_refresh(c, basis, 1e-2)
    assert failed.tolist() == [True, True] and torch.equal(mine, basis)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_interpreted_kernels_equal_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    code = "from tests.kernels.test_cholesky_qr import check_all; check_all()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
