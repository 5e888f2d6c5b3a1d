"""The update functions on CPU: their reference path, their checks, and life under torch.compile."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import RECIPES, Weight, assert_same_bits, hyper_vector
from titanforge.kernels._triton import INTERPRET
from titanforge.kernels.codecs import CODECS, Encoded
from titanforge.kernels.embedding import embedding_update
from titanforge.kernels.epilogues import EPILOGUES, get_epilogue
from titanforge.kernels.flat import flat_update
from titanforge.kernels.step import make_target
from titanforge.kernels.vector import update_vector, vector_tile_count
from titanforge.kernels.wgrad import fused_wgrad_update, wgrad

ADAMW = get_epilogue("adamw")
pytestmark = pytest.mark.skipif(INTERPRET, reason="the reference path runs where Triton does not")


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_equals_unfused_on_cpu(recipe: str) -> None:
    generator = torch.Generator().manual_seed(0)
    dy, x = torch.randn(2, 9, 20, generator=generator), torch.randn(2, 9, 70, generator=generator)
    fused, unfused = (Weight(ADAMW, recipe, (20, 70), "cpu") for _ in range(2))
    hyper, rng = hyper_vector(ADAMW), torch.tensor([3, 4])
    counter = torch.zeros(1, dtype=torch.int32)
    fused_wgrad_update(
        dy,
        x,
        fused.weight,
        fused.states,
        ADAMW,
        hyper,
        master=fused.master,
        rng=rng,
        tensor_id=1,
        nonfinite=counter,
    )
    flat_update(
        "adamw", [unfused.weight], [wgrad(dy, x)], [unfused.states], hyper, masters=[unfused.master], rng=rng,
        tensor_ids=[1],
    )  # fmt: skip
    assert_same_bits(fused.tensors(), unfused.tensors())
    assert counter.item() == 0


def test_nonfinite_gradient_is_left_and_counted() -> None:
    case = Weight(ADAMW, "int8", (4, 70), "cpu")
    before = [tensor.clone() for tensor in case.tensors()]
    counter = torch.zeros(1, dtype=torch.int32)
    gradient = torch.zeros(4, 70)
    gradient[2, 2] = float("nan")
    flat_update(ADAMW, [case.weight], [gradient], [case.states], hyper_vector(ADAMW), nonfinite=counter)
    assert counter.item() == 1
    assert_same_bits(case.tensors(), before)


def test_rules_with_wrong_arguments_say_what_does_not_fit() -> None:
    case = Weight(ADAMW, "fp32", (4, 8), "cpu")
    hyper, gradient = hyper_vector(ADAMW), torch.zeros(4, 8)
    dy, x = torch.zeros(3, 4), torch.zeros(3, 8)
    with pytest.raises(ValueError, match="no update rule named 'adamm'"):
        fused_wgrad_update(dy, x, case.weight, case.states, "adamm", hyper)
    with pytest.raises(ValueError, match=r"\('m', 'v'\), 1 were given"):
        fused_wgrad_update(dy, x, case.weight, case.states[:1], ADAMW, hyper)
    with pytest.raises(ValueError, match="hyper vector of 11 or more values"):
        fused_wgrad_update(dy, x, case.weight, case.states, ADAMW, hyper[:5])
    with pytest.raises(ValueError, match=r"shape \(3, 8\), the weight \(4, 8\)"):
        fused_wgrad_update(torch.zeros(3, 3), x, case.weight, case.states, ADAMW, hyper)
    with pytest.raises(ValueError, match="dy has 2 tokens and x has 3"):
        fused_wgrad_update(dy[:2], x, case.weight, case.states, ADAMW, hyper)
    with pytest.raises(ValueError, match="must be contiguous"):
        flat_update(ADAMW, [torch.zeros(8, 4).t()], [gradient], [case.states], hyper)
    with pytest.raises(ValueError, match="needs rng"):
        random = Weight(ADAMW, "bf16_sr", (4, 8), "cpu")
        flat_update(ADAMW, [random.weight], [gradient], [random.states], hyper)
    with pytest.raises(ValueError, match="takes no master"):
        rule = get_epilogue("momentum_state")
        flat_update(
            rule, None, [gradient], [[gradient.clone()]], hyper_vector(rule), masters=[gradient.clone()]
        )
    with pytest.raises(ValueError, match="scales of m"):
        wrong = Encoded(torch.zeros(4, 8, dtype=torch.int8), CODECS["int8"], torch.zeros(4, 2))
        flat_update(ADAMW, [case.weight], [gradient], [[wrong, case.states[1]]], hyper)
    with pytest.raises(ValueError, match="lists of one length"):
        flat_update(ADAMW, [case.weight], [gradient], [], hyper)


class _Consume(torch.autograd.Function):
    """A linear whose weight gradient is consumed in backward, as the fused engine does it."""

    @staticmethod
    def forward(ctx, x, weight, m, v, hyper):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight, m, v, hyper)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight, m, v, hyper = ctx.saved_tensors
        dx = dy @ weight
        fused_wgrad_update(dy, x, weight, [m, v], ADAMW, hyper)
        return dx, None, None, None, None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_update_inside_backward_compiles_as_one_graph(backend: str) -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor, m: torch.Tensor, v: torch.Tensor, hyper: torch.Tensor):
        return _Consume.apply(x.sin(), weight, m, v, hyper).square().sum()  # type: ignore[no-untyped-call]

    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(6, 70, generator=generator, requires_grad=True)
        # As FORGE hands it to the compiler: torch 2.11 lets no compiled backward write to a leaf.
        weight = torch.randn(20, 70, generator=generator).requires_grad_(backend == "eager")
        m, v = torch.zeros(20, 70), torch.zeros(20, 70)
        step = torch.compile(loss, backend=backend, fullgraph=True) if compiled else loss
        step(x, weight, m, v, hyper_vector(ADAMW)).backward()
        assert weight.grad is None
        assert x.grad is not None
        results.append((weight.detach(), m, v, x.grad))
    assert results[0][1].any()
    assert_same_bits(results[1], results[0])


def test_flat_and_embedding_updates_compile_as_one_graph() -> None:
    def step(
        weight: torch.Tensor, m: torch.Tensor, v: torch.Tensor, dy: torch.Tensor, ids: torch.Tensor
    ) -> None:
        hyper = hyper_vector(ADAMW)
        embedding_update(dy * 2, ids, weight, [m, v], ADAMW, hyper)
        flat_update(ADAMW, [weight], [weight * 0.1], [[m, v]], hyper)

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)
        weight, m, v = torch.randn(5, 64, generator=generator), torch.zeros(5, 64), torch.zeros(5, 64)
        function(weight, m, v, torch.randn(3, 64, generator=generator), torch.tensor([1, 4, 1]))
        results.append([weight, m, v])
    assert_same_bits(results[1], results[0])


def test_every_rule_has_both_forms_of_one_signature() -> None:
    for name, rule in EPILOGUES.items():
        assert len(rule.slots) == len(rule.slot_kinds) <= 2
        assert rule.hyper_names[:4] == ("apply", "lr", "weight_decay", "grad_scale")
        w = torch.ones(2, 3)
        out = rule.reference(torch.ones(2, 3), w, *[torch.ones(2, 3)] * len(rule.slots), hyper_vector(rule))
        assert len(out) == 1 + len(rule.slots)
        assert torch.equal(out[0], w) is not rule.updates_weight, name


def test_a_vector_without_elements_has_no_sums() -> None:
    rule, weight = get_epilogue("sgd"), torch.empty(1, 0)
    update_vector(
        torch.empty(0), make_target(rule, weight, ()), rule, hyper_vector(rule),
        norm_partials=torch.empty(vector_tile_count(0)),
    )  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["adamw", "lion", "momentum_state"])
def test_a_tensor_in_pieces_has_the_bits_of_the_whole(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, generator = get_epilogue(name), torch.Generator().manual_seed(0)
    gradient = torch.randn(70, 30, generator=generator).t()  # not contiguous
    whole, cut = (Weight(rule, recipe, (30, 70), "cpu") for _ in range(2))
    hyper, rng = hyper_vector(rule), torch.tensor([3, 4])
    for weight, size in ((whole, 1 << 20), (cut, 64)):
        monkeypatch.setattr("titanforge.kernels.step._PIECE", size)
        flat_update(
            rule, [weight.weight], [gradient], [weight.states], hyper, masters=[weight.master], rng=rng
        )
    assert_same_bits(cut.tensors(), whole.tensors())


def test_a_gradient_whose_sum_overflows_is_finite() -> None:
    weight, before = (Weight(ADAMW, "fp32", (2, 64), "cpu") for _ in range(2))
    count, gradient = torch.zeros(1, dtype=torch.int32), torch.full((2, 64), 3e38)
    flat_update(ADAMW, [weight.weight], [gradient], [weight.states], hyper_vector(ADAMW), nonfinite=count)
    assert not torch.equal(weight.tensors()[0], before.tensors()[0])
    gradient[1, 3] = -torch.inf
    after = [tensor.clone() for tensor in weight.tensors()]
    flat_update(ADAMW, [weight.weight], [gradient], [weight.states], hyper_vector(ADAMW), nonfinite=count)
    assert_same_bits(weight.tensors(), after)
    assert int(count) == 1
