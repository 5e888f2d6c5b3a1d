"""Models with modules that the axes do not know: refused where ranks would come apart in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed_harness import run_distributed
from titanforge.models.registry import build_model
from titanforge.parallelisms import (
    apply_context_parallel,
    apply_tensor_parallel,
    plan_pipeline,
    split_model,
)


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class HalfNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class OwnAttention(nn.Module):
    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x


def build() -> Any:
    with torch.device("meta"):
        return build_model(
            "llama3", "debugmodel", vocab_size=64, seq_len=16, overrides={"dim": 32, "n_layers": 2}
        )[0]


def linear(model: Any) -> None:
    model.layers["1"].feed_forward.w2 = Scaled(96, 32, bias=False, device="meta")


def norm(model: Any) -> None:
    model.norm = HalfNorm(32, device="meta")


def replaced(model: Any) -> None:
    model.layers["0"].attention.wq.forward = lambda x: x


def no_linear(model: Any) -> None:
    model.layers["0"].attention.wv = nn.Sequential(nn.Linear(32, 32, device="meta"))


def padding(model: Any) -> None:
    model.tok_embeddings.padding_idx = 0


def head(model: Any) -> None:
    model.output = nn.Linear(32, 64, bias=False, device="meta")


def adapter(model: Any) -> None:
    model.layers["0"].feed_forward.adapter = nn.Linear(32, 32, device="meta")


def scale(model: Any) -> None:
    model.layers["0"].attention.scale = nn.Parameter(torch.ones(1, device="meta"))


def own_attention(model: Any) -> None:
    model.layers["1"].attention = OwnAttention()


def second_head(model: Any) -> None:
    model.value_head = nn.Linear(32, 1, device="meta")


def cut(model: Any, mesh: Any) -> None:
    split_model(model, plan_pipeline(2, "1F1B", 2, batch_size=2), 0)


def ring(model: Any, mesh: Any) -> None:
    apply_context_parallel(model, mesh, "ring")


Split = Callable[[Any, Any], Any]
REFUSED: list[tuple[Split, Callable[[Any], None], str]] = [
    (apply_tensor_parallel, linear, r"tensor_parallel_degree = 2: layers.1.feed_forward.w2 \(Scaled\) has a"),
    (apply_tensor_parallel, norm, r"norm \(HalfNorm\) has a forward of its own.*torch.nn.RMSNorm.*or set"),
    (apply_tensor_parallel, replaced, r"layers.0.attention.wq \(Linear\) has a forward of its own"),
    (apply_tensor_parallel, no_linear, r"layers.0.attention.wv \(Sequential\) is no torch.nn.Linear"),
    (apply_tensor_parallel, padding, r"tok_embeddings \(Embedding\) has padding_idx"),
    (apply_tensor_parallel, head, r"output is a Linear, which takes the loss of a whole vocabulary"),
    (apply_tensor_parallel, adapter, r"layers.0.feed_forward.adapter.weight belongs to no module"),
    (apply_tensor_parallel, scale, r"layers.0.attention.scale belongs to no module"),
    (ring, own_attention, r"context_parallel_degree = 2: layers.1 has no attention that calls its `attend`"),
    (cut, second_head, r"pipeline_parallel_degree = 2: value_head.weight belongs to no stage"),
]


def _refusals(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shared",))
    for split, change, says in REFUSED:
        split(build(), mesh)
        model = build()
        change(model)
        with pytest.raises(ValueError, match=says):
            split(model, mesh)


def test_what_ranks_would_not_run_or_keep_equal_is_refused() -> None:
    run_distributed(_refusals, 2)
