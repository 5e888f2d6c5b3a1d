from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.distributed_harness import run_distributed
from titanforge.metrics.estimate import activation_bytes, estimate_memory
from titanforge.metrics.memory import GIB, MemoryPools, process_peak_bytes


class Tied(nn.Module):
    """Two names for one weight, a bias, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.zeros(10, dtype=torch.float64))


def test_pools_count_each_tensor_once() -> None:
    pools = MemoryPools(Tied())
    assert pools.weight_bytes() == 4 * (32 * 32 + 32) + 8 * 10
    assert pools.state_bytes() == 0 and pools.gradient_bytes() == 0


def test_gradients_count_while_they_exist() -> None:
    model = nn.Linear(16, 8, bias=False)
    pools = MemoryPools(model)
    model(torch.ones(1, 16)).sum().backward()
    assert pools.read()["memory/gradients_gib"] == 4 * 16 * 8 / GIB
    model.zero_grad(set_to_none=True)
    assert pools.read()["memory/gradients_gib"] == 0


def test_cpu_peak_sees_activations() -> None:
    pools = MemoryPools(nn.Linear(4, 4))
    before = pools.read()
    # Reach 64 MiB above the highest the process ever stood, whatever ran in it before.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    block = torch.ones(process_peak_bytes() - resident + 64 * 2**20, dtype=torch.uint8)
    after = pools.read()
    del block
    grown = after["memory/activations_gib"] - before["memory/activations_gib"]
    assert grown * 1024 == pytest.approx(64, abs=8)
    assert after["peak_memory_gib"] - before["peak_memory_gib"] == pytest.approx(grown)


def sharded_pools(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters())
    pools = MemoryPools(model, optimizer)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    shard = 4 * 64 * 64 // world_size
    assert pools.weight_bytes() == shard
    assert pools.gradient_bytes() == shard
    assert abs(pools.state_bytes() - 2 * shard) <= 16


def test_pools_count_local_shards() -> None:
    run_distributed(sharded_pools, 2, timeout=60)


def llama_8b(batch: int, mode: str = "none", dp_shard: int = 1) -> float:
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    activations = activation_bytes(
        batch=batch,
        seq_len=512,
        dim=4096,
        n_layers=32,
        hidden_dim=14336,
        kv_dim=1024,
        vocab_size=128256,
        compute_bytes=2,
        mode=mode,  # type: ignore[arg-type]
    )
    return (
        estimate_memory(
            num_params={"blocks": 32 * layer, "embedding": 128256 * 4096, "head": 128256 * 4096},
            weight_bytes=2,
            gradient_bytes=2,
            state_bytes_per_param=4,
            activations=activations,
            dp_shard=dp_shard,
            layer_params=layer,
        ).total
        / GIB
    )


def test_estimate_against_a_measured_run() -> None:
    # Measured on an H200: 8B, bf16 everywhere, fused AdamW, one sequence of 512, no recomputation: 62 GiB.
    assert llama_8b(batch=1) == pytest.approx(62, rel=0.08)


def test_estimate_orders() -> None:
    assert llama_8b(16, "full") < llama_8b(16, "selective") < llama_8b(16, "none")
    assert llama_8b(1, dp_shard=8) < llama_8b(1) / 4
    common = {
        "batch": 1,
        "seq_len": 8,
        "dim": 4,
        "n_layers": 4,
        "hidden_dim": 8,
        "kv_dim": 4,
        "vocab_size": 10,
    }
    every_second = activation_bytes(**common, compute_bytes=4, mode="selective", selective_option="2")
    none = activation_bytes(**common, compute_bytes=4, mode="none")
    full = activation_bytes(**common, compute_bytes=4, mode="full")
    assert full < every_second < none
    # One block keeps 7·4 + 3·4 + 4·8 = 72 elements a token; the loss holds 8 × 10 logits at 4 + 4 + 4 bytes.
    assert none == 8 * (4 * 72 + 8) * 4 + 8 * 10 * 12
    chunked = activation_bytes(**common, compute_bytes=4, mode="none", loss_chunk_tokens=2)
    assert none - chunked == 6 * 10 * 12


def test_estimate_of_a_tiny_model_against_autograd() -> None:
    """The block formula, against the bytes that autograd really saves for a plain Llama block."""
    dim, heads, kv_heads, hidden, tokens = 64, 4, 2, 160, 48
    kv_dim = kv_heads * (dim // heads)
    wq, wo = torch.randn(dim, dim, requires_grad=True), torch.randn(dim, dim, requires_grad=True)
    wk, wv = torch.randn(kv_dim, dim, requires_grad=True), torch.randn(kv_dim, dim, requires_grad=True)
    w1, w3 = torch.randn(hidden, dim, requires_grad=True), torch.randn(hidden, dim, requires_grad=True)
    w2, scale = torch.randn(dim, hidden, requires_grad=True), torch.ones(dim, requires_grad=True)
    weights = {w.untyped_storage().data_ptr() for w in (wq, wk, wv, wo, w1, w2, w3, scale)}
    saved: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    def norm(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (dim,), scale)

    def split(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.view(1, tokens, n, dim // heads).transpose(1, 2)

    x = torch.randn(1, tokens, dim, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        normed = norm(x)
        q, k, v = split(normed @ wq.T, heads), split(normed @ wk.T, kv_heads), split(normed @ wv.T, kv_heads)
        out = nn.functional.scaled_dot_product_attention(q * 1.5, k * 1.5, v, is_causal=True, enable_gqa=True)
        h = x + out.transpose(1, 2).reshape(1, tokens, dim) @ wo.T
        normed = norm(h)
        y = h + (nn.functional.silu(normed @ w1.T) * (normed @ w3.T)) @ w2.T
    y.sum().backward()
    estimate = tokens * (7 * dim + 3 * kv_dim + 4 * hidden) * 4
    assert sum(saved.values()) == pytest.approx(estimate, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_pools_add_up_to_the_peak() -> None:
    gc.collect()
    others = torch.cuda.memory_allocated() / 2**20  # what tests before this one have left
    model = nn.Sequential(
        nn.Linear(2048, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 2048, bias=False)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    pools = MemoryPools(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4096, 2048, device="cuda")).sum().backward()
        optimizer.step()
        values = pools.read()
    mib = {name: value * 1024 for name, value in values.items() if name.endswith("_gib")}
    assert mib["memory/weights_gib"] == mib["memory/gradients_gib"] == 32
    assert mib["memory/states_gib"] == pytest.approx(64, abs=0.01)
    parts = [v for k, v in mib.items() if k.startswith("memory/") and k != "memory/reserved_gib"]
    assert sum(parts) == pytest.approx(mib["peak_memory_gib"])
    # Six tensors of 32 MiB (input, two hidden, output, two of their gradients), the products' workspaces.
    assert 64 <= mib["memory/activations_gib"] - others <= 384
    assert mib["memory/reserved_gib"] >= mib["peak_memory_gib"]
    assert values["memory/alloc_retries"] == 0
