"""The fused step on a GPU: bit for bit the formed one, captured whole, and without a gradient in the
allocator.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from tests.forge.toy import (
    batch,
    fuse,
    fuse_materialised,
    largest_difference,
    llama,
    llama_loss,
    options_of,
    ordinary,
    same,
    states,
    train,
    weights,
)
from titanforge.forge import attach
from titanforge.models.layers import attention
from titanforge.optim.build import build_groups, build_recipe
from titanforge.parallelisms import apply_activation_checkpoint, apply_compile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Wide enough for whole tiles beside ragged ones.
SIZES = {"dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 680}


def on_gpu(dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Any:
    return llama(dtype, **{**SIZES, **overrides}).cuda()


RECIPES: list[dict[str, Any]] = [
    {"state_dtype": "bfloat16"},
    {"master_weights": "float32"},
    {"state_dtype": "bfloat16", "master_weights": "stochastic_rounding"},
    {"state_dtype": "int8", "master_weights": "stochastic_rounding"},
    {"state_dtype": "fp8"},
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_t0_fused_is_formed(recipe: dict[str, Any], tied: bool) -> None:
    options = options_of("adamw", **recipe)
    fused, formed = on_gpu(tie_embeddings=tied), on_gpu(tie_embeddings=tied)
    first, second = fuse(fused, options, "bfloat16"), fuse_materialised(formed, options, "bfloat16")
    assert train(fused, first, 0, 5) == train(formed, second, 0, 5)
    assert same(weights(fused), weights(formed))
    assert same(states(first), states(second))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "lamb", "muon", "scion", "adafactor", "sm3"])
def test_fused_follows_the_ordinary_engine(name: str) -> None:
    """In float32, where the two differ by the order of sums alone."""
    options = options_of(name)
    fused, plain = on_gpu(torch.float32), on_gpu(torch.float32)
    losses = train(fused, fuse(fused, options), 0, 5)
    assert losses == pytest.approx(train(plain, ordinary(plain, options), 0, 5), abs=1e-3)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_micro_batches(name: str) -> None:
    options = options_of(name)
    fused, plain = on_gpu(torch.float32), on_gpu(torch.float32)
    losses = train(fused, fuse(fused, options, micro_batches=4, tokens=32), 0, 3, micro_batches=4)
    assert losses == pytest.approx(train(plain, ordinary(plain, options), 0, 3, micro_batches=4), abs=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["muon", "rmnp", "dion", "lamb", "dobb"])
def test_updates_inside_of_backward_have_the_bits_of_those_after_it(name: str, compiled: bool) -> None:
    ends = []
    for in_backward in (True, False):
        model = on_gpu()
        if compiled:
            apply_compile(model)
        options = options_of(name, state_dtype="bfloat16")
        options.dion.rank_fraction, options.dobb.blocks, options.dobb.period = 0.25, 8, 2
        optimizer = attach(
            model,
            build_groups(model, options),
            build_recipe(options, "bfloat16"),
            probe=lambda model=model: llama_loss(model, 0),
            update_in_backward=in_backward,
        )
        ends.append((train(model, optimizer, 0, 4), weights(model), states(optimizer)))
    assert ends[0][0] == ends[1][0]
    assert same(ends[0][1], ends[1][1]) and same(ends[0][2], ends[1][2])
    assert not same(ends[0][1], weights(on_gpu()))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_captured_step_is_the_eager_step(name: str, compiled: bool) -> None:
    """One CUDA graph: forward, backward with its updates, and the end of the step; the rate moves between."""
    options = options_of(name, state_dtype="bfloat16", master_weights="stochastic_rounding")
    eager, captured = on_gpu(), on_gpu()
    for model in (eager, captured) if compiled else ():
        apply_compile(model)
    first, second = fuse(eager, options, "bfloat16"), fuse(captured, options, "bfloat16")
    batches = [tuple(part.cuda() for part in batch(number)) for number in range(8)]
    tokens, labels = (part.clone() for part in batches[0])

    def launch(model: Any, optimizer: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = model(tokens, None, None, labels) / 31
        optimizer.before_backward(0, torch.isfinite(loss.detach()))
        loss.backward()
        optimizer.apply_step()
        return loss.detach()

    def prepare(optimizer: Any, step: int) -> None:
        optimizer.set_lr(1.0 / (1 + step))
        optimizer.begin_step(1)

    expected = []
    for step, (step_tokens, step_labels) in enumerate(batches):
        prepare(first, step)
        expected.append(float(launch(eager, first, step_tokens, step_labels)))

    found = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(3):
            tokens.copy_(batches[step][0])
            labels.copy_(batches[step][1])
            prepare(second, step)
            found.append(float(launch(captured, second, tokens, labels)))
    torch.cuda.current_stream().wait_stream(side)
    prepare(second, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="relaxed"):  # as the trainer captures
        loss = launch(captured, second, tokens, labels)
    for step in range(3, 8):
        prepare(second, step)
        tokens.copy_(batches[step][0])
        labels.copy_(batches[step][1])
        graph.replay()
        found.append(float(loss))
    assert found == expected
    assert same(weights(eager), weights(captured))
    assert same(states(first), states(second))


# Of 32 tokens no activation is as large as a gradient here, in fp32 either (2720 x 32 x 4 < 300 x 1024 x 2).
WIDE: dict[str, Any] = {"dim": 1024, "n_heads": 8, "n_kv_heads": 8, "hidden_dim": 2720}


@pytest.mark.parametrize("mode", ["eager", "compiled", "recomputed", "compiled and recomputed"])
def test_the_allocator_has_no_gradient_on_record(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing as large as a gradient is asked for during backward, and nothing of that size is kept from step
    to step beside weights and states; while the ordinary engine, looked at alike, shows every gradient.
    """

    def build() -> Any:
        model = on_gpu(**WIDE)
        if "recomputed" in mode:
            apply_activation_checkpoint(model, "selective", "op")
        if "compiled" in mode:
            apply_compile(model)
        return model

    # The other forms of attention take fp32 sums of their own, padded to whole tiles.
    monkeypatch.setattr(attention, "CUDA_BACKENDS", [SDPBackend.MATH])
    options = options_of("adamw", state_dtype="bfloat16")
    # The control goes first: it also makes the libraries take the workspaces that they keep.
    plain = build()
    control, _, _ = recorded(plain, ordinary(plain, options, "bfloat16"))
    matrices = [param for param in plain.parameters() if param.dim() > 1]
    gradients = Counter(rounded(param.numel() * 2) for param in matrices)
    largest_activation, smallest_gradient = 32 * WIDE["hidden_dim"] * 4, min(gradients)
    assert largest_activation < smallest_gradient
    seen = Counter(control)
    assert all(seen[size] >= count for size, count in gradients.items()), (gradients, seen)

    gone = weakref.ref(plain.output.weight)
    del plain, matrices
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None, "the control's memory would hide what is kept"
    before = held_bytes()
    model = build()
    optimizer = fuse(model, options, "bfloat16")
    assert all(line.plan.fused for line in optimizer.plan)
    fused, moved, held = recorded(model, optimizer)
    assert moved >= {name for name, param in model.named_parameters() if param.dim() > 1}, "none consumed"
    assert max(fused) < smallest_gradient, f"of {smallest_gradient} bytes or more: {largest_of(fused)}"
    own = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    own += sum(tensor.numel() * tensor.element_size() for tensor in states(optimizer).values())
    assert held - before - own < smallest_gradient, f"{held - before} bytes kept, weights and states {own}"


