"""The fused weight-gradient kernel: exactness against the unfused path (gate T0), and every shape it may
meet.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import RECIPES, Weight, assert_same_bits, hyper_vector
from titanforge.kernels.codecs import decode
from titanforge.kernels.config import TileConfig
from titanforge.kernels.epilogues import get_epilogue
from titanforge.kernels.flat import flat_update
from titanforge.kernels.wgrad import fused_wgrad_update, tile_count, wgrad, wgrad_accumulate, wgrad_reference

SMALL = TileConfig(32, 64, 32, group=2)
SPLIT = TileConfig(16, 256, 16, group=1, split=4)
ADAMW = get_epilogue("adamw")


def _operands(
    n: int, k: int, tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dy = torch.randn(tokens, n, generator=generator).to(device, dtype)
    x = torch.randn(tokens, k, generator=generator).to(device, dtype)
    return dy, x


def _check_gradient(found: Tensor, dy: Tensor, x: Tensor) -> None:
    exact = dy.double().t() @ x.double()
    bound = (dy.double().abs().t() @ x.double().abs()) * 2.0**-22 * max(dy.shape[0], 1) + 1e-30
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("n", "k", "tokens", "dtype"),
    [
        (33, 70, 37, torch.bfloat16), (64, 64, 32, torch.bfloat16), (1, 1, 1, torch.bfloat16),
        (40, 130, 20, torch.float16), (20, 66, 19, torch.float32), (16, 64, 0, torch.bfloat16),
    ],
)  # fmt: skip
def test_gradient_of_any_shape(n: int, k: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    dy, x = _operands(n, k, tokens, device, dtype)
    found = wgrad(dy, x, config=SMALL)
    assert found.shape == (n, k)
    assert found.dtype == torch.float32
    _check_gradient(found, dy, x)


def test_gradient_of_strided_and_mixed_operands(device: torch.device) -> None:
    dy, x = _operands(33, 2 * 70, 21, device)
    transposed = dy.t().contiguous().t()
    columns = x[:, ::2]
    assert transposed.stride() == (1, 21)
    expected = wgrad(dy, columns.contiguous(), config=SMALL)
    assert torch.equal(wgrad(transposed, columns, config=SMALL), expected)
    batched = wgrad(dy.reshape(3, 7, 33), columns.reshape(3, 7, 70), config=SMALL)
    assert torch.equal(batched, expected)
    _check_gradient(wgrad(dy.float(), columns, config=SMALL), dy, columns)


@pytest.mark.parametrize("recipe", RECIPES)
def test_t0_fused_equals_unfused_bit_for_bit(recipe: str, device: torch.device) -> None:
    rng = torch.tensor([11, 5], device=device)
    dy, x = _operands(33, 200, 37, device)
    fused, unfused = (Weight(ADAMW, recipe, (33, 200), device) for _ in range(2))
    hyper = hyper_vector(ADAMW, device)
    for _ in range(2):
        fused_wgrad_update(
            dy,
            x,
            fused.weight,
            fused.states,
            ADAMW,
            hyper,
            master=fused.master,
            rng=rng,
            tensor_id=9,
            config=SMALL,
        )
        gradient = wgrad(dy, x, config=SMALL)
        flat_update(
            ADAMW, [unfused.weight], [gradient], [unfused.states], hyper, masters=[unfused.master], rng=rng,
            tensor_ids=[9],
        )  # fmt: skip
    assert_same_bits(fused.tensors(), unfused.tensors())


@pytest.mark.parametrize("name", ["sgd", "lion", "adamax", "lamb_state"])
def test_t0_of_rules_with_other_states(name: str, device: torch.device) -> None:
    rule = get_epilogue(name)
    dy, x = _operands(17, 64, 16, device)
    fused, unfused = (Weight(rule, "bf16", (17, 64), device) for _ in range(2))
    untouched = fused.weight.values.clone()
    hyper = hyper_vector(rule, device)
    fused_wgrad_update(dy, x, fused.weight, fused.states, rule, hyper, config=SMALL)
    flat_update(rule, [unfused.weight], [wgrad(dy, x, config=SMALL)], [unfused.states], hyper)
    assert_same_bits(fused.tensors(), unfused.tensors())
    assert torch.equal(fused.weight.values, untouched) is not rule.updates_weight


def test_split_epilogue_changes_nothing(device: torch.device) -> None:
    dy, x = _operands(20, 300, 16, device)
    whole, split = (Weight(ADAMW, "int8_sr", (20, 300), device) for _ in range(2))
    rng = torch.tensor([1, 1], device=device)
    hyper = hyper_vector(ADAMW, device)
    unsplit = TileConfig(16, 256, 16, group=1)
    fused_wgrad_update(dy, x, whole.weight, whole.states, ADAMW, hyper, rng=rng, config=unsplit)
    fused_wgrad_update(dy, x, split.weight, split.states, ADAMW, hyper, rng=rng, config=SPLIT)
    assert_same_bits(split.tensors(), whole.tensors())


def test_without_tokens_the_gradient_free_part_is_applied(device: torch.device) -> None:
    dy, x = _operands(16, 64, 0, device)
    case = Weight(ADAMW, "fp32", (16, 64), device)
    hyper = hyper_vector(ADAMW, device)
    expected = Weight(ADAMW, "fp32", (16, 64), device)
    flat_update(ADAMW, [expected.weight], [torch.zeros(16, 64, device=device)], [expected.states], hyper)
    fused_wgrad_update(dy, x, case.weight, case.states, ADAMW, hyper, config=SMALL)
    assert_same_bits(case.tensors(), expected.tensors())


def test_norm_bias_gradient_and_nonfinite_tiles(device: torch.device) -> None:
    n, k, tokens = 40, 100, 20
    dy, x = _operands(n, k, tokens, device)
    case = Weight(ADAMW, "bf16", (n, k), device)
    before = case.weight.values.clone()
    norms = torch.full((tile_count((n, k), SMALL),), float("nan"), device=device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    bias = torch.empty(n, device=device)
    gradient = wgrad(dy, x, config=SMALL)
    fused_wgrad_update(
        dy, x, case.weight, case.states, ADAMW, hyper_vector(ADAMW, device), norm_partials=norms,
        nonfinite=counter,
        bias_gradient=bias, config=SMALL,
    )  # fmt: skip
    assert counter.item() == 0
    torch.testing.assert_close(norms.sum(), gradient.square().sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(bias, dy.float().sum(0), rtol=1e-5, atol=1e-5)

    # One infinite activation spoils the tiles of its column, and only those.
    after = case.weight.values.clone()
    assert not torch.equal(after, before)
    x[3, 70] = float("inf")
    fused_wgrad_update(
        dy, x, case.weight, case.states, ADAMW, hyper_vector(ADAMW, device), nonfinite=counter, config=SMALL
    )
    assert counter.item() == 2
    assert torch.equal(case.weight.values[:, 64:], after[:, 64:])
    assert not torch.equal(case.weight.values[:, :64], after[:, :64])


@pytest.mark.parametrize("recipe", ["bf16", "int8_sr"])
def test_experts_in_one_launch(recipe: str, device: torch.device) -> None:
    experts, n, k = 4, 20, 70
    offsets = torch.tensor([0, 5, 5, 40, 41], dtype=torch.int32, device=device)
    dy, x = _operands(n, k, 41, device)
    rng = torch.tensor([4, 2], device=device)
    hyper = hyper_vector(ADAMW, device)
    grouped, unfused = (Weight(ADAMW, recipe, (experts, n, k), device) for _ in range(2))
    gradient = wgrad(dy, x, offsets=offsets, config=SMALL)
    for expert in range(experts):
        a, b = int(offsets[expert]), int(offsets[expert + 1])
        _check_gradient(gradient[expert], dy[a:b], x[a:b])
    assert not gradient[1].any()
    torch.testing.assert_close(gradient, wgrad_reference(dy, x, offsets), rtol=1e-4, atol=1e-4)

    expert_bias = torch.empty(experts, n, device=device)
    fused_wgrad_update(
        dy, x, grouped.weight, grouped.states, ADAMW, hyper, offsets=offsets, rng=rng,
        bias_gradient=expert_bias,
        config=SMALL,
    )  # fmt: skip
    flat_update(ADAMW, [unfused.weight], [gradient], [unfused.states], hyper, rng=rng)
    assert_same_bits(grouped.tensors(), unfused.tensors())
    assert not expert_bias[1].any()
    torch.testing.assert_close(expert_bias[2], dy[5:40].float().sum(0), rtol=1e-5, atol=1e-5)


def test_momentum_takes_micro_batches_one_after_the_other(device: torch.device) -> None:
    rule = get_epilogue("momentum_state")
    dy, x = _operands(24, 64, 32, device)
    momentum = torch.randn(24, 64, generator=torch.Generator().manual_seed(2)).to(device)
    expected = 0.9 * momentum.double() + dy.double().t() @ x.double()
    first = hyper_vector(rule, device, decay=0.9, gain=1.0, grad_scale=1.0)
    later = hyper_vector(rule, device, decay=1.0, gain=1.0, grad_scale=1.0)
    wgrad_accumulate(dy[:20], x[:20], momentum, first, config=SMALL)
    wgrad_accumulate(dy[20:], x[20:], momentum, later, config=SMALL)
    torch.testing.assert_close(momentum.double(), expected, rtol=1e-5, atol=1e-5)


def test_fp8_scale_is_observed_before_the_first_store(device: torch.device) -> None:
    from titanforge.kernels.codecs import allocate, fp8_advance, fp8_calibrate, get_codec

    rule = get_epilogue("momentum_state")
    dy, x = _operands(24, 64, 32, device)
    dy *= 1e-4
    state = allocate(get_codec("fp8_e4m3"), (24, 64), device)
    assert state.meta is not None
    hyper = hyper_vector(rule, device, decay=0.0, gain=1.0, grad_scale=1.0)
    fused_wgrad_update(dy, x, None, [state], rule, hyper, config=SMALL, observe=True)
    assert not state.values.view(torch.uint8).any()
    fp8_calibrate(state.meta, state.codec.levels)
    wgrad_accumulate(dy, x, state, hyper, config=SMALL)
    fp8_advance(state.meta, state.codec.levels, hyper[0])
    gradient = dy.float().t() @ x.float()
    # e4m3 keeps 4 significant bits: an error of 2^-4 of the value, or of half a step next to zero.
    assert ((decode(state) - gradient).abs() <= gradient.abs() * 2.0**-4 + state.meta[0] * 2.0**-10).all()
    assert state.meta[0] == state.meta[1]
    assert state.meta[2] == 0
    torch.testing.assert_close(state.meta[3], gradient.abs().max(), rtol=1e-5, atol=0)
    skipped = state.meta.clone()
    fp8_advance(state.meta, state.codec.levels, torch.zeros((), device=device))
    assert torch.equal(state.meta, skipped)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs more elements than 32 bits count")
def test_offsets_beyond_32_bits() -> None:
    device = torch.device("cuda")
    rule = get_epilogue("sgd")
    experts, n, k = 9, 16384, 16384  # 2.4e9 weights
    weight = torch.zeros(experts, n, k, dtype=torch.bfloat16, device=device)
    dy, x = _operands(n, k, 16, device)
    offsets = torch.tensor([0] * experts + [16], dtype=torch.int32, device=device)
    hyper = hyper_vector(rule, device, lr=1.0, weight_decay=0.0, grad_scale=1.0)
    fused_wgrad_update(dy, x, weight, [], rule, hyper, offsets=offsets)
    assert not weight[: experts - 1].any()
    expected = -(dy[:, -1].float() @ x[:, -1].float())
    torch.testing.assert_close(weight[-1, -1, -1].float(), expected, rtol=1e-2, atol=1e-2)
