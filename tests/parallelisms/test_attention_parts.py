"""Attention in parts against one softmax over all keys, and what kernels' 16-bit parts add up to."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed_harness import run_distributed
from titanforge.parallelisms import attention_parts, ring_attention
from titanforge.parallelisms.attention_parts import attention_part, attention_part_backward, merge_part
from titanforge.parallelisms.context_parallel import Shares, ring_attend


def _tensors(B: int, H: int, K: int, T: int, E: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, heads, T, E, generator=generator).to(dtype) for heads in (H, K, K, H)]


def _one_softmax(q, k, v, seen, g):
    """Output, log-sum-exp and the gradients of q, k, v."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in inputs[1:])
    scores = (inputs[0] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    out = scores.softmax(-1) @ v
    return (out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, inputs, g))


@pytest.mark.parametrize("rows_at_once", [2048, 3])
@pytest.mark.parametrize("sizes", [(12, 12), (12, 5, 6, 1), (12, 1, 1, 10)])
def test_parts_of_any_sizes_merge_into_one_softmax(rows_at_once, sizes, monkeypatch):
    monkeypatch.setattr(attention_parts, "QUERY_ROWS", rows_at_once)
    T = sum(sizes)
    q, k, v, g = _tensors(2, 6, 2, T, 8, torch.float64)
    q *= 8  # some queries see one key almost alone
    q[:, :, 3] *= 200
    ids = torch.randint(0, 3, (2, T), generator=torch.Generator().manual_seed(1))
    seen = (ids[:, :, None] == ids[:, None, :])[:, None] & (torch.arange(T) >= torch.arange(T)[:, None] - 20)
    own = torch.zeros(T, T, dtype=torch.bool)
    own.fill_diagonal_(True)
    seen |= own  # the first part, of all keys that are seen by their own queries, leaves no row without a key
    wanted = _one_softmax(q, k, v, seen, g)
    parts, first = [], True
    out = lse = torch.empty(0)
    start = 0
    for keys in (T, *sizes):
        columns = slice(0, T) if first else slice(start, start + keys)
        mask = seen & own if first else (seen & ~own)[..., columns]
        mask = mask[:, :, None]
        parts.append((columns, mask))
        part, part_lse = attention_part(q, k[:, :, columns], v[:, :, columns], mask, False)
        if first:
            out, lse = part, part_lse
        else:
            merge_part(out, lse, part, part_lse)
            start += keys
        first = False
    assert any((~mask.any(-1)).any() for _, mask in parts), "some queries see no key of some part"
    torch.testing.assert_close(out, wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, wanted[1], rtol=1e-12, atol=1e-12)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for columns, mask in parts:
        added = attention_part_backward(g, q, k[:, :, columns], v[:, :, columns], out, lse, mask, False)
        grads[0] += added[0]
        grads[1][:, :, columns] += added[1]
        grads[2][:, :, columns] += added[2]
    for mine, theirs in zip(grads, wanted[2:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_merge_into_bf16_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    out, part = (torch.randn(2, 3, 50, 8, generator=generator).bfloat16() for _ in range(2))
    lse, part_lse = (3 * torch.randn(2, 3, 50, generator=generator) for _ in range(2))
    part_lse[0, 0, :5] = float("-inf")
    part[0, 0, :5] = 0
    total = torch.logaddexp(lse.double(), part_lse.double())
    weights = [(each.double() - total).exp().unsqueeze(-1) for each in (lse, part_lse)]
    wanted = weights[0] * out.double() + weights[1] * part.double()
    before = out.clone()
    merge_part(out, lse, part, part_lse)
    assert torch.equal(out[0, 0, :5], before[0, 0, :5])
    # Half a unit in the last place of bf16's 8 bits, and what float32 leaves to chance.
    assert ((out.double() - wanted).abs() <= wanted.abs() * 2**-8 * 1.01 + 1e-6).all()
    torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=1e-6)


def _parts_as_kernels_give_them(*given):
    out, lse = attention_part(*given)
    return out.to(given[0].dtype), lse


def _gradients_as_kernels_give_them(*given):
    grads = attention_part_backward(*given)
    return tuple(each.to(given[0].dtype) for each in grads)


def _sums_of_16_bit_parts(rank: int, world_size: int) -> None:
    """Kernels give parts in the dtype of q; what becomes of them has about the error of one rounding."""
    ring_attention.attention_part = _parts_as_kernels_give_them
    ring_attention.attention_part_backward = _gradients_as_kernels_give_them
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    shares, T = Shares(mesh, balanced=True), 64
    q, k, v, g = _tensors(2, 4, 2, T, 16, torch.bfloat16)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    wanted = _one_softmax(q.double(), k.double(), v.double(), causal, g.double())
    own = shares.of(torch.arange(T)[None], rank)[0]
    # As a block calls it: a token's heads side by side.
    q, k, v = (x[:, :, own].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    out = ring_attend(mesh.get_group())(q, k, v, None)
    assert out.dtype == torch.bfloat16
    assert out.transpose(1, 2).is_contiguous(), "no copy before the output product"
    grads = torch.autograd.grad(out, (q, k, v), g[:, :, own])
    assert grads[0].transpose(1, 2).is_contiguous()
    for mine, theirs in zip((out, *grads), (wanted[0], *wanted[2:]), strict=True):
        apart = (mine.double() - theirs[:, :, own]).norm() / theirs[:, :, own].norm()
        assert apart < 3.3e-3, float(apart)  # summed in bf16, gradients of 4 ranks are 3.9e-3 off


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_of_16_bit_parts_is_as_exact_as_they_are(ranks):
    run_distributed(_sums_of_16_bit_parts, ranks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize(
    ("rows", "columns", "causal"),
    [
        (slice(0, 512), slice(0, 512), True),
        (slice(0, 512), slice(0, 256), False),
        (slice(256, 512), slice(0, 512), False),
    ],
)
def test_kernels_equal_formed_scores(kernel, rows, columns, causal, monkeypatch):
    q, k, v, g = (x.cuda() for x in _tensors(2, 8, 2, 512, 128, torch.bfloat16))
    q, g = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, g))

    def computed(q, k, v, g):
        out, lse = attention_part(q[:, :, rows], k[:, :, columns], v[:, :, columns], None, causal)
        whole = torch.zeros_like(q)
        whole[:, :, rows] = out
        given = (g[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], whole[:, :, rows], lse)
        return out, lse, *attention_part_backward(*given, None, causal)

    wanted = computed(*(x.double() for x in (q, k, v, g)))
    if kernel == "flash":
        monkeypatch.setattr(attention_parts, "CUDNN_HEAD_DIM", 0)
    assert attention_parts.choose_kernel(q, k, v, None, causal) == kernel
    for mine, theirs in zip(computed(q, k, v, g), wanted, strict=True):
        assert (mine.double() - theirs).norm() / theirs.norm() < 1e-2
