"""Blocks that ranks share, compiled: the losses and gradients of the whole model, and no collective more."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed_harness import run_distributed
from tests.parallelisms.test_collectives import Told
from tests.parallelisms.test_tensor_parallel import assert_same_gradients, batch, build, fill
from titanforge.parallelisms import (
    apply_activation_checkpoint,
    apply_compile,
    apply_context_parallel,
    apply_fsdp,
    apply_tensor_parallel,
    complete_gradients,
    pad_sequences,
)

LAYERS = 2
CASES = [  # model, axis, what is recomputed, what a step sends over the axis beside the loss
    ("gpt2", "tp", "full", {("tp", "rows of fused weights"): 6 * LAYERS}),
    ("llama3", "ring", "selective", {("cp", "keys and values"): 4 * LAYERS}),
    ("qwen3", "ulysses", "none", {("cp", "heads"): 4 * LAYERS}),
]


def _compiled_equals_whole(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ranks",))
    for kind, axis, recomputed, sent in CASES:
        whole, split, told = build(kind), build(kind), Told()
        if axis == "tp":
            apply_tensor_parallel(split, mesh, told)
        else:
            apply_context_parallel(split, mesh, axis, told)
        pad_sequences(split, 2 * world_size)
        apply_activation_checkpoint(split, recomputed)
        assert apply_compile(split, "aot_eager", recompute_outside=axis == "tp") == LAYERS
        if axis != "tp":
            apply_fsdp(split, mesh, torch.float32)
        fill(whole)
        fill(split)
        if axis == "tp":
            complete_gradients(split)
        expected = whole(*batch())
        expected.backward()
        loss = split(*batch())
        loss.backward()
        loss = loss.detach()
        if axis != "tp":
            dist.all_reduce(loss)
        torch.testing.assert_close(loss, expected.detach(), rtol=2e-6, atol=1e-5)
        assert_same_gradients(split, whole)
        counts = told.counts()
        counts.pop(("tp", "loss"), None)
        assert counts == sent, (kind, axis)


def test_compiled_blocks_of_split_models():
    run_distributed(_compiled_equals_whole, 2, timeout=300)
