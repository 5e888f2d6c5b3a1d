"""The Gluon forms on the card they are for: bit for bit the portable form, every time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.cases import RECIPES, Weight, assert_same_bits, hyper_vector
from titanforge.kernels.config import _COOPERATIVE, _PINGPONG, TileConfig
from titanforge.kernels.epilogues import EPILOGUES, get_epilogue
from titanforge.kernels.flat import flat_update
from titanforge.kernels.forms import PORTABLE, unavailable
from titanforge.kernels.wgrad import fused_wgrad_update, tile_count, wgrad, wgrad_accumulate

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or bool(unavailable(CUDA)), reason="needs a Hopper GPU"),
]
OVERLAP = TileConfig(128, 128, 64, stages=4, group=8, form="pp2", overlap=True)
PAIRED = replace(_PINGPONG, paired=True)
CONFIGS = {"pp2": _PINGPONG, "pp2_overlap": OVERLAP, "pp2_paired": PAIRED, "coop": _COOPERATIVE}
TAKEN = [recipe for recipe in RECIPES if recipe != "fp8"]
# fp8 states beside a bf16 weight: a weight in fp8 is for the portable form.
RECIPES_OF_STATES = {
    name: (weight, {"signed": "fp8_e4m3", "square": "fp8_root", "magnitude": "fp8_magnitude"}, False)
    for name, weight in (("fp8_states", "bf16"), ("fp8_states_sr", "bf16_sr"))
}


@pytest.fixture(autouse=True)
def fp8_states(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, recipe in RECIPES_OF_STATES.items():
        monkeypatch.setitem(RECIPES, name, recipe)


def operands(n: int, k: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(CUDA).manual_seed(seed)
    dy = torch.randn(tokens, n, device=CUDA, generator=generator).bfloat16()
    return dy, torch.randn(tokens, k, device=CUDA, generator=generator).bfloat16()


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("recipe", [*TAKEN, *RECIPES_OF_STATES])
@pytest.mark.parametrize(("n", "k", "tokens"), [(128, 256, 1), (384, 512, 200), (2048, 4096, 512)])
def test_t0_against_the_portable_form(form: str, recipe: str, n: int, k: int, tokens: int) -> None:
    rule, config = get_epilogue("adamw"), CONFIGS[form]
    dy, x = operands(n, k, tokens)
    hyper = hyper_vector(rule, CUDA)
    found, fused, flat = (Weight(rule, recipe, (n, k), CUDA) for _ in range(3))
    norm = torch.zeros(tile_count((n, k), config), device=CUDA)
    counter = torch.zeros(1, dtype=torch.int32, device=CUDA)
    for step in range(2):
        rng = torch.tensor([(3 << 40) + 7, step], device=CUDA)
        fused_wgrad_update(
            dy, x, found.weight, found.states, rule, hyper, master=found.master, config=config, rng=rng,
            tensor_id=5, norm_partials=norm, nonfinite=counter,
        )  # fmt: skip
        fused_wgrad_update(
            dy, x, fused.weight, fused.states, rule, hyper, master=fused.master, rng=rng, tensor_id=5,
            config=TileConfig(64, 128, 64, split=2, warps=4),
        )  # fmt: skip
        gradient = wgrad(dy, x)
        flat_update(
            rule, [flat.weight], [gradient], [flat.states], hyper, masters=[flat.master], rng=rng,
            tensor_ids=[5],
        )  # fmt: skip
    assert_same_bits(found.tensors(), flat.tensors())
    assert_same_bits(found.tensors(), fused.tensors())
    torch.testing.assert_close(norm.sum(), gradient.square().sum(), rtol=1e-5, atol=0)
    assert counter.item() == 0


PORTABLE_CONFIG = TileConfig(128, 128, 64, split=2, warps=8)
# Tokens of each expert: none, less than a step, whole steps, and a token of no expert at the end.
SHARES = (0, 1, 64, 63, 0, 200, 128, 0)


@pytest.mark.parametrize("form", ["pp2", "pp2_overlap", "pp2_paired"])
@pytest.mark.parametrize("recipe", ["bf16", "int8", "int8_sr", "fp8_states", "master"])
@pytest.mark.parametrize(("n", "k"), [(128, 256), (768, 2048)])
def test_experts(form: str, recipe: str, n: int, k: int) -> None:
    rule, shape = get_epilogue("adamw"), (len(SHARES), n, k)
    offsets = torch.tensor([0, *SHARES], device=CUDA).cumsum(0).to(torch.int32)
    dy, x = operands(n, k, sum(SHARES) + 1)
    x[SHARES[1]] = torch.nan  # of the third expert, beside the one token of the second
    hyper, rng = hyper_vector(rule, CUDA), torch.tensor([5, 6], device=CUDA)
    found, fused = (Weight(rule, recipe, shape, CUDA) for _ in range(2))
    # In the same order of tiles, by which the norms lie.
    portable = replace(PORTABLE_CONFIG, group=CONFIGS[form].group)
    counters = [torch.zeros(1, dtype=torch.int32, device=CUDA) for _ in range(2)]
    norms = []
    for part, counter, config in zip((found, fused), counters, (CONFIGS[form], portable)):
        norms.append(torch.zeros(tile_count(shape, config), device=CUDA))
        for _ in range(2):
            fused_wgrad_update(
                dy, x, part.weight, part.states, rule, hyper, master=part.master, offsets=offsets, rng=rng,
                config=config, norm_partials=norms[-1], nonfinite=counter,
            )  # fmt: skip
    assert_same_bits(found.tensors(), fused.tensors())
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0, equal_nan=True)
    tiles = tile_count(shape[1:], CONFIGS[form])
    assert counters[0].item() == counters[1].item() == 2 * tiles  # of the third expert alone


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("name", [name for name in EPILOGUES if name != "adamw"])
def test_every_rule(form: str, name: str) -> None:
    rule = get_epilogue(name)
    dy, x = operands(256, 512, 100)
    hyper = hyper_vector(rule, CUDA)
    found, flat = (Weight(rule, "bf16", (256, 512), CUDA) for _ in range(2))
    fused_wgrad_update(dy, x, found.weight, found.states, rule, hyper, config=CONFIGS[form])
    flat_update(rule, [flat.weight], [wgrad(dy, x)], [flat.states], hyper)
    assert_same_bits(found.tensors(), flat.tensors())


@pytest.mark.parametrize("form", ["portable", *CONFIGS])
@pytest.mark.parametrize("recipe", ["bf16", "int8_sr"])
@pytest.mark.parametrize(("n", "k", "tokens"), [(1024, 4096, 512), (4096, 4096, 512), (4096, 14336, 2048)])
def test_a_hundred_repeats_do_not_differ(form: str, recipe: str, n: int, k: int, tokens: int) -> None:
    config = CONFIGS.get(form, PORTABLE_CONFIG)
    rule, rng = get_epilogue("adamw"), torch.tensor([3, 4], device=CUDA)
    dy, x = operands(n, k, tokens)
    hyper = hyper_vector(rule, CUDA)
    start, first, again = (Weight(rule, recipe, (n, k), CUDA) for _ in range(3))
    fused_wgrad_update(dy, x, first.weight, first.states, rule, hyper, rng=rng, config=config)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(100):
        for into, source in zip(again.tensors(), start.tensors()):
            into.copy_(source)
        fused_wgrad_update(dy, x, again.weight, again.states, rule, hyper, rng=rng, config=config)
        for a, b in zip(again.tensors(), first.tensors()):
            wrong += (a.view(torch.uint8) != b.view(torch.uint8)).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("recipe", ["bf16", "int8", "fp8_states"])
def test_flags_and_bad_tiles(form: str, recipe: str) -> None:
    rule, config = get_epilogue("adamw"), CONFIGS[form]
    n, k = 256, 768
    dy, x = operands(n, k, 70)
    start, found, portable, moved = (Weight(rule, recipe, (n, k), CUDA) for _ in range(4))
    counter = torch.zeros(1, dtype=torch.int32, device=CUDA)
    idle = hyper_vector(rule, CUDA, apply=0.0)
    x[3, 300] = float("inf")
    fused_wgrad_update(dy, x, found.weight, found.states, rule, idle, config=config, nonfinite=counter)
    assert counter.item() == 0
    assert_same_bits(found.tensors(), start.tensors())

    fused_wgrad_update(
        dy, x, found.weight, found.states, rule, hyper_vector(rule, CUDA), config=config, nonfinite=counter
    )
    assert counter.item() == n // config.block_n
    first = 300 // config.block_k * config.block_k
    spared = slice(first, first + config.block_k)
    assert torch.equal(found.weight.values[:, spared], start.weight.values[:, spared])
    assert not torch.equal(found.weight.values[:, :first], start.weight.values[:, :first])
    # The portable form on the same tiles: also what a spared tile's fp8 states become under their next scale.
    same = TileConfig(128, config.block_k, 64, split=config.block_k // 64, warps=8)
    for one, by in ((portable, same), (moved, config)):
        for part in one.states:
            if part.meta is not None and part.codec.kind == "tensor":
                part.meta[1] *= 2
        fused_wgrad_update(dy, x, one.weight, one.states, rule, hyper_vector(rule, CUDA), config=by)
    assert_same_bits(moved.tensors(), portable.tensors())


@pytest.mark.parametrize("form", CONFIGS)
def test_micro_batches_into_momentum_and_a_captured_graph(form: str) -> None:
    rule = get_epilogue("momentum_state")
    dy, x = operands(256, 512, 192)
    first = hyper_vector(rule, CUDA, decay=0.9, gain=1.0, grad_scale=1.0)
    later = hyper_vector(rule, CUDA, decay=1.0, gain=1.0, grad_scale=1.0)
    found = torch.randn(256, 512, device=CUDA)
    expected = found.clone()
    for into, config in ((found, CONFIGS[form]), (expected, TileConfig(64, 128, 64, warps=4))):
        wgrad_accumulate(dy[:128], x[:128], into, first, config=config)
        wgrad_accumulate(dy[128:], x[128:], into, later, config=config)
    assert torch.equal(found, expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wgrad_accumulate(dy, x, found, first, config=CONFIGS[form])
    before = found.clone()
    first[4] = 0.5  # decay: read by the replay, not frozen in it
    graph.replay()
    assert torch.equal(found, _accumulated(before, dy, x, first))


def _accumulated(
    momentum: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, hyper: torch.Tensor
) -> torch.Tensor:
    expected = momentum.clone()
    wgrad_accumulate(dy, x, expected, hyper, config=TileConfig(64, 128, 64, warps=4))
    return expected


@pytest.mark.parametrize(("n", "k", "tokens"), [(200, 512, 64), (256, 300, 64), (256, 512, 0)])
def test_ragged_launches_fall_back(n: int, k: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from titanforge.kernels import forms

    monkeypatch.setattr(forms, "_selected", "pp2")
    rule = get_epilogue("adamw")
    dy, x = operands(n, k, tokens)
    hyper = hyper_vector(rule, CUDA)
    found, flat = (Weight(rule, "bf16", (n, k), CUDA) for _ in range(2))
    fused_wgrad_update(dy, x, found.weight, found.states, rule, hyper)
    flat_update(rule, [flat.weight], [wgrad(dy, x)], [flat.states], hyper)
    assert_same_bits(found.tensors(), flat.tensors())
    with pytest.raises(ValueError, match="does not take this launch"):
        fused_wgrad_update(dy, x, found.weight, found.states, rule, hyper, config=_PINGPONG)
    assert forms.selected_form() != PORTABLE
