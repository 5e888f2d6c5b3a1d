"""Rules of matrices under fusion: A in the product, U after it, equal to the ordinary engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.forge.test_experts import experts
from tests.forge.toy import (
    fuse,
    kept_bytes,
    largest_difference,
    llama,
    options_of,
    ordinary,
    states,
    train,
    weights,
)
from titanforge.config.sections import Optimizer
from titanforge.forge import Granule
from titanforge.parallelisms import apply_activation_checkpoint, apply_compile


def matrix_options(name: str, **dobb: Any) -> Optimizer:
    options = options_of(name)
    options.dion.rank_fraction = 0.5
    # Blocks wider than the 32 captured tokens would have null spaces, whose basis is arbitrary.
    options.dobb.period, options.dobb.blocks, options.dobb.basis_dtype = 2, 4, "float32"
    for key, value in dobb.items():
        setattr(options.dobb, key, value)
    return options


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("name", "dobb"),
    [
        ("muon", {}),
        ("rmnp", {}),
        ("dion", {}),
        ("dobb", {"norm": "l2"}),
        ("dobb", {"norm": "l2", "side": "G"}),
    ],
)
def test_fused_equals_unfused(name: str, dobb: dict, micro_batches: int) -> None:
    fused_model, plain_model = llama(), llama()
    options = matrix_options(name, **dobb)
    fused, plain = fuse(fused_model, options, micro_batches=micro_batches), ordinary(plain_model, options)
    matrices = [line for line in fused.plan if ".attention." in line.name or ".feed_forward." in line.name]
    assert matrices and all(line.plan.granule is Granule.STATE and line.plan.deferred for line in matrices)
    train(fused_model, fused, 0, 5, micro_batches=micro_batches)
    train(plain_model, plain, 0, 5, micro_batches=micro_batches)
    assert all(p.grad is None for n, p in fused_model.named_parameters() if ".attention." in n)
    assert largest_difference(weights(fused_model), weights(plain_model)) < 5e-5
    for key, slots in plain.state_dict()["state"].items():
        for slot, tensor in slots.items():
            other = fused.state_dict()["state"][key][slot]
            torch.testing.assert_close(other.float(), tensor.float(), rtol=0, atol=2e-2, msg=f"{key} {slot}")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (replace(matrix_options("dobb"), nesterov=True), "complete after backward"),
        (matrix_options("dobb", source="gradient", norm="l2"), "follow from the whole gradient"),
    ],
)
def test_dobb_that_reads_the_gradient_waits_for_it(options: Optimizer, why: str) -> None:
    model, plain_model = llama(), llama()
    fused = fuse(model, options)
    lines = [line for line in fused.plan if ".feed_forward." in line.name]
    assert lines and all(not line.plan.fused and why in line.plan.why for line in lines)
    if options.dobb.source == "gradient":
        plain = ordinary(plain_model, options)
        train(model, fused, 0, 3)
        train(plain_model, plain, 0, 3)
        for key, slots in plain.state_dict()["state"].items():
            for slot in slots.keys() & {"statistic"}:
                other = fused.state_dict()["state"][key][slot]
                torch.testing.assert_close(other, slots[slot], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("side", ["A", "G"])
def test_fused_experts_are_captured(side: str) -> None:
    fused_model, plain_model = experts(), experts()
    options = matrix_options("dobb", side=side)
    fused, plain = fuse(fused_model, options), ordinary(plain_model, options)
    train(fused_model, fused, 0, 1)
    train(plain_model, plain, 0, 1)
    stacks = [line for line in fused.plan if ".experts." in line.name]
    assert stacks and all(line.plan.granule is Granule.STATE for line in stacks)
    for line in stacks:
        statistic = plain.state_dict()["state"][line.name]["statistic"]
        assert bool(statistic.any())
        torch.testing.assert_close(fused.state_dict()["state"][line.name]["statistic"], statistic)


@pytest.mark.parametrize(("side", "capture"), [("A", "first"), ("G", "all"), ("G", "first")])
def test_recomputed_and_compiled_blocks_are_captured_once_and_keep_their_input_alone(
    side: str, capture: str
) -> None:
    """On steps that capture and on others: a block that is computed again runs the code that it ran."""
    torch._dynamo.reset()  # compiled code of other tests counts against its limit
    compiled_in_backward = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled_in_backward.append(torch._C._current_graph_task_id() != -1)
        return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    plain, compiled = llama(), llama()
    for model in (plain, compiled):
        apply_activation_checkpoint(model, "full", "op")
    apply_compile(compiled, compiler, recompute_outside=True)
    ends, kept = [], []
    for model in (plain, compiled):
        optimizer = fuse(
            model, matrix_options("dobb", norm="l2", side=side, capture=capture), micro_batches=2
        )
        train(model, optimizer, 0, 3, micro_batches=2)
        ends.append((optimizer.state_dict()["state"], weights(model)))
        kept.append([one for step in (3, 4) for one in kept_bytes(model, optimizer, step, 2)])
    for name, slots in ends[0][0].items():
        if "statistic" in slots:
            torch.testing.assert_close(
                slots["statistic"], ends[1][0][name]["statistic"], rtol=1e-3, atol=1e-5
            )
            assert bool(slots["statistic"].any())
    assert largest_difference(ends[0][1], ends[1][1]) < 5e-5
    assert compiled_in_backward and not any(compiled_in_backward)
    assert len(kept[1]) == 4 and all(0 < one <= kept[0][0] for one in kept[1]), kept


@pytest.mark.parametrize("name", ["muon", "dobb"])
def test_fused_momenta_of_micro_batches_are_nearer_to_fp32(name: str) -> None:
    """bfloat16 weights, eight micro-batches: the ordinary engine rounds each gradient and their sums."""
    drawn = [torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(i)) for i in range(24)]

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        x, d = drawn[number % 24]
        return (model(x.to(next(model.parameters()).dtype)).float() * d).sum()

    def run(dtype: torch.dtype, fused: bool, **storage: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).to(dtype)
        options = matrix_options(name, norm="l2")
        for key, value in storage.items():
            setattr(options, key, value)
        told = str(dtype).removeprefix("torch.")
        made = fuse(model, options, told, loss=loss, micro_batches=8, tokens=64) if fused else None
        optimizer = made or ordinary(model, options, told)
        train(model, optimizer, 0, 3, micro_batches=8, loss=loss)
        return {"weight.master": weights(model)["weight"]} | states(optimizer)

    exact = run(torch.float32, False)
    for state_dtype in ("float32", "bfloat16"):
        storage = {"master_weights": "float32", "state_dtype": state_dtype}
        found, plain = run(torch.bfloat16, True, **storage), run(torch.bfloat16, False, **storage)
        for slot in ("weight.m", "weight.master"):
            error, usual = ((one[slot].float() - exact[slot]).norm() for one in (found, plain))
            assert 0 < error < 0.9 * usual, (state_dtype, slot, float(error), float(usual))
