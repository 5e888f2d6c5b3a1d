"""Activation checkpointing, torch.compile, mixed precision and autocast around fused weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.forge.toy import (
    SIZES,
    TOKENS,
    VOCAB,
    fuse,
    kept_bytes,
    largest_difference,
    llama,
    llama_loss,
    options_of,
    ordinary,
    same,
    train,
    weights,
)
from titanforge.metrics import activation_bytes
from titanforge.models.initialization import initialize_weights
from titanforge.models.registry import build_model
from titanforge.parallelisms import apply_activation_checkpoint, apply_compile, apply_mixed_precision


@pytest.fixture
def partitioning_as_inductor_is_told(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend that partitions by a budget as inductor does it, without its code generation."""
    from torch._dynamo.backends import debugging

    from titanforge.parallelisms.partitioner import RecomputingConcatenations

    monkeypatch.setattr(debugging, "min_cut_rematerialization_partition", RecomputingConcatenations())
    return "aot_eager_decomp_partition"


@pytest.mark.parametrize(("mode", "option"), [("full", "op"), ("selective", "op"), ("selective", "2")])
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_checkpointed_blocks_are_exact(name: str, mode: str, option: str) -> None:
    """Each block is computed again from weights that no update has touched yet."""
    plain, recomputed = llama(), llama()
    apply_activation_checkpoint(recomputed, mode, option)
    options = options_of(name)
    first, second = fuse(plain, options), fuse(recomputed, options)
    assert all(line.plan.fused for line in second.plan)
    assert train(plain, first, 0, 4) == train(recomputed, second, 0, 4)
    assert same(weights(plain), weights(recomputed))


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_blocks_are_one_graph_and_equal(mode: str) -> None:
    plain, compiled = llama(), llama()
    apply_activation_checkpoint(compiled, mode, "op")
    apply_compile(compiled, "aot_eager", recompute_outside=True)
    compiled.output.compile(backend="aot_eager", fullgraph=True)
    options = options_of()
    first, second = fuse(plain, options), fuse(compiled, options)
    assert all(line.plan.fused for line in second.plan)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses = train(compiled, second, 0, 3)
    assert train(plain, first, 0, 3) == pytest.approx(losses, abs=1e-6)
    assert largest_difference(weights(plain), weights(compiled)) < 2e-6
    assert all(param.grad is None for param in compiled.parameters())
    # Two blocks share one graph; the second comes from inputs that need no gradient or do.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_budget_drops_norms_and_products_and_changes_no_bit(
    family: str, partitioning_as_inductor_is_told: str
) -> None:
    sizes = SIZES | ({"head_dim": 16} if family == "qwen3" else {})
    runs = []
    for budget in (None, 0.99):
        model, args = build_model(family, "debugmodel", vocab_size=VOCAB, seq_len=TOKENS, overrides=sizes)
        initialize_weights(model, 0)
        apply_compile(model, partitioning_as_inductor_is_told, budget)
        optimizer = fuse(model, options_of())
        weight_memory = {param.untyped_storage().data_ptr() for param in model.parameters()}
        saved: dict[int, int] = {}

        def keep(
            tensor: torch.Tensor, saved: dict[int, int] = saved, weights: set[int] = weight_memory
        ) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        losses = train(model, optimizer, 0, 2)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses += train(model, optimizer, 2, 3)
        runs.append((losses, weights(model), sum(saved.values()), args))
    (losses, trained, most, args), (same_losses, same_weights, least, _) = runs
    assert losses == same_losses and same(trained, same_weights)
    tokens, q_dim, kv_dim = 2 * TOKENS, args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    estimates = [
        activation_bytes(
            batch=2, seq_len=TOKENS, dim=args.dim, n_layers=args.n_layers, hidden_dim=args.ffn_dim,
            kv_dim=kv_dim, q_dim=q_dim, qk_norm=family == "qwen3", vocab_size=VOCAB, compute_bytes=4,
            mode=mode, memory_budget=0.99, compiled=True,
        )
        for mode in ("none", "memory_budget")
    ]  # fmt: skip
    # The estimate has one whole block on top, while it is recomputed.
    dropped = 2 * args.dim + args.ffn_dim + (q_dim + kv_dim if family == "qwen3" else 0)
    assert most - least == args.n_layers * dropped * tokens * 4
    assert estimates[0] - estimates[1] == (args.n_layers - 1) * dropped * tokens * 4
    if family == "llama3":  # cos and sin, log-sum-exp, 1/rms and the head's labels are in no estimate
        assert estimates[0] - tokens * VOCAB * 12 == pytest.approx(most, rel=0.1)


