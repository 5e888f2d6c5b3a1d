"""Dion against line-by-line float64; options of matrix rules, splits, update sizes (Dobb paper, Table 9)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.interpreted import needs_interpreter, run_interpreted
from tests.trainer.recorded import RecordedGraph
from titanforge.config.sections import Optimizer
from titanforge.kernels.codecs import as_encoded
from titanforge.kernels.inverse_factor import inverse_factors, reference_inverse_factors
from titanforge.optim import build_optimizer
from titanforge.optim.batches import Batch
from titanforge.optim.dion import Dion
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.local_update import LocalWeight
from titanforge.optim.low_rank_in_place import low_rank_update
from titanforge.optim.matrix_options import DionOptions, DobbOptions, MatrixOptions, MuonOptions
from titanforge.optim.newton_schulz import newton_schulz
from titanforge.optim.orthonormal import inverse_factor, orthonormal
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.registry import build_rule
from titanforge.optim.state_stacks import one_stack
from titanforge.optim.states import tensor_id

LR, DECAY, MU = 1e-2, 0.1, 0.9
OPTIONS = {"lr": LR, "weight_decay": DECAY, "momentum": MU}


def dion_step(w: Tensor, m: Tensor, q: Tensor, g: Tensor, feedback: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Ahn et al. 2025, algorithm 1, one m x n matrix with m >= n, line by line."""
    b = m + g if feedback else MU * m + g
    p = torch.linalg.qr(b @ q).Q
    r = b.T @ p
    m = b - (1 - MU) * p @ r.T if feedback else b
    q = torch.stack([column / column.norm() for column in r.T], dim=1)
    w = (1 - LR * DECAY) * w - LR * 0.2 * math.sqrt(max(w.shape)) * p @ q.T
    return w, m, q


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("shape", "rho"), [((12, 8), 1.0), ((12, 8), 0.25), ((7, 11), 0.5), ((5, 5), 0.01)])
def test_dion_equals_the_paper(shape: tuple[int, int], rho: float, feedback: bool) -> None:
    matrix = MatrixOptions(dion=DionOptions(rho, feedback))
    rule = build_rule("dion", matrix=matrix)
    param = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    optimizer = RuleOptimizer([ParamGroupSpec("all", rule, dict(OPTIONS), ["w"], [param])])
    rank = max(1, math.floor(rho * min(shape)))
    (q,) = rule.new_auxiliary(param.shape, param.device, tensor_id("w"))
    assert q.shape == (min(shape), rank)
    wide = shape[1] > shape[0]
    w = (param.detach().T if wide else param.detach()).double()
    m, q = torch.zeros_like(w), q.double()
    for step in range(8):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(step + 1))
        param.grad = g.clone()
        optimizer.step()
        w, m, q = dion_step(w, m, q, (g.T if wide else g).double(), feedback)
    torch.testing.assert_close(param.detach().double(), w.T if wide else w, rtol=0, atol=2e-5)
    saved = optimizer.state_dict()["state"]["w"]
    torch.testing.assert_close(saved["m"].double(), m.T if wide else m, rtol=0, atol=2e-4)
    torch.testing.assert_close(saved["q"].double().abs(), q.abs(), rtol=0, atol=2e-4)


