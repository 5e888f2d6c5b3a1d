"""The Triton Cholesky QR, interpreted, against torch.linalg and against what it must be."""

from __future__ import annotations

from tests.interpreted import needs_interpreter, run_interpreted


def check_all() -> None:
    """In a process of its own, where kernels are interpreted."""
    from dataclasses import replace

    import torch

    from titanforge.kernels.cholesky_qr import (
        cholesky_qr_refresh,
        config_for,
        reference_refresh,
        write_blocks,
    )

    generator = torch.Generator().manual_seed(0)
    tile = config_for(0).tile
    # Less than a tile; two panels of which one is ragged.
    for width, dtypes in ((5, [torch.bfloat16]), (tile + 7, [torch.float32])):
        for dtype in dtypes:
            x = torch.randn(2, width, 4 * width, generator=generator)
            # Spectra over decades, as activations have.
            x *= 0.8 ** torch.arange(width).clamp(max=30)[None, :, None]
            c = x @ x.mT
            start = torch.randn(2, width, width, generator=generator)
            basis = torch.linalg.qr(start).Q.to(dtype)
            c[1, 0, 0] = torch.nan
            mine, failed = cholesky_qr_refresh(c, basis, 1e-2)
            other, other_failed = reference_refresh(c, basis, 1e-2)
            assert failed.tolist() == other_failed.tolist() == [False, True]
            assert torch.equal(mine[1], basis[1]) and mine.dtype == dtype
            if width < tile:  # whatever it is batched with
                alone, _ = cholesky_qr_refresh(c[:1], basis[:1], 1e-2)
                assert torch.equal(alone[0], mine[0])
            # Two bf16 planes carry 16 bits (the interpreter cuts what a GPU rounds), and the solve loses two
            # digits of them in the directions of the least eigenvalues.
            tolerance = 2e-4 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(mine[0], other[0], rtol=0, atol=tolerance)
            if dtype == torch.float32:
                torch.testing.assert_close(mine[0].T @ mine[0], torch.eye(width), rtol=0, atol=2e-4)
    # More than one program a block; what is not chosen keeps even its NaN.
    old, new = torch.randn(2, 3, 70, 70, generator=generator).to(torch.bfloat16)
    old[1, 2, 3] = torch.nan
    target, chosen = old.clone(), torch.tensor([True, False, True])
    write_blocks(target, new, chosen)
    assert torch.equal(target[chosen], new[chosen])
    assert torch.equal(target[1].view(torch.int16), old[1].view(torch.int16))
    write_blocks(target, target, chosen)
    assert torch.equal(target[0], new[0])
    write_blocks(target, new.mT, chosen)
    assert torch.equal(target[chosen], new.mT[chosen])
    # Of a bf16 basis the high plane alone is corrected: off by another rounding to bf16 (which the
    # interpreter cuts), no less orthonormal.
    basis = torch.linalg.qr(start).Q.to(torch.bfloat16)[:1]
    coarse, failed = cholesky_qr_refresh(c[:1], basis, 1e-2, replace(config_for(width), invert_warps=2))
    exact, _ = reference_refresh(c[:1], basis.float(), 1e-2)
    rounded = exact.to(torch.bfloat16).float()
    error, least = (float((one.float() - exact).norm() / exact.norm()) for one in (coarse, rounded))
    assert not failed.any() and error < 2.5 * least, (
        error,
        least,
    )
    off, least = (
        float((one.mT.float() @ one.float() - torch.eye(width)).norm()) for one in (coarse, rounded)
    )
    assert off < 6 * least, (off, least)
    # Not positive definite: two equal columns of U, and nothing at all.
    basis = torch.eye(20).repeat(2, 1, 1)
    basis[0, :, 1] = basis[0, :, 0]
    c = torch.eye(20).repeat(2, 1, 1)
    c[1] = 0.0
    mine, failed = cholesky_qr_refresh(c, basis, 1e-2)
    assert failed.tolist() == [True, True] and torch.equal(mine, basis)


@needs_interpreter
def test_interpreted_kernels_equal_torch() -> None:
    run_interpreted(check_all)
