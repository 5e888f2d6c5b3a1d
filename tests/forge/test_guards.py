"""Non-finite steps, lagged clipping, and where the fused engine cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.forge.toy import (
    fuse,
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
from titanforge.config import ConfigError, load_config, validate_config
from titanforge.forge import ForgeOptimizer, Ranks, attach
from titanforge.optim.baseline import TorchOptimizer
from titanforge.optim.build import build_groups
from titanforge.optim.elementwise import AdamW
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.matrix import Muon
from titanforge.optim.registry import RULES
from titanforge.parallelisms import clip_factor

REPLICAS = ["--parallelism.data_parallel_replicate_degree=2"]


def one_step(model: nn.Module, optimizer, number: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns the norm that the optimizer reports and the true one, from a twin without fusion."""
    twin = llama()
    twin.load_state_dict(model.state_dict())
    (llama_loss(twin, number) * factor).backward()
    true, _ = clip_factor(twin.parameters(), 0.0)
    optimizer.set_lr(1.0)
    optimizer.begin_step(1)
    value = llama_loss(model, number) * factor
    optimizer.before_backward(0, torch.isfinite(value.detach()))
    value.backward()
    norm = optimizer.gradient_norm()
    optimizer.step()
    return norm, true


@pytest.mark.parametrize("name", ["adamw", "muon", "lamb", "adafactor"])
@pytest.mark.parametrize("tied", [False, True])
def test_norm_is_the_true_norm(name: str, tied: bool) -> None:
    model = llama(tie_embeddings=tied)
    optimizer = fuse(model, options_of(name))
    for number in range(3):
        twin = llama(tie_embeddings=tied)
        twin.load_state_dict(model.state_dict())
        llama_loss(twin, number).backward()
        true, _ = clip_factor(twin.parameters(), 0.0)
        optimizer.set_lr(1.0)
        optimizer.zero_grad()
        optimizer.begin_step(1)
        value = llama_loss(model, number)
        optimizer.before_backward(0)
        value.backward()
        torch.testing.assert_close(optimizer.gradient_norm(), true, rtol=1e-5, atol=0)
        optimizer.step()


def test_norm_of_joined_micro_batches() -> None:
    model, twin = llama(), llama()
    optimizer = fuse(model, options_of("sgd"), micro_batches=2, tokens=32, max_norm=1.0)
    assert {line.plan.join for line in optimizer.plan} <= {"stash", "buffer"}
    optimizer.begin_step(2)
    for index in range(2):
        value = llama_loss(model, index)
        optimizer.before_backward(index)
        value.backward()
        llama_loss(twin, index).backward()
    true, _ = clip_factor(twin.parameters(), 0.0)
    torch.testing.assert_close(optimizer.gradient_norm(), true, rtol=1e-5, atol=0)
    summed = fuse(llama(), options_of("sgd"), micro_batches=2, tokens=32)
    assert {line.plan.join for line in summed.plan} == {"state", "buffer"}
    summed.begin_step(2)
    summed.before_backward(0)
    assert summed.gradient_norm() is None


def test_factor_is_held_from_the_steps_before() -> None:
    model = llama()
    optimizer = fuse(model, options_of("sgd", momentum=0.0), max_norm=0.5)
    norms = [one_step(model, optimizer, number, factor)[0] for number, factor in enumerate((1.0, 8.0, 1.0))]
    assert float(norms[1]) > 4 * float(norms[0])
    held = max(float(norms[2]), 0.9 * max(float(norms[1]), 0.9 * float(norms[0])))
    assert float(optimizer.held_norm) == pytest.approx(held, rel=1e-6)
    # The coming step is scaled by that, whatever its own norm: seen in a stateless rule's update.
    plain = llama()
    plain.load_state_dict(model.state_dict())
    before = weights(model)
    one_step(model, optimizer, 5)
    reference = ordinary(plain, options_of("sgd", momentum=0.0))
    reference.set_lr(1.0)
    llama_loss(plain, 5).backward()
    reference.step(grad_scale=torch.tensor(0.5 / (held + 1e-6)))
    assert largest_difference(weights(model), weights(plain)) < 1e-6
    assert largest_difference(weights(model), before) > 1e-6


def test_first_step_and_small_norms_are_not_scaled() -> None:
    clipped, free = llama(), llama()
    options = options_of()
    first, second = fuse(clipped, options, max_norm=1e6), fuse(free, options)
    train(clipped, first, 0, 3)
    train(free, second, 0, 3)
    assert same(weights(clipped), weights(free))


