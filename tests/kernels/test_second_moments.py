"""Second moments from sums: the kernel, interpreted, beside plain torch."""

from __future__ import annotations

import pytest

from tests.interpreted import needs_interpreter, run_interpreted


def check_all() -> None:
    """In a process of its own, where kernels are interpreted."""
    import torch

    from titanforge.kernels.second_moments import take_sums

    generator = torch.Generator().manual_seed(0)
    for width, dtype in ((20, torch.float32), (40, torch.bfloat16)):
        for factor in (None, torch.tensor([2.0, 0.5, 3.0, 1.0])):
            sums = torch.randn(4, width, width, generator=generator)
            statistic = torch.randn(4, width, width, generator=generator).to(dtype)
            counts = torch.tensor([3.0, 0.0, 7.0, 1.0])  # the second has no position: it stays as it is
            sums[1], sums[3, 5, 2] = 0.0, torch.nan
            mean = sums.double() / counts.clamp_min(1)[:, None, None]
            if factor is not None:
                mean = mean * factor[:, None, None]
            kept = torch.tensor([0.95, 1.0, 0.95, 0.95])[:, None, None]
            wanted = (mean + kept.double() * statistic.double()).to(dtype).float()
            largest = take_sums(sums, counts, statistic, 0.95, factor)
            torch.testing.assert_close(
                sums, wanted, equal_nan=True, rtol=1e-6 + 2**-8 * (width == 40), atol=1e-6
            )
            assert torch.equal(sums[1], statistic[1].float())
            assert torch.equal(sums, sums.to(dtype).float()) or sums[3].isnan().any()
            assert torch.isfinite(largest).tolist() == [True, True, True, False]
            torch.testing.assert_close(largest[:3], sums[:3].abs().sum(-1).amax(-1), rtol=1e-5, atol=0)


@needs_interpreter
@pytest.mark.parametrize("interpret", [True, False])
def test_equals_float64(interpret: bool) -> None:
    run_interpreted(check_all, interpret)