def test_orthonormal_is_that_of_qr() -> None:
    """Of any condition; the columns of QR's where the condition lets fp32 know them."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 60, 12, generator=generator)
    left, right = torch.linalg.qr(drawn).Q, torch.linalg.qr(drawn[:, :12]).Q
    for decades, tolerance in ((0, 1e-6), (4, 1e-3), (7, None)):
        spectrum = torch.logspace(0, -decades, 12)
        for x in ((left * spectrum) @ right, 1e-25 * left * spectrum):
            q = orthonormal(x)
            torch.testing.assert_close(q.mT @ q, torch.eye(12).expand(2, 12, 12), rtol=0, atol=1e-6)
            exact, r = torch.linalg.qr(x.double())
            exact = exact * torch.sign(r.diagonal(dim1=-2, dim2=-1))[:, None]
            if tolerance is not None:
                torch.testing.assert_close(q.double(), exact, rtol=0, atol=tolerance)


def test_a_factor_inverted_by_halves_is_that_of_the_library() -> None:
    x = torch.randn(3, 90, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram, identity = x.mT @ x, torch.eye(70, dtype=torch.float64)
    whole, bad = inverse_factor(gram, identity)
    halves, none = inverse_factor(gram, identity, leaf=9)
    assert bad.tolist() == none.tolist() == [0, 0, 0]
    torch.testing.assert_close(halves, whole, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(halves @ gram @ halves.mT, identity.expand(3, 70, 70), rtol=0, atol=1e-12)
    gram[1, 60, 60] = -1.0  # in the last leaf
    _, bad = inverse_factor(gram, identity, leaf=9)
    assert [int(one) != 0 for one in bad] == [False, True, False]


def check_inverse_factors(device: str = "cpu") -> None:
    """The kernel against the library; of matrices that are parts of larger ones, one of them not definite."""
    generator = torch.Generator().manual_seed(0)
    for rank in (1, 7, 8, 16, 33, 50, 100, 128):
        x = torch.randn(3, rank + 40, rank + 3, generator=generator, dtype=torch.float64).to(device)
        whole = x.mT @ x
        gram, identity = whole[:, 2:-1, 2:-1], torch.eye(rank, dtype=torch.float64, device=device)
        found, bad = inverse_factors(gram, identity)
        exact, _ = reference_inverse_factors(gram, identity)
        assert bad.tolist() == [0, 0, 0]
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-13)
        whole[1, 1 + rank, 1 + rank], whole[2, 2, 2] = -1.0, torch.nan
        found, bad = inverse_factors(gram, identity)
        assert [int(one) != 0 for one in bad] == [False, True, True]
        torch.testing.assert_close(found[0], exact[0], rtol=1e-11, atol=1e-13)
    assert inverse_factors(gram[:0], identity)[0].shape == (0, rank, rank)
    with pytest.raises(ValueError, match="inverse_factors of"):
        inverse_factors(gram.float(), identity)
    if device == "cpu":
        test_orthonormal_is_that_of_qr()
        test_orthonormal_of_dependent_columns_spans_them()
        test_a_factor_inverted_by_halves_is_that_of_the_library()


@needs_interpreter
def test_inverse_factors_by_the_kernel() -> None:
    run_interpreted(check_inverse_factors)


def test_orthonormal_of_dependent_columns_spans_them() -> None:
    x = torch.randn(3, 40, 10, generator=torch.Generator().manual_seed(0))
    x[0, :, 1], x[0, :, 2], x[0, :, 3] = x[0, :, 0], 0.0, -2 * x[0, :, 4]
    x[1] = x[1, :, :4] @ torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    q = orthonormal(x)
    torch.testing.assert_close(q.mT @ q, torch.eye(10).expand(3, 10, 10), rtol=0, atol=1e-6)
    torch.testing.assert_close(q @ (q.mT @ x), x, rtol=0, atol=2e-5)
    x[2, 5, 5] = torch.nan
    assert [bool(torch.isfinite(one).all()) for one in orthonormal(x)] == [True, True, False]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("rows", "columns", "parts"), [(30, 20, 1), (14, 24, 1), (24, 10, 2)])
def test_the_form_for_gpus_equals_the_plain_one(
    rows: int, columns: int, parts: int, feedback: bool, together: bool
) -> None:
    """Products of bf16 planes; against the rule's own function in float64, on weights updated together, whose
    momenta lie in one memory or apart.
    """
    rule = build_rule("dion", matrix=MatrixOptions(dion=DionOptions(0.4, feedback)))
    assert isinstance(rule, Dion)
    generator = torch.Generator().manual_seed(0)
    for dtype, weight_error in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        h = torch.tensor(rule.hyperparameters({"lr": 1e-1, "weight_decay": DECAY, "momentum": MU}, 1))
        drawn = torch.randn(4, rows, columns, generator=generator).to(dtype)
        drawn[2, 0, 1] = -0.0
        shape, memory = torch.Size((rows, columns)), drawn[2:].clone()
        items = [
            LocalWeight(
                weight=drawn[index].clone(),
                gradient=None,
                states=(as_encoded(memory[index] if together else memory[index].clone()),),
                auxiliary=rule.new_auxiliary(shape, drawn.device, index, parts),
                parts=parts,
            )
            for index in range(2)
        ]
        items[1].states[0].values[0, 0] = torch.nan  # makes no step but the decay, and keeps M and Q
        before = []
        for item in items:
            w, m = (t.double().unflatten(0, (parts, -1)) for t in (item.weight, item.states[0].values))
            q = item.auxiliary[0].double()
            before.append((w, m, q.view(parts, *q.shape[-2:]).clone()))
        held = [item.auxiliary[0].clone() for item in items]
        assert low_rank_update(rule, Batch(items), torch.zeros_like(h), rule.scale(rows // parts, columns))
        assert torch.equal(items[0].weight, drawn[0]) and torch.equal(items[0].auxiliary[0], held[0])
        assert torch.equal(items[0].states[0].values, drawn[2])
        assert torch.equal(items[0].states[0].values.signbit(), drawn[2].signbit())
        assert low_rank_update(rule, Batch(items), h, rule.scale(rows // parts, columns))
        for item, (w, m, q) in zip(items, before):
            weight, (momentum,), (factor,) = rule.whole_update(w, (m,), (q,), h.double())
            found = (item.weight, item.states[0].values, item.auxiliary[0].view_as(factor))
            for mine, exact, error in zip(
                found, (weight, momentum, factor), (weight_error, weight_error, 2e-4)
            ):
                mine = mine.double().view_as(exact)
                torch.testing.assert_close(mine, exact, rtol=0, atol=error * 4, equal_nan=True)
        assert torch.equal(items[1].auxiliary[0][-1:], held[1][-1:]) or parts > 1


@pytest.mark.parametrize(("rows", "columns", "parts"), [(30, 20, 1), (14, 24, 1), (24, 10, 2)])
def test_the_form_for_gpus_looks_at_no_value(rows: int, columns: int, parts: int) -> None:
    """Recorded once and run again, it goes on as steps that are taken one by one: a graph may hold it."""
    rule = build_rule("dion", matrix=MatrixOptions(dion=DionOptions(0.4)))
    assert isinstance(rule, Dion)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, 2, rows, columns, generator=generator).to(torch.bfloat16)
    shape, h = torch.Size((rows, columns)), torch.zeros(8)

    def batch_of(drawn: Tensor) -> Batch:
        return Batch(
            LocalWeight(
                weight=one.float(),
                gradient=None,
                states=(as_encoded(one.clone()),),
                auxiliary=rule.new_auxiliary(shape, one.device, 0, parts),
                parts=parts,
            )
            for one in drawn
        )

    def begin(batch: Batch, step: int) -> None:
        values = rule.hyperparameters({"lr": 0.1 / (1 + step), "weight_decay": DECAY, "momentum": MU}, 1)
        h.copy_(torch.tensor([*values, 0.0][:8]))
        h[0] = float(step != 2)
        for item, gradient in zip(batch, drawn[1:][step % 3]):
            item.states[0].values.add_(gradient)

    def launch(batch: Batch) -> None:
        assert low_rank_update(rule, batch, h, rule.scale(rows // parts, columns))

    plain, recorded = batch_of(drawn[0]), batch_of(drawn[0])
    graph: Any = RecordedGraph(torch.device("cpu"))
    for step in range(5):
        begin(plain, step)
        launch(plain)
    for step in range(5):
        begin(recorded, step)
        if step == 0:
            launch(recorded)
        else:
            if step == 1:
                graph.capture(lambda: launch(recorded))
            graph.replay()
    for mine, theirs in zip(recorded, plain):
        assert torch.equal(mine.weight, theirs.weight)
        assert torch.equal(mine.states[0].values, theirs.states[0].values)
        assert torch.equal(mine.auxiliary[0], theirs.auxiliary[0])


def test_factors_are_views_of_one_tensor_that_loading_fills() -> None:
    """Of weights of one shape, drawn as alone; elsewhere and after a load they lie where they lay."""
    model = nn.ModuleList(nn.Linear(8, rows, bias=False) for rows in (16, 16, 12, 16))
    options = Optimizer(name="Dion")
    optimizer = build_optimizer(model, options, "float32")
    saved = optimizer.state_dict()["state"]
    factors = [saved[f"{index}.weight"]["q"] for index in range(4)]
    rule = optimizer.groups[0].rule
    for index, factor in enumerate(factors):
        (drawn,) = rule.new_auxiliary(  # pyright: ignore
            model[index].weight.shape, factor.device, tensor_id(f"{index}.weight")
        )
        assert torch.equal(factor, drawn)
    whole = one_stack([factors[0], factors[1], factors[3]])
    assert whole is not None and one_stack(factors[1:]) is None
    # In another order, or with one left out between, they are no such view.
    assert one_stack([factors[1], factors[0]]) is None and one_stack([factors[0], factors[3]]) is None
    given = {name: {slot: t + 1 for slot, t in slots.items()} for name, slots in saved.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": given})
    assert torch.equal(whole[2], given["3.weight"]["q"])
    assert optimizer.state_dict()["state"]["3.weight"]["q"].data_ptr() == whole[2].data_ptr()


def check_momenta_together(device: str = "cpu") -> None:
    """Momenta in one memory move as those apart do, but for the last bit: one product, not two launches."""
    for rows, columns, parts in ((320, 160, 1), (160, 320, 1), (384, 128, 3)):
        rule = build_rule("dion", matrix=MatrixOptions(dion=DionOptions(0.25)))
        assert isinstance(rule, Dion)
        h = torch.tensor(rule.hyperparameters({"lr": 0.1, "weight_decay": DECAY, "momentum": MU}, 1)).to(
            device
        )
        generator, shape = torch.Generator().manual_seed(0), torch.Size((rows, columns))
        drawn = torch.randn(3, *shape, generator=generator).to(device, torch.bfloat16)
        drawn[2, 0, 0] = torch.inf
        found = []
        for memory in (drawn.clone(), [one.clone() for one in drawn]):
            batch = Batch(
                LocalWeight(
                    weight=drawn[0].flip(0),
                    gradient=None,
                    states=(as_encoded(memory[index]),),
                    auxiliary=tuple(q.to(device) for q in rule.new_auxiliary(shape, h.device, index, parts)),
                    parts=parts,
                )
                for index in range(len(drawn))
            )
            scale = rule.scale(rows // parts, columns)
            assert low_rank_update(rule, batch, torch.zeros_like(h), scale)
            assert all(torch.equal(item.states[0].values, one) for item, one in zip(batch, drawn))
            assert low_rank_update(rule, batch, h, scale)
            found.append([(item.weight, item.auxiliary[0], item.states[0].values) for item in batch])
        for index, ((w, q, m), (other_w, other_q, other_m)) in enumerate(zip(*found)):
            if device == "cpu":
                assert torch.equal(w, other_w) and torch.equal(q, other_q)
            # A GPU's library may choose another product for the same matrices elsewhere.
            torch.testing.assert_close(w.float(), other_w.float(), rtol=2**-7, atol=1e-5, equal_nan=True)
            torch.testing.assert_close(q, other_q, rtol=0, atol=1e-4, equal_nan=True)
            # Some of cuBLAS's products are rounded to bf16 before they are subtracted, as of M/10 here.
            apart, product = (
                (m.float() - other_m.float()).abs(),
                (drawn[index].float() - other_m.float()).abs(),
            )
            limit = 2**-7 * other_m.float().abs() + 2**-8 * product + 1e-5
            assert torch.all((m == other_m) | (apart <= limit))
            assert torch.equal(m, drawn[index]) == (index == 2 and parts == 1)


def test_momenta_together_move_as_apart() -> None:
    check_momenta_together()


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_momenta_are_views_of_one_tensor_that_steps_and_loads_write(state_dtype: Any) -> None:
    model = nn.ModuleList(nn.Linear(8, rows, bias=False) for rows in (16, 16, 12, 16, 3))
    optimizer = build_optimizer(model, Optimizer(name="Dion", state_dtype=state_dtype), "float32")
    saved = optimizer.state_dict()["state"]
    momenta = [saved[f"{index}.weight"]["m"] for index in range(5)]
    whole = one_stack([momenta[0], momenta[1], momenta[3]])
    assert whole is not None and one_stack(momenta[1:3]) is None
    for index, layer in enumerate(model):
        layer.weight.grad = torch.full_like(layer.weight, 1.0 + index)  # pyright: ignore
    optimizer.step()
    assert all(bool(one.any()) for one in whole) and not torch.equal(whole[0], whole[2])
    given = {name: {slot: t + 1 for slot, t in slots.items()} for name, slots in saved.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": given})
    assert torch.equal(whole[2], given["3.weight"]["m"])


def test_dion_of_nothing_is_nothing() -> None:
    """A zero gradient, or a missing one, from the start: no step but the decay, states finite."""
    for gradient in (None, torch.zeros(6, 4)):
        param = nn.Parameter(torch.ones(6, 4))
        rule = build_rule("dion")
        optimizer = RuleOptimizer([ParamGroupSpec("all", rule, dict(OPTIONS), ["w"], [param])])
        before = optimizer.state_dict()["state"]["w"]["q"].clone()
        param.grad = gradient
        optimizer.step()
        assert torch.equal(param.detach(), torch.full((6, 4), 1 - LR * DECAY))
        assert torch.equal(optimizer.state_dict()["state"]["w"]["q"], before)
        assert not optimizer.state_dict()["state"]["w"]["m"].any()


def test_dion_without_feedback_takes_quantised_momentum_and_with_it_refuses() -> None:
    layer = nn.Linear(64, 64, bias=False)
    options = Optimizer(name="Dion", state_dtype="int8")
    with pytest.raises(ValueError, match=r"int8.*error_feedback = false"):
        build_optimizer(layer, options, "float32")
    options.dion.error_feedback = False
    build_optimizer(layer, options, "float32")


@pytest.mark.parametrize("shape", [(16, 16), (32, 16), (16, 32)])
def test_sizes_of_raw_updates(shape: tuple[int, int]) -> None:
    """Table 9: squared norm of O, and root mean square of s O."""
    m, n = shape
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(shape, generator=generator)
    # Twenty quintic steps only swing about one: cubic Newton-Schulz gets there.
    muon = MuonOptions(30, (1.5, -0.5, 0.0))
    found = {"muon": min(m, n), "dion": 4, "rmnp": m}
    cases = [
        (name, MatrixOptions(muon=muon, dion=DionOptions(4 / min(m, n))), square)
        for name, square in found.items()
    ]
    cases += [
        ("dobb", MatrixOptions(dobb=DobbOptions(side=side, norm=norm, blocks=blocks)), square)
        for side, square in (("A", n), ("G", m))
        for norm in ("linf", "l2")
        for blocks in (1, 4)
    ]
    for name, options, square in cases:
        rule = build_rule(name, matrix=options)
        h = torch.tensor(rule.hyperparameters(OPTIONS, 1))
        auxiliary = rule.new_auxiliary(g.shape, g.device)
        if name == "dobb":  # any complete bases
            drawn = torch.randn(auxiliary[1].shape, generator=generator)
            auxiliary = (auxiliary[0], torch.linalg.qr(drawn).Q)
        update, _, _ = rule.scaled_direction((g,), auxiliary, h)  # pyright: ignore
        raw = update / (0.2 * math.sqrt(max(m, n)))
        assert float(raw.square().sum()) == pytest.approx(square, rel=1e-3), options
        rms = 0.2 * math.sqrt(max(m, n) * square / (m * n))
        assert float(update.square().mean().sqrt()) == pytest.approx(rms, rel=1e-3), options


def test_scales() -> None:
    for name, scale, expected in [
        ("muon", "own", math.sqrt(3.0)),
        ("dion", "own", math.sqrt(3.0)),
        ("dion", "rank_corrected", 0.2 * math.sqrt(12 * 4 / 2)),
        ("muon", "shared", 0.2 * math.sqrt(12)),
    ]:
        rule = build_rule(name, matrix=MatrixOptions(scale, dion=DionOptions(0.5)))
        assert rule.scale(12, 4) == pytest.approx(expected)  # pyright: ignore
    with pytest.raises(ValueError, match=r"rank_corrected.*is for Dion"):
        build_rule("muon", matrix=MatrixOptions("rank_corrected"))


class Attention(nn.Module):
    head_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(8, 24, bias=False)


@pytest.mark.parametrize("name", ["Muon", "Dion", "RMNP"])
@pytest.mark.parametrize(("per_head", "parts"), [(False, 3), (True, 6)])
def test_fused_projection_is_split(name: str, per_head: bool, parts: int) -> None:
    """Equal to an optimizer over the parts as weights of their own; the scale is of a part."""
    model = nn.Module()
    model.attention = Attention()
    options = Optimizer(name=name, lr=LR, per_head=per_head)
    options.dion.error_feedback = True
    optimizer = build_optimizer(model, options, "float32")
    weight = model.attention.wqkv.weight
    whole = weight.detach().clone()
    g = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
    weight.grad = g.clone()
    saved = optimizer.state_dict()["state"]["attention.wqkv.weight"]
    first_q = saved["q"].clone() if name == "Dion" else None
    optimizer.step()
    rule = optimizer.groups[0].rule  # pyright: ignore
    h = torch.tensor(rule.hyperparameters(optimizer.groups[0].options, 1))
    for index, (w, part) in enumerate(zip(whole.chunk(parts), g.chunk(parts))):
        auxiliary = () if first_q is None else (first_q[index],)
        expected, _ = rule.update(part, w, (torch.zeros_like(w), *auxiliary), h)
        torch.testing.assert_close(weight.detach().chunk(parts)[index], expected, rtol=0, atol=1e-6)


def test_coefficients_are_used() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(newton_schulz(x, 30, coefficients=(1.5, -0.5, 0.0)), u @ v, rtol=0, atol=1e-4)
    assert (newton_schulz(x, 30) - u @ v).abs().max() > 1e-3
