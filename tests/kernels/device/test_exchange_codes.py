"""Codes of what ranks sum: kernels against the plain-torch form, bit for bit, and bounds of their errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titanforge.kernels.exchange_codes import (
    BLOCK,
    EXCHANGE_CODES,
    ExchangeCode,
    Sent,
    decode,
    decode_reference,
    encode,
    encode_reference,
    padded,
    sum_pieces,
)

CODES = list(EXCHANGE_CODES.values())


def magnitudes(pieces: int, blocks: int) -> Tensor:
    """fp32 [values] whose blocks differ by orders of magnitude: one of zeros, one too small for a scale."""
    generator = torch.Generator().manual_seed(pieces * blocks)
    x = torch.randn(pieces * blocks, BLOCK, generator=generator)
    x *= torch.exp(6 * torch.randn(pieces * blocks, 1, generator=generator))
    x[0] = 0.0
    if len(x) > 4:
        x[1] *= 1e-38 / x[1].abs().amax()
        x[2], x[3] = 1e-30, 3e38
    return x.view(-1)


def largest(x: Tensor) -> Tensor:
    """Of each block, for each of its values."""
    return x.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("pieces, blocks", [(1, 1), (2, 3), (4, 33), (3, 64)])
def test_kernels_are_the_reference(
    code: ExchangeCode, pieces: int, blocks: int, device: torch.device
) -> None:
    x = magnitudes(pieces, blocks)
    values = blocks * BLOCK
    codes = encode(x.to(device), code, pieces, 0.37)
    assert codes.shape == (pieces, values * code.bits // 8 + (2 * blocks if code.levels else 0))
    scaled = x * 0.37
    assert torch.equal(codes.cpu(), encode_reference(scaled.view(pieces, -1), code))

    out = torch.full((len(x),), torch.nan, device=device)
    decode(codes, code, out)
    decoded = decode_reference(codes.cpu(), code, values)
    assert torch.equal(out.cpu().view(pieces, -1), decoded)
    bound = largest(scaled) / (2 * code.levels) * (1 + 2**-7) if code.levels else scaled.abs() * 2**-8
    assert bool(((out.cpu() - scaled).abs() <= bound.clamp_min(2**-119)).all())

    total = torch.zeros(values)
    for piece in decoded:
        total += piece
    assert torch.equal(sum_pieces(codes, code, values).cpu(), encode_reference(total[None], code)[0])


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(code: ExchangeCode, bad: float, device: torch.device) -> None:
    x = torch.ones(padded(300, 2))
    x[70] = bad
    codes = encode(x.to(device), code, 2)
    out = torch.empty_like(x, device=device)
    decode(torch.stack([sum_pieces(codes, code, len(x) // 2)] * 2), code, out)
    finite = torch.isfinite(out.cpu()).view(2, -1, BLOCK).all(2)
    assert finite.tolist() == [[True, False, True]] * 2
    decode(codes, code, out)
    assert not torch.isfinite(out.cpu()[70])
    torch.testing.assert_close(out.cpu()[BLOCK * 2 :], x[BLOCK * 2 :], rtol=2**-7, atol=0)


class Differences:
    """The protocol of `Sent` in plain torch: what all ranks are told of x [ranks, values]."""

    def __init__(self, ranks: int, values: int) -> None:
        self.own, self.sum, self.told = torch.zeros(ranks, values), torch.zeros(values), torch.zeros(values)

    def exchange(self, x: Tensor, code: ExchangeCode) -> Tensor:
        def coded(t: Tensor) -> Tensor:
            return decode_reference(encode_reference(t, code), code, t.shape[1])

        known = ~self.told.isnan()
        own, total, told = (torch.where(known, each, 0.0) for each in (self.own, self.sum, self.told))
        new = coded(x - own)
        for each in new:
            total = total + each
        self.own, self.sum = own + new, total
        self.told = told + coded((total - told)[None])[0]
        return self.told


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_differences(code: ExchangeCode, device: torch.device) -> None:
    """What was rounded away comes later; a block with a NaN begins anew."""
    ranks, values = 3, padded(1000, 3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ranks, values, generator=generator)
    sent = [Sent.nothing(values, ranks, device) for _ in range(ranks)]
    plain, errors = Differences(ranks, values), []
    for step in range(6):
        x += 1e-3 * torch.randn(ranks, values, generator=generator)
        given = x.clone()
        if step == 2:
            given[1, 70] = torch.nan
        codes = [encode(own, code, ranks, 0.5, before) for own, before in zip(given.to(device), sent)]
        sums = [
            sum_pieces(torch.stack([each[rank] for each in codes]), code, values // ranks, before, rank)
            for rank, before in enumerate(sent)
        ]
        out = torch.full((values,), torch.nan, device=device)
        for before in sent:
            decode(torch.stack(sums), code, out, before)
        torch.testing.assert_close(
            out.cpu(), plain.exchange(0.5 * given, code), rtol=0, atol=0, equal_nan=True
        )
        assert bool(out[70].isnan()) == (step == 2)
        errors.append(float((out.cpu() - 0.5 * x.sum(0))[2 * BLOCK :].abs().amax()))
    assert errors[-1] < 0.1 * errors[0]


def test_sizes() -> None:
    assert [padded(values, 4) for values in (0, 1, 256, 257)] == [0, 256, 256, 512]
    with pytest.raises(ValueError, match="300 values in 2 pieces"):
        encode(torch.zeros(300), CODES[0], 2)
