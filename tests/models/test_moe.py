"""Layers of experts: against a loop over tokens, and what keeps the experts equally busy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.models.families import batch, tiny
from titanforge.models.initialization import initialize_weights
from titanforge.models.layers.grouped import _grouped_loop, grouped_linear
from titanforge.models.layers.moe import MoE

D, WIDTH, E, K = 16, 12, 5, 2


def layer(**options) -> MoE:
    moe = MoE(D, WIDTH, E, K, 0.3, **options)
    initialize_weights(moe, seed=0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.mul_(15)
    return moe


def by_token(moe: MoE, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """float64, one token and expert at a time."""
    router, w1, w2, w3 = (
        w.double() for w in (moe.router.weight, moe.experts.w1, moe.experts.w2, moe.experts.w3)
    )
    rows = []
    for token in x.double().view(-1, D):
        p = torch.softmax(router @ token, 0)
        chosen = sorted(range(E), key=lambda e: -float(p[e].detach() + (0 if bias is None else bias[e])))[:K]
        total = sum(p[e] for e in chosen) if moe.normalize_top_k else 1.0
        rows.append(sum(p[e] / total * (w2[e] @ (F.silu(w1[e] @ token) * (w3[e] @ token))) for e in chosen))
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_output_and_gradients_equal_a_loop_over_tokens(normalised, with_bias):
    moe = layer(normalize_top_k=normalised, with_bias=with_bias)
    bias = torch.tensor([0.5, -0.5, 0.0, 0.2, -0.1]) if with_bias else None
    if bias is not None:
        moe.router.expert_bias.copy_(bias)
    x = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    factor = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(1))
    y, routing = moe(x)
    ours = torch.autograd.grad((y * factor).sum(), [x, *moe.parameters()], retain_graph=True)
    expected = by_token(moe, x, bias)
    theirs = torch.autograd.grad((expected * factor).sum(), [x, *moe.parameters()])
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())
    assert routing.load_E.sum() == 2 * 9 * K


def test_every_token_to_one_expert_is_not_dropped():
    """The router sends all tokens to experts 1 and 3: the others get none, and zero gradients."""
    moe = layer()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[[1, 3], 0] = 5.0
    x = torch.rand(1, 40, D, generator=torch.Generator().manual_seed(0)) + 0.1
    y, routing = moe(x)
    y.sum().backward()
    assert routing.load_E.tolist() == [0, 40, 0, 40, 0]
    torch.testing.assert_close(y.double(), by_token(moe, x), rtol=1e-4, atol=1e-5)
    for weight in (moe.experts.w1, moe.experts.w2, moe.experts.w3):
        assert (weight.grad[[0, 2, 4]] == 0).all() and (weight.grad[[1, 3]] != 0).any()


def test_grouped_loop_is_a_well_behaved_operator():
    x = torch.randn(7, 4, requires_grad=True)
    weight = torch.randn(3, 5, 4, requires_grad=True)
    ends = torch.tensor([3, 3, 7], dtype=torch.int32)
    torch.library.opcheck(_grouped_loop, (x, weight, ends))
    y = grouped_linear(x.double(), weight.double(), ends)
    assert torch.autograd.gradcheck(grouped_linear, (x.double(), weight.double(), ends))
    torch.testing.assert_close(y[:3], x[:3].double() @ weight[0].double().T)
    torch.testing.assert_close(y[3:], x[3:].double() @ weight[2].double().T)


def test_imbalance_is_one_when_alike_and_e_when_one_takes_all():
    moe = MoE(D, WIDTH, E, 1, 0.3)
    initialize_weights(moe, seed=0)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[2, 0] = 100.0
    x = torch.ones(1, 30, D)
    assert moe(x)[1].imbalance.item() == pytest.approx(E)
    moe.router.weight.data.zero_()
    assert moe(x)[1].imbalance.item() == pytest.approx(1.0)


def test_auxiliary_term_changes_gradients_not_the_loss():
    with_term = tiny("qwen3_moe", moe_auxiliary_loss_coefficient=0.1)
    without = tiny("qwen3_moe", moe_balancing="none")
    tokens, labels = batch()
    loss, plain = with_term(tokens, labels=labels), without(tokens, labels=labels)
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    loss.backward()
    plain.backward()
    counted = int((labels != -100).sum())
    name = "layers.1.feed_forward.router.weight"
    difference = with_term.get_parameter(name).grad - without.get_parameter(name).grad
    # by hand: coefficient x counted tokens x d(imbalance of layer 1)/d(router) / layers
    seen = {}
    without.layers["1"].feed_forward.register_forward_hook(lambda m, i, o: seen.update(r=o[1]))
    without(tokens, labels=labels)
    (by_hand,) = torch.autograd.grad(seen["r"].imbalance, without.get_parameter(name))
    torch.testing.assert_close(difference, 0.1 * counted * by_hand / 2, rtol=1e-3, atol=1e-5)
    without.eval()
    assert without(tokens, labels=labels).requires_grad


def test_load_is_counted_in_training_alone_and_read_once_a_step():
    model = tiny("qwen3_moe")
    tokens, labels = batch()
    model(tokens)
    model(tokens, logits_at=3)
    with torch.no_grad():
        model(tokens, labels=labels)
    assert model.load.sum() == 0
    for _ in range(2):
        model(tokens, labels=labels).backward()
    statistics = model.step_statistics()
    assert statistics[:, :-1].sum(1).tolist() == [2 * 2 * 12 * 2] * 2
    model.end_step(torch.ones(()))
    assert model.load.sum() == 0
    metrics = model.metrics()
    assert set(metrics) == {"router/max_load", "router/min_load", "router/imbalance"}
    assert 1 <= metrics["router/max_load"] <= 3 and 0 <= metrics["router/min_load"] <= 1
    assert 0.5 < metrics["router/imbalance"] < 3
    assert not any("load" in name for name in model.state_dict())


def test_bias_moves_against_the_load_and_not_on_a_void_step():
    model = tiny("qwen3_moe", moe_balancing="bias", moe_bias_update_rate=0.01)
    tokens, labels = batch()
    model(tokens, labels=labels).backward()
    load = model.load.clone()
    bias = model.layers["0"].feed_forward.router.expert_bias
    assert "layers.0.feed_forward.router.expert_bias" in model.state_dict()
    model.end_step(torch.zeros(()))
    assert (bias == 0).all()
    model.load.copy_(load)
    model.end_step(torch.ones(()))
    torch.testing.assert_close(bias, 0.01 * torch.sign(load[0, :-1].mean() - load[0, :-1]))


@pytest.mark.parametrize("balancing", ["bias", "auxiliary_loss"])
def test_a_lopsided_router_is_evened_out(balancing):
    """Steps on random tokens from a router that begins by favouring two experts."""
    model = tiny(
        "qwen3_moe",
        n_layers=1,
        moe_balancing=balancing,
        moe_bias_update_rate=0.02,
        moe_auxiliary_loss_coefficient=1.0,
    )
    with torch.no_grad():
        model.layers["0"].ffn_norm.weight.fill_(1.0)
        model.tok_embeddings.weight += 0.5  # what all tokens have in common, and two experts answer to
        model.layers["0"].feed_forward.router.weight[:2] += 0.15
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if balancing == "auxiliary_loss" else 0.0)
    seen = []
    for step in range(60):
        tokens, labels = batch(seed=step, B=4, T=16)
        optimizer.zero_grad()
        (model(tokens, labels=labels) / (labels != -100).sum()).backward()
        optimizer.step()
        model.end_step(torch.ones(()))
        seen.append(model.metrics()["router/max_load"].item())
    assert sum(seen[-10:]) / 10 < 0.7 * seen[0], seen


def test_bfloat16_bias_is_kept_in_float32():
    model = tiny("qwen3_moe", moe_balancing="bias")
    router = model.layers["0"].feed_forward.router
    router.expert_bias.fill_(1 + 1e-4)
    model.to(torch.bfloat16)
    assert router.expert_bias.dtype == torch.float32
    assert (router.expert_bias == torch.tensor(1 + 1e-4)).all()
    tokens, labels = batch()
    model(tokens, labels=labels).backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ends", [[64, 64, 100, 137], [0, 0, 0, 137], [1, 2, 3, 137]])
def test_cuda_grouped_product_is_near_the_loop(ends):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(137, 64, generator=generator)
    weight = torch.randn(4, 96, 64, generator=generator) / 8
    grad = torch.randn(137, 96, generator=generator)
    x, weight, grad = (t.cuda().bfloat16() for t in (x, weight, grad))
    ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = grouped_linear(a, b, ends)
    y.backward(grad)
    c, d = x.float().requires_grad_(), weight.float().requires_grad_()
    expected = grouped_linear(c, d, ends)
    expected.backward(grad.float())
    for ours, exact in ((y, expected), (a.grad, c.grad), (b.grad, d.grad)):
        assert (ours.float() - exact).norm() <= 1e-2 * exact.norm()
