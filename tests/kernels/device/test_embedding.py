"""Embedding rows: summed per token id, stepped once, untouched rows included."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import Weight, assert_same_bits, hyper_vector
from titanforge.kernels.embedding import (
    embedding_gradient,
    embedding_gradient_reference,
    embedding_tile_count,
    embedding_update,
)
from titanforge.kernels.epilogues import get_epilogue
from titanforge.kernels.flat import flat_update

ADAMW = get_epilogue("adamw")
ROWS = 13


def _tokens(columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(columns)
    ids = torch.tensor([[3, 3, 0, 7, 3, 12], [3, -1, 3, 13, 9, 3]])  # -1 and 13 belong to other shards
    dy = torch.randn(2, 6, columns, generator=generator).to(torch.bfloat16)
    return dy.to(device), ids.to(device)


@pytest.mark.parametrize("recipe", ["fp32", "bf16_sr", "int8", "fp8"])
@pytest.mark.parametrize("columns", [64, 70])
def test_fused_rows_equal_a_dense_step(columns: int, recipe: str, device: torch.device) -> None:
    dy, ids = _tokens(columns, device)
    fused, dense = (Weight(ADAMW, recipe, (ROWS, columns), device) for _ in range(2))
    hyper, rng = hyper_vector(ADAMW, device), torch.tensor([8, 1], device=device)
    norms = torch.empty(embedding_tile_count(ROWS, columns), device=device)
    embedding_update(
        dy, ids, fused.weight, fused.states, ADAMW, hyper, rng=rng, tensor_id=2, norm_partials=norms
    )
    gradient = embedding_gradient(dy, ids, ROWS)
    flat_update(ADAMW, [dense.weight], [gradient], [dense.states], hyper, rng=rng, tensor_ids=[2])
    assert_same_bits(fused.tensors(), dense.tensors())

    reference = embedding_gradient_reference(dy, ids, ROWS)
    torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)
    assert not gradient[1].any()
    assert gradient[3].any()
    torch.testing.assert_close(norms.sum(), reference.square().sum(), rtol=1e-5, atol=0)


def test_no_tokens_still_decays_every_row(device: torch.device) -> None:
    fused, dense = (Weight(ADAMW, "bf16", (ROWS, 64), device) for _ in range(2))
    hyper = hyper_vector(ADAMW, device)
    no_ids = torch.empty(0, dtype=torch.int64, device=device)
    embedding_update(torch.empty(0, 64, device=device), no_ids, fused.weight, fused.states, ADAMW, hyper)
    flat_update(ADAMW, [dense.weight], [torch.zeros(ROWS, 64, device=device)], [dense.states], hyper)
    assert_same_bits(fused.tensors(), dense.tensors())
