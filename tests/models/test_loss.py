"""The chunked head loss against F.cross_entropy on whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titanforge.models.layers.loss import (
    ChunkedLinearCrossEntropy,
    OutputHead,
    chunked_linear_cross_entropy,
    loss_and_logits_gradient,
    loss_of_logits,
)

N, D, V = 23, 16, 37


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64) / 2
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::4] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def expected(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, factor: float = 1.0):
    """float64 loss and gradients for the same (already rounded) inputs."""
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(h @ w.T, labels, ignore_index=-100, reduction="sum")
    (loss * factor).backward()
    return loss.detach(), h.grad, w.grad


@pytest.mark.parametrize("chunk", [1, 4, 7, 22, 23, 100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)]
)
def test_loss_and_gradients(chunk, dtype, tolerance):
    hidden, weight, labels = inputs(dtype)
    loss = chunked_linear_cross_entropy(hidden, weight, labels, chunk)
    (loss * 0.37).backward()
    true_loss, true_hidden, true_weight = expected(hidden, weight, labels, 0.37)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert abs(loss.double() - true_loss) <= tolerance * true_loss
    for gradient, true in ((hidden.grad, true_hidden), (weight.grad, true_weight)):
        assert gradient.dtype == dtype
        assert (gradient.double() - true).norm() <= tolerance * true.norm()
    assert (hidden.grad[labels == -100] == 0).all()


def test_bfloat16_is_no_worse_than_whole_logits():
    """The same mathematics through torch's linear and cross_entropy, in bf16 with float32 log-softmax."""
    hidden, weight, labels = inputs(torch.bfloat16)
    _, true_hidden, true_weight = expected(hidden, weight, labels)
    chunked_linear_cross_entropy(hidden, weight, labels, 3).backward()
    ours = [(hidden.grad.double() - true_hidden).norm(), (weight.grad.double() - true_weight).norm()]
    hidden.grad = weight.grad = None
    F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum").backward()
    plain = [(hidden.grad.double() - true_hidden).norm(), (weight.grad.double() - true_weight).norm()]
    assert ours[0] <= 1.1 * plain[0] and ours[1] <= 1.1 * plain[1]


def test_many_bfloat16_chunks_do_not_wear_the_weight_gradient_down():
    """2048 equal tokens, one per chunk: a bf16 sum would stop growing at 256 times one contribution."""
    hidden = torch.ones(2048, 4, dtype=torch.bfloat16)
    weight = torch.zeros(4, 4, dtype=torch.bfloat16, requires_grad=True)
    chunked_linear_cross_entropy(hidden, weight, torch.zeros(2048, dtype=torch.int64), 1).backward()
    assert weight.grad[1, 0].item() == 2048 / 4


def test_confident_token_keeps_its_gradient_in_bfloat16():
    hidden = torch.tensor([[1.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[7.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    chunked_linear_cross_entropy(hidden, weight, torch.zeros(1, dtype=torch.int64), 8).backward()
    exact = -torch.sigmoid(torch.tensor(-7.0)).item()  # p - 1 = -0.00091, where bf16's 1 - p is 0 or 0.0039
    assert weight.grad[0, 0].item() == pytest.approx(exact, rel=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [5, 100])
def test_every_label_ignored(dtype, chunk):
    hidden, weight, labels = inputs(dtype)
    loss = chunked_linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), chunk)
    loss.backward()
    assert loss.item() == 0.0
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, labels = inputs(torch.float32)
    _, true_hidden, true_weight = expected(hidden, weight, labels)
    chunked_linear_cross_entropy(hidden.detach(), weight, labels, 5).backward()
    torch.testing.assert_close(weight.grad.double(), true_weight, rtol=1e-4, atol=1e-5)
    chunked_linear_cross_entropy(hidden, weight.detach(), labels, 5).backward()
    torch.testing.assert_close(hidden.grad.double(), true_hidden, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not chunked_linear_cross_entropy(hidden, weight, labels, 5).requires_grad


def test_backward_twice_gives_the_same_again():
    hidden, weight, labels = inputs(torch.float32)
    loss = chunked_linear_cross_entropy(hidden, weight, labels, 5)
    first = torch.autograd.grad(loss * 0.5, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 0.5, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_gradcheck():
    hidden, weight, labels = inputs(torch.float64)
    function, gradient = ChunkedLinearCrossEntropy.apply, loss_and_logits_gradient
    assert torch.autograd.gradcheck(
        lambda h, w: function(h, w, labels, 5, True, True, gradient, loss_of_logits), (hidden, weight)
    )


def test_nonfinite_hidden_state_shows_in_the_loss():
    hidden, weight, labels = inputs(torch.float32)
    with torch.no_grad():
        hidden[1, 0] = float("nan")
    assert chunked_linear_cross_entropy(hidden, weight, labels, 5).isnan()


def test_head_never_holds_all_logits(monkeypatch):
    head = OutputHead(D, V, chunk_logits=4 * V + 1)
    assert head.chunk_tokens == 4
    seen = []
    whole = torch.log_softmax

    def spy(logits, *args, **kwargs):
        seen.append(tuple(logits.shape))
        return whole(logits, *args, **kwargs)

    monkeypatch.setattr(torch, "log_softmax", spy)
    hidden, _, labels = inputs(torch.float32)
    loss = head(hidden.view(1, N, D), labels.view(1, N))
    assert max(seen) == (4, V) and len(seen) == 6
    logits = head(hidden)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="sum"))


def test_chunks_are_whole_tiles_where_they_can_be():
    assert OutputHead(1, 128256).chunk_tokens == 2048
    assert OutputHead(1, 256, chunk_logits=256 * 300).chunk_tokens == 256
    assert OutputHead(1, 256, chunk_logits=1).chunk_tokens == 1


def test_compiled_head_is_the_same_head():
    plain, compiled = OutputHead(D, V, chunk_logits=4 * V), OutputHead(D, V, chunk_logits=4 * V)
    compiled.load_state_dict(plain.state_dict())
    compiled.compile(backend="aot_eager", fullgraph=True)
    hidden, _, labels = inputs(torch.float32)
    other = hidden.detach().clone().requires_grad_()
    loss, expected = compiled(hidden, labels), plain(other, labels)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, other.grad)
    torch.testing.assert_close(compiled.weight.grad, plain.weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden, labels), expected)
        torch.testing.assert_close(compiled(hidden), plain(hidden))


def test_empty_batch_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        chunked_linear_cross_entropy(
            torch.zeros(0, D), torch.zeros(V, D), torch.zeros(0, dtype=torch.int64), 4
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", [5, 100])
def test_cuda_bfloat16_is_near_float64(chunk):
    hidden, weight, labels = inputs(torch.bfloat16)
    true_loss, true_hidden, true_weight = expected(hidden, weight, labels)
    hidden, weight = (t.detach().cuda().requires_grad_() for t in (hidden, weight))
    loss = chunked_linear_cross_entropy(hidden, weight, labels.cuda(), chunk)
    loss.backward()
    assert loss.item() == pytest.approx(true_loss.item(), rel=1.5e-2)
    for gradient, true in ((hidden.grad, true_hidden), (weight.grad, true_weight)):
        assert (gradient.cpu().double() - true).norm() <= 1.5e-2 * true.norm()