@pytest.mark.parametrize("name", sorted(RULES))
def test_non_finite_loss_changes_nothing(name: str) -> None:
    model, plain = llama(), llama()
    options = options_of(name)
    optimizer, twin = fuse(model, options, max_norm=1.0), fuse(plain, options, max_norm=1.0)
    train(model, optimizer, 0, 2)
    train(plain, twin, 0, 2)
    before, kept, held = weights(model), states(optimizer), optimizer.held_norm.clone()
    train(model, optimizer, 2, 3, loss=lambda model, number: llama_loss(model, number) * torch.inf)
    assert same(before, weights(model))
    now = states(optimizer)
    for each in (kept, now):
        for key in [key for key in each if key.endswith(".captured_steps")]:
            del each[key]  # Dobb's count of steps, applied or not, by which it captures
    assert same(kept, now)
    assert torch.equal(held, optimizer.held_norm)
    assert int(optimizer.step_count) == 2
    train(model, optimizer, 3, 5)
    train(plain, twin, 3, 5)
    assert same(weights(model), weights(plain))


def test_non_finite_gradient_of_a_finite_loss_is_not_applied_and_counted() -> None:
    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, *grads: Tensor) -> Tensor:
            return grads[0] * torch.nan

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def loss(model: nn.Module, number: int) -> Tensor:
        first, second = model.children()
        hidden = first(torch.ones(2, 4))
        return second(Root.apply(hidden) if number else hidden).square().mean()

    optimizer = fuse(model, options_of(), loss=loss)
    train(model, optimizer, 0, 1, loss=loss)
    before = weights(model)
    train(model, optimizer, 1, 2, loss=loss)
    assert torch.equal(weights(model)["0.weight"], before["0.weight"])
    assert not torch.equal(weights(model)["1.weight"], before["1.weight"])
    assert int(optimizer.metrics()["nonfinite_tiles"]) == 1
    assert all(torch.isfinite(state).all() for state in states(optimizer).values())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sync.policy=rmmc", *REPLICAS], r'sync\.policy = "rmmc": with forge\.enable = true replicas sum'),
        (["--sync.reduce=states", *REPLICAS], r'sync\.reduce = "states": .* set it to "gradients"'),
    ],
)
def test_what_several_ranks_cannot_do_is_one_clear_error(words: list[str], told: str) -> None:
    config = load_config(["--forge.enable", "--training.max_norm=0", *words])
    with pytest.raises(ConfigError, match=told):
        validate_config(config, world_size=4, device_type="cpu")


def test_several_ranks_may_share_a_fused_model() -> None:
    for words in (REPLICAS, [], ["--parallelism.tensor_parallel_degree=2"]):
        config = load_config(["--forge.enable", "--training.max_norm=0", *words])
        validate_config(config, world_size=4, device_type="cpu")


def test_a_pipeline_is_refused() -> None:
    model = llama()
    groups = build_groups(model, options_of())
    with pytest.raises(ValueError, match=r"2 ranks of the mesh axis pp: .* set it to false"):
        attach(model, groups, probe=lambda: llama_loss(model, 0), ranks=Ranks({"pp": 2}))


def test_kernel_forms_are_named() -> None:
    config = load_config(["--forge.enable", "--training.max_norm=0", "--forge.kernel=warp"])
    with pytest.raises(ConfigError, match=r'forge\.kernel = "warp": must be one of auto, portable'):
        validate_config(config, world_size=1, device_type="cpu")


def test_a_local_sync_policy_does_not_take_a_step_that_backward_has_made() -> None:
    """`ForgeOptimizer` inherits the halves of a step that can be cut in two; its own cannot."""
    assert RuleOptimizer.splits_steps
    assert not ForgeOptimizer.splits_steps and not TorchOptimizer.splits_steps


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("AdamW", r"takes an update rule, not its name: pass titanforge\.optim\.build_rule\('AdamW'\)"),
        (Muon, r"not the class Muon: pass Muon\(\)"),
        (torch.optim.AdamW, "not the class AdamW: pass titanforge"),
        (options_of(), r"not an Optimizer: .* or the groups that titanforge\.optim\.build_groups"),
        (None, "not None: pass"),
        ([], "not a list: pass"),
        ([torch.nn.Parameter(torch.zeros(2))], "not a list: pass"),
    ],
)
def test_what_is_neither_rule_nor_groups_is_told_what_to_pass(given: Any, told: str) -> None:
    model = llama()
    with pytest.raises(TypeError, match=told):
        attach(model, given, probe=lambda: llama_loss(model, 0))


def test_what_else_attach_does_not_take() -> None:
    model = llama()
    probe = lambda: llama_loss(model, 0)  # noqa: E731
    with pytest.raises(ValueError, match="options are of a rule alone"):
        attach(model, build_groups(model, options_of()), probe=probe, options={"lr": 1.0})
    parameters: Any = model.parameters()
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module first, not generator"):
        attach(parameters, AdamW(), probe=probe)