@pytest.mark.parametrize(("family", "flavor", "name"), [
    ("qwen3", "debugmodel", "adamw"), ("qwen3", "debugmodel_moe", "muon"),
])  # fmt: skip
def test_a_recomputed_block_keeps_its_input_alone_also_when_it_is_compiled(
    family: str, flavor: str, name: str
) -> None:
    """The compiler would keep the products: it does not recompute what is inside of an autograd function."""
    sizes: dict[str, Any] = SIZES | {"head_dim": 16, "tie_embeddings": False}
    if flavor.endswith("moe"):
        sizes |= {"n_experts": 4, "n_experts_per_token": 2}
    for backend in (None, "aot_eager_decomp_partition"):
        kept = []
        for layers in (1, 2):
            overrides = {**sizes, "n_layers": layers}
            model, args = build_model(family, flavor, vocab_size=VOCAB, seq_len=TOKENS, overrides=overrides)
            initialize_weights(model, 0)
            apply_activation_checkpoint(model, "full")
            if backend:
                apply_compile(model, backend, recompute_outside=True)
            optimizer = fuse(model, options_of(name))
            assert all(line.plan.fused for line in optimizer.plan)
            train(model, optimizer, 0, 1)
            kept += kept_bytes(model, optimizer, 1)
        # Of experts also their mean probabilities, for the balancing term.
        routing = sizes.get("n_experts", 0) * 4
        assert kept[1] - kept[0] == 2 * TOKENS * args.dim * 4 + routing, backend


@pytest.mark.slow
def test_compiled_with_inductor() -> None:
    plain, compiled = llama(n_layers=1), llama(n_layers=1)
    apply_compile(compiled)
    options = options_of()
    first, second = fuse(plain, options), fuse(compiled, options)
    losses = train(compiled, second, 0, 3)
    assert train(plain, first, 0, 3) == pytest.approx(losses, abs=1e-5)
    assert largest_difference(weights(plain), weights(compiled)) < 2e-5
    assert all(param.grad is None for param in compiled.parameters())


@pytest.mark.parametrize("way", ["stored", "autocast"])
def test_products_in_bfloat16_of_float32_weights(way: str) -> None:
    """The gradient reaches the rule in fp32, without the rounding that a stored one has."""
    fused, plain = llama(), llama()

    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            return llama_loss(model, number)

    if way == "stored":
        for model in (fused, plain):
            apply_mixed_precision(model, torch.bfloat16)
    options = options_of("sgd", lr=0.1)
    optimizer = fuse(fused, options, loss=loss)
    assert all(line.plan.fused for line in optimizer.plan)
    first = train(fused, optimizer, 0, 5, loss=loss)
    assert first == pytest.approx(train(plain, ordinary(plain, options), 0, 5, loss=loss), abs=5e-3)
    moved = largest_difference(weights(plain), weights(llama()))
    assert largest_difference(weights(fused), weights(plain)) < 0.02 * moved


def test_the_compute_dtype_is_that_of_the_ordinary_model() -> None:
    fused, plain = llama(), llama()
    for model in (fused, plain):
        apply_mixed_precision(model, torch.bfloat16)
    fuse(fused, options_of())
    tokens = torch.arange(8).unsqueeze(0)
    assert fused(tokens).dtype == plain(tokens).dtype == torch.bfloat16
    assert torch.equal(fused(tokens), plain(tokens))
