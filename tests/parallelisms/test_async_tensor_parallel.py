"""What the compiler overlaps of blocks that the tensor axis splits: its pass runs here as on GPUs, and the
operators that it puts in run their plain form, a collective and products one after the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed_harness import run_distributed
from tests.parallelisms.test_tensor_parallel import assert_same_gradients, batch, build, fill
from titanforge.parallelisms import (
    apply_activation_checkpoint,
    apply_compile,
    apply_tensor_parallel,
    complete_gradients,
    enable_async_tensor_parallel,
    pad_sequences,
)


def _overlapped_equals_whole(rank: int, world_size: int) -> list[dict[str, int]]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    with pytest.raises(ValueError, match="enable_async_tensor_parallel = true: needs CUDA"):
        enable_async_tensor_parallel(mesh)
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(symmetric, f"_{name}_fallback"), "CPU")
    dist.is_nccl_available = lambda: True  # what the pass asks for before anything else
    graphs: list[dict[str, int]] = []

    def overlap(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        view_to_reshape(graph)
        micro_pipeline_tp_pass(graph.graph)
        graph.recompile()
        names = [str(node.target) for node in graph.graph.nodes]
        graphs.append({name: sum(name in each for each in names) for name in ("fused_all", "fused_matmul")})
        return graph

    whole, split = build("llama3"), build("llama3")
    apply_tensor_parallel(split, mesh)
    pad_sequences(split, world_size)
    apply_activation_checkpoint(split, "selective")
    with symmetric._test_mode({mesh.get_group().group_name}):
        table = select_decomp_table()
        apply_compile(split, aot_autograd(fw_compiler=overlap, bw_compiler=overlap, decompositions=table))
        fill(whole)
        fill(split)
        complete_gradients(split)
        expected = whole(*batch())
        expected.backward()
        loss = split(*batch())
        loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=2e-6, atol=1e-5)
    assert_same_gradients(split, whole)
    return graphs


def test_gathers_and_scatters_beside_their_products():
    """Forward: the two gathers with the products that they feed, and the two scatters. Backward: the two
    gathers; what is scattered there is a sum of several products."""
    for graphs in run_distributed(_overlapped_equals_whole, 2, timeout=300):
        assert graphs == [{"fused_all": 2, "fused_matmul": 2}, {"fused_all": 2, "fused_matmul": 0}]
