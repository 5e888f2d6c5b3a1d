"""Ranks that share sequences: attention and whole models against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed_harness import run_distributed
from tests.parallelisms.test_tensor_parallel import assert_same_gradients, batch, build, fill
from titanforge.parallelisms import (
    apply_activation_checkpoint,
    apply_context_parallel,
    apply_fsdp,
    apply_tensor_parallel,
    attention_parts,
    check_context_parallel,
    clip_factor,
    pad_sequences,
    ring_attention,
    sequence_pieces,
)
from titanforge.parallelisms.context_parallel import Shares, ring_attend, spread_heads, ulysses_attend


def _whole(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _attention_equals_whole(rank: int, world_size: int, query_rows: int) -> None:
    attention_parts.QUERY_ROWS = query_rows
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    group, T = mesh.get_group(), 24
    generator = torch.Generator().manual_seed(0)
    for H, K in ((4, 4), (4, 2), (4, 1), (12, 3)):
        q, k, v, g = (
            torch.randn(2, heads, T, 8, generator=generator, dtype=torch.float64) for heads in (H, K, K, H)
        )
        ids = (torch.arange(T) >= torch.tensor([[7], [17]])).long()
        for documents in (None, ids):
            causal = torch.ones(T, T, dtype=torch.bool).tril()
            mask = causal if documents is None else causal & (ids[:, None, :, None] == ids[:, None, None, :])
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            wanted = _whole(*inputs, mask)
            wanted_grads = torch.autograd.grad(wanted, inputs, g)
            for balanced in (True, False):
                shares = Shares(mesh, balanced)
                own = shares.of(torch.arange(T)[None], rank)[0]
                parts = [x[:, :, own].clone().requires_grad_() for x in (q, k, v)]
                if balanced:
                    out = ring_attend(group)(*parts, shares.documents(documents))
                else:
                    out = ulysses_attend(_whole, group)(*parts, mask)
                torch.testing.assert_close(out, wanted[:, :, own], rtol=1e-10, atol=1e-10)
                grads = torch.autograd.grad(out, parts, g[:, :, own])
                for mine, theirs in zip(grads, wanted_grads, strict=True):
                    torch.testing.assert_close(mine, theirs[:, :, own], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("ranks", "query_rows"), [(2, 2048), (4, 2048), (2, 5)])
def test_ring_and_ulysses_equal_attention_of_one_process(ranks, query_rows):
    run_distributed(_attention_equals_whole, ranks, query_rows)


def test_every_rank_of_a_ring_has_the_same_work():
    t, work = 8, []
    for rank in range(4):
        pairs = 0
        for source in range(4):
            rows, columns, causal = ring_attention.visible_part(rank, source, t)
            size = (rows.stop - rows.start) * (columns.stop - columns.start)
            pairs += (size + t) // 2 if causal else size
        work.append(pairs)
    assert len(set(work)) == 1
    assert sum(work) == (4 * t) * (4 * t + 1) // 2, "each pair once"


@pytest.mark.parametrize(("K", "ranks", "heads"), [(4, 2, 4), (2, 4, 4), (1, 4, 4), (3, 2, 12)])
def test_key_heads_fewer_than_ranks_are_repeated_as_little_as_possible(K, ranks, heads):
    assert spread_heads(torch.zeros(1, K, 1, 1), 12, ranks).shape[1] == heads


def _model_equals_whole(rank: int, world_size: int, cp: int, tp: int) -> None:
    shape = (world_size // cp // tp, cp, tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "cp", "tp"))
    shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    for kind, method in (("llama3", "ring"), ("llama3", "ulysses"), ("gpt2", "ring"), ("qwen3", "ulysses")):
        whole, split = build(kind), build(kind)
        if tp > 1:
            apply_tensor_parallel(split, mesh["tp"])
        apply_context_parallel(split, mesh["cp"], method)
        pad_sequences(split, sequence_pieces(cp, method) * tp)
        apply_activation_checkpoint(split, "full")
        apply_fsdp(split, shards, torch.float32)
        fill(whole)
        fill(split)
        calls, rows = batch(), 4 // shape[0]
        own = slice(mesh.get_local_rank("dp_shard") * rows, (mesh.get_local_rank("dp_shard") + 1) * rows)
        expected = whole(*calls)
        expected.backward()
        loss = split(*(each[own] for each in calls))
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss, group=shards.get_group())
        torch.testing.assert_close(loss, expected.detach(), rtol=2e-6, atol=1e-5)
        assert_same_gradients(split, whole)
        norm, _ = clip_factor(split.parameters(), 1.0)
        torch.testing.assert_close(norm, clip_factor(whole.parameters(), 1.0)[0], rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            tokens = calls[0][:1, :13]
            for place in (0, 5, 9, -1):
                ours, theirs = (model(tokens, logits_at=place) for model in (split, whole))
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("ranks", "cp", "tp"), [(2, 2, 1), (4, 2, 2)])
def test_models_that_share_sequences_equal_the_whole_one(ranks, cp, tp):
    run_distributed(_model_equals_whole, ranks, cp, tp)


def test_heads_that_ulysses_cannot_deal_are_refused():
    check_context_parallel(2, "ulysses", n_heads=4, tensor_degree=2)
    check_context_parallel(3, "ring", n_heads=4)
    with pytest.raises(
        ValueError, match=r"context_parallel_degree = 4 does not divide the 2 query heads.*ring"
    ):
        check_context_parallel(4, "ulysses", n_heads=4, tensor_degree=2)
