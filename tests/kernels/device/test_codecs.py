"""Every codec's Triton form gives the bits of its torch form."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import assert_same_state, hyper_vector
from titanforge.kernels.codecs import CODECS, Codec, Encoded, allocate, decode, encode_
from titanforge.kernels.epilogues import get_epilogue
from titanforge.kernels.flat import flat_update

RULE = get_epilogue("momentum_state")
SEED, STEP, TENSOR = (3 << 40) + 17, 12345, 6


def _values(codec: Codec, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    value = torch.randn(rows, columns, generator=generator)
    # Many orders of magnitude, so that subnormal codes, ties and saturation all occur.
    value *= torch.exp2(torch.randint(-24, 12, (rows, columns), generator=generator).float())
    value[0, : min(4, columns)] = torch.tensor([0.0, 1.0, 0.5, 2.0**-9])[: min(4, columns)]
    if rows > 1:
        value[1] = 0.0  # a block of zeros
    return value.abs() if codec.floored else value


@pytest.mark.parametrize("columns", [64, 70, 1])
@pytest.mark.parametrize("name", CODECS)
def test_store_and_load_give_the_bits_of_the_reference(name: str, columns: int, device: torch.device) -> None:
    codec = CODECS[name]
    value = _values(codec, 3, columns)
    rng = torch.tensor([SEED, STEP], device=device)
    expected, found = allocate(codec, value.shape), allocate(codec, value.shape, device)
    for part in (expected, found):
        if part.meta is not None and codec.kind == "tensor":
            part.meta[:2] = 0.25

    # M <- 0 M + 1 g stores g; then M <- 1 M + 0 g stores what was loaded.
    for decay, gain, step_value in ((0.0, 1.0, value), (1.0, 0.0, None)):
        reference = decode(expected) if step_value is None else step_value
        encode_(expected, reference, seed=SEED, step=STEP, tensor_id=TENSOR, lane=1)
        hyper = hyper_vector(RULE, device, decay=decay, gain=gain, grad_scale=1.0)
        flat_update(RULE, None, [value.to(device)], [[found]], hyper, rng=rng, tensor_ids=[TENSOR])
        assert_same_state(found, expected)


def test_rounding_bits_depend_on_seed_step_and_tensor_only(device: torch.device) -> None:
    value = torch.randn(4, 130, generator=torch.Generator().manual_seed(0)).to(device)
    codec = CODECS["bf16_sr"]

    def store(seed: int, step: int, tensor_id: int) -> torch.Tensor:
        part = Encoded(torch.zeros(4, 130, dtype=torch.bfloat16, device=device), codec)
        hyper = hyper_vector(RULE, device, decay=0.0, gain=1.0, grad_scale=1.0)
        rng = torch.tensor([seed, step], device=device)
        flat_update(RULE, None, [value], [[part]], hyper, rng=rng, tensor_ids=[tensor_id])
        return part.values

    base = store(1, 2, 3)
    assert torch.equal(base, store(1, 2, 3))
    for other in (store(2, 2, 3), store(1 << 33, 2, 3), store(1, 3, 3), store(1, 2, 4)):
        assert not torch.equal(base, other)


def test_rounding_at_random_keeps_what_is_not_finite(device: torch.device) -> None:
    # The NaN of a GPU's arithmetic is 0x7FFFFFFF: random bits added to it would carry into the sign.
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]).repeat(4, 16).bfloat16()
    hyper = hyper_vector(RULE, device, decay=1.0, gain=0.0, grad_scale=1.0)
    for seed in range(3):
        part = Encoded(values.to(device), CODECS["bf16_sr"])
        rng = torch.tensor([seed, 0], device=device)
        flat_update(RULE, None, [torch.zeros(4, 64, device=device)], [[part]], hyper, rng=rng)
        assert torch.equal(part.values.cpu().nan_to_num(7.0, 8.0, 9.0), values.nan_to_num(7.0, 8.0, 9.0))
