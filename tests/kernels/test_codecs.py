"""The storage codecs in torch: published random bits, error bounds, and what rounding does over many
steps.
"""

from __future__ import annotations

import pytest
import torch

from titanforge.kernels.codecs import (
    CODECS,
    Encoded,
    allocate,
    decode,
    encode_,
    fp8_advance,
    fp8_scale,
    get_codec,
    matrix_view,
    plain_codec,
    state_codec,
)
from titanforge.kernels.philox import philox4x32, rounding_bits


def _words(*counter: int, seed: int, rounds: int) -> list[int]:
    words = philox4x32(tuple(torch.tensor([value]) for value in counter), seed, rounds)  # type: ignore[arg-type]
    return [int(word) for word in words]


def test_philox_gives_the_published_vectors() -> None:
    # Known answers of the Random123 distribution for philox4x32, with 7 rounds and with 10.
    zero, ones = (0, 0, 0, 0), (0xFFFFFFFF,) * 4
    pi, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822
    assert _words(*zero, seed=0, rounds=7) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert _words(*ones, seed=-1, rounds=7) == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]
    assert _words(*pi, seed=key, rounds=7) == [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]
    assert _words(*zero, seed=0, rounds=10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _words(*ones, seed=-1, rounds=10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert _words(*pi, seed=key, rounds=10) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_rounding_bits_are_uniform_and_independent_of_the_tile() -> None:
    rows, columns = 64, 129
    lanes = [rounding_bits(rows, columns, lane=lane, seed=5, step=2, tensor_id=1) for lane in range(3)]
    for lane, bits in enumerate(lanes):
        assert bits.min() >= 0
        assert bits.max() <= 0xFFFF
        assert abs(bits.double().mean().item() - 32767.5) < 4 * 18918 / bits.numel() ** 0.5
        assert torch.equal(bits[:8, :70], rounding_bits(8, 70, lane=lane, seed=5, step=2, tensor_id=1))
    # Elements that share a call, and an element's own lanes, are not related in their leading bytes.
    bits = torch.stack(lanes) >> 8
    signs = (bits - 127.5).double() / 74.0
    noise = 4 / (rows * 64) ** 0.5
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs((signs[first] * signs[second]).mean()) < noise
    for distance in (1, 2, 8, 24, 32, 64):
        for lane in range(3):
            together = signs[lane][:, :64] * signs[lane][:, distance : distance + 64]
            assert abs(together.mean()) < noise, (lane, distance)
        assert abs((signs[0][:, :64] * signs[1][:, distance : distance + 64]).mean()) < noise


def _round(value: torch.Tensor, codec: str, step: int) -> torch.Tensor:
    stored = allocate(get_codec(codec), value.shape)
    encode_(stored, value, seed=1, step=step)
    return decode(stored)


@pytest.mark.parametrize("name", ["bf16_sr", "int8_sr"])
def test_stochastic_rounding_keeps_the_mean_and_takes_a_neighbour(name: str) -> None:
    value = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    draws = torch.stack([_round(value, name, step) for step in range(400)])
    spacing = value.abs() * 2.0**-7 if name == "bf16_sr" else value.abs().amax(1, keepdim=True) / 127
    assert ((draws - value).abs() <= spacing * 1.0001).all()
    # A Bernoulli of one spacing has deviation at most 1/2; 6 deviations of the mean of 400 draws.
    assert ((draws.mean(0) - value).abs() <= 6 * 0.5 * spacing / 400**0.5).all()
    assert (draws.std(0) > 0).float().mean() > 0.9


def test_a_step_below_half_a_unit_is_lost_by_nearest_and_kept_by_stochastic_rounding() -> None:
    start = torch.full((64, 64), 1.0)
    nearest, random = start.clone(), start.clone()
    for step in range(200):
        nearest = _round(nearest + 1e-4, "bf16", step)
        random = _round(random + 1e-4, "bf16_sr", step)
    assert torch.equal(nearest, start)
    assert abs(random.mean().item() - 1.02) < 2e-3


def test_exact_values_survive_stochastic_rounding() -> None:
    value = torch.randn(4, 64).to(torch.bfloat16).to(torch.float32)
    value[0, :3] = torch.tensor([float("inf"), float("-inf"), 0.0])
    assert torch.equal(_round(value, "bf16_sr", 3), value)
    nan = torch.full((1, 2), float("nan"))
    assert _round(nan, "bf16_sr", 0).isnan().all()


@pytest.mark.parametrize("columns", [64, 100, 5])
def test_int8_error_of_an_average_stays_within_the_bound_of_appendix_b(columns: int) -> None:
    decay = 0.9
    generator = torch.Generator().manual_seed(0)
    exact = torch.zeros(4, columns, dtype=torch.float64)
    stored = allocate(get_codec("int8"), exact.shape)
    assert stored.meta is not None
    largest_scale = torch.zeros_like(stored.meta)
    scale_per_element = torch.arange(columns) // 64
    for _ in range(200):
        gradient = torch.randn(4, columns, generator=generator) * 10 ** torch.randn(4, 1, generator=generator)
        exact = decay * exact + (1 - decay) * gradient.double()
        encode_(stored, decay * decode(stored) + (1 - decay) * gradient)
        largest_scale = torch.maximum(largest_scale, stored.meta)
        bound = largest_scale[:, scale_per_element].double() / (2 * (1 - decay)) * (1 + 1e-5)
        assert ((decode(stored).double() - exact).abs() <= bound).all()
        assert stored.meta.shape == (4, -(-columns // 64))


@pytest.mark.parametrize(("name", "factor"), [("uint8_root", 1.5), ("uint8_root_sr", 2.0), ("uint8", 1.5)])
def test_nonnegative_states_never_enlarge_a_step_beyond_the_proven_factor(name: str, factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.rand(64, 100, generator=generator) ** 8  # most entries far below their block's largest
    value = root * root if CODECS[name].root else root
    value[3, :64] = 0.0
    decoded = _round(value, name, 1)
    divisor = decoded.sqrt() if CODECS[name].root else decoded
    true = value.sqrt() if CODECS[name].root else value
    assert (divisor * factor >= true * (1 - 1e-6)).all()
    # Floored: no divisor below 1/255 of the largest of its block, also where the value is zero.
    largest = true[:, :64].amax(1, keepdim=True)
    assert (divisor[:, :64] >= largest / 255 * (1 - 1e-6)).all()
    assert (divisor[:, :64] > 0)[largest[:, 0] > 0].all()


def test_fp8_scales_are_powers_of_two_and_follow_with_delay() -> None:
    codec = get_codec("fp8_e4m3")
    history = torch.tensor([[3.0, 1.0], [0.0, 0.0], [224.0, 1.0]])
    scales = fp8_scale(history, codec.levels)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full((3,), 0.5))
    assert (scales * codec.levels >= 2 * history.amax(1)).all()
    assert scales[1] == 2.0**-100
    value = torch.linspace(-3, 3, 64).reshape(1, 64)
    stored = allocate(codec, (1, 64))
    assert stored.meta is not None
    for _ in range(3):
        encode_(stored, value)
        fp8_advance(stored.meta, codec.levels, torch.tensor(1.0))
    assert stored.meta[0] == fp8_scale(torch.tensor([3.0]), codec.levels)
    assert ((decode(stored) - value).abs() <= value.abs() * 2.0**-4 + stored.meta[0] * 2.0**-10).all()


def test_fp8_metadata_of_many_tensors_moves_in_one_call() -> None:
    names = ("fp8_e4m3", "fp8_e5m2")
    table = torch.zeros(2, CODECS["fp8_e4m3"].meta_length)
    table[:, :2] = 1.0
    for row, name in zip(table, names):
        codec = CODECS[name]
        encode_(Encoded(torch.zeros(2, 64).to(codec.dtype), codec, row), torch.full((2, 64), 5.0))
    fp8_advance(table, torch.tensor([CODECS[name].levels for name in names]), torch.tensor(1.0))
    for row, name in zip(table, names):
        assert row[1] == fp8_scale(torch.tensor([5.0]), CODECS[name].levels)


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((), (1, 1)),
        ((7,), (1, 7)),
        ((3, 5), (3, 5)),
        ((2, 3, 5), (6, 5)),
        ((4, 2, 3, 3), (4, 18)),
        ((0, 4), (0, 4)),
    ],
)
def test_matrix_view(shape: tuple[int, ...], view: tuple[int, int]) -> None:
    assert matrix_view(shape) == view


def test_codec_names_and_errors() -> None:
    assert state_codec("int8", "square").name == "uint8_root"
    assert state_codec("bfloat16", "signed", stochastic=True).name == "bf16_sr"
    assert state_codec("float32", "signed", stochastic=True).name == "fp32"
    assert len({codec.code for codec in CODECS.values()}) == len(CODECS)
    with pytest.raises(ValueError, match="no codec named 'int4'"):
        get_codec("int4")
    with pytest.raises(ValueError, match=r"optimizer\.state_dtype = 'int4'"):
        state_codec("int4", "signed")
    with pytest.raises(ValueError, match="no stochastic rounding"):
        state_codec("fp8", "signed", stochastic=True)
    with pytest.raises(ValueError, match="name its codec"):
        plain_codec(torch.int8)