def recorded(model: Any, optimizer: Any) -> tuple[list[int], set[str], int]:
    """Sizes of what the third step's backward allocates, the weights that changed in it, and the bytes that
    are held once the step is over.
    """
    train(model, optimizer, 0, 2)
    optimizer.zero_grad()
    optimizer.begin_step(1)
    loss = llama_loss(model, 2)
    optimizer.before_backward(0, torch.isfinite(loss.detach()))
    old = {name: param.detach().cpu() for name, param in model.named_parameters()}
    torch.cuda.synchronize()
    # Without stacks: taking one while a recomputation that has all it needs is being left (an exception of
    # PyTorch's own) loses that exception, in PyTorch 2.11.
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    try:
        loss.backward()
        torch.cuda.synchronize()
        snapshot: Any = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    moved = {
        name for name, param in model.named_parameters() if not torch.equal(param.detach().cpu(), old[name])
    }
    optimizer.step()
    optimizer.zero_grad()
    del loss
    gc.collect()
    torch.cuda.synchronize()
    events = [event for trace in snapshot["device_traces"] for event in trace if event["action"] == "alloc"]
    assert events
    return [rounded(event["size"]) for event in events], moved, held_bytes()


def held_bytes() -> int:
    """As they were asked for: the allocator may give out a block that is up to 1 MiB larger."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def rounded(size: int) -> int:
    """As the allocator rounds."""
    return -(-size // 512) * 512


def largest_of(sizes: list[int]) -> list[tuple[int, int]]:
    """(bytes, how often) of the largest few."""
    return sorted(Counter(sizes).items(), reverse=True)[:5]


@pytest.mark.parametrize("hidden_dim", [680, 1360])  # from 1024 on inductor would pad rows
@pytest.mark.parametrize("merged", [False, True])
def test_compiled_blocks_follow_the_eager_ones(merged: bool, hidden_dim: int) -> None:
    plain, compiled = (on_gpu(torch.float32, hidden_dim=hidden_dim) for _ in range(2))
    apply_compile(compiled)
    compiled.output.compile()
    options = options_of()
    losses = train(compiled, fuse(compiled, options, merge_projections=merged), 0, 4)
    plain_losses = train(plain, fuse(plain, options, merge_projections=merged), 0, 4)
    assert plain_losses == pytest.approx(losses, abs=3e-4)
    assert largest_difference(weights(plain), weights(compiled)) < 5e-3


def test_resume_on_the_device() -> None:
    options = options_of("adamw", state_dtype="int8", master_weights="stochastic_rounding")
    model = on_gpu()
    optimizer = fuse(model, options, "bfloat16")
    train(model, optimizer, 0, 3)
    fresh = on_gpu()
    fresh.load_state_dict(model.state_dict())
    again = fuse(fresh, options, "bfloat16")
    again.load_state_dict(
        {
            "step": optimizer.step_count.clone(),
            "state": {
                name: {slot: tensor.clone() for slot, tensor in slots.items()}
                for name, slots in optimizer.state_dict()["state"].items()
            },
            "rule": optimizer.state_dict()["rule"],
        }
    )
    train(model, optimizer, 3, 6)
    train(fresh, again, 3, 6)
    assert same(weights(model), weights(fresh))
    assert same(states(optimizer), states(again))
