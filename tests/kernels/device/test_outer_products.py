"""Sums of outer products by blocks of columns, in one part and in several, ragged widths and rows."""

from __future__ import annotations

import pytest
import torch

from titanforge.kernels.outer_products import add_outer_products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("blocks", "width", "rows"), [(1, 16, 1), (3, 20, 50), (2, 8, 33), (5, 40, 70)])
def test_sums_are_those_of_float64(
    blocks: int, width: int, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, blocks * width, generator=generator).to(device, dtype)
    total = torch.randn(blocks, width, width, generator=generator).to(device)
    total = total + total.mT
    before, count = total.double(), torch.full((), 3.0, device=device)
    add_outer_products(total, count, x.view(1, rows, -1))
    of_blocks = x.double().view(rows, blocks, width).transpose(0, 1)
    expected = before + of_blocks.mT @ of_blocks
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)
    # One half is the other's mirror; within a diagonal tile numpy, by which the interpreter multiplies, may
    # be a bit off on some CPUs.
    near = 0.0 if total.is_cuda else 1e-5
    torch.testing.assert_close(total, total.mT, rtol=0, atol=near)
    assert float(count) == 3 + rows


def test_columns_of_a_wider_tensor_and_no_rows(device: torch.device) -> None:
    wide = torch.randn(24, 64, device=device).bfloat16()
    total, same = (torch.zeros(2, 16, 16, device=device) for _ in range(2))
    count = torch.zeros((), device=device)
    add_outer_products(total, count, wide[:, 8:40])
    add_outer_products(same, count, wide[:, 8:40].contiguous())
    add_outer_products(same, count, wide[:0, 8:40])
    assert torch.equal(total, same)
    assert float(count) == 48


def test_the_same_bits_each_time(device: torch.device) -> None:
    rows, repeats = (8192, 100) if device.type == "cuda" else (48, 2)
    x = torch.randn(rows, 100, device=device).bfloat16()
    sums = torch.zeros(repeats, 1, 100, 100, device=device)
    for total in sums:
        add_outer_products(total, torch.zeros((), device=device), x)
    assert all(torch.equal(total, sums[0]) for total in sums)
