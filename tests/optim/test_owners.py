"""Weights that are replaced, frozen or moved under an optimizer that was built for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune

from tests.distributed_harness import run_distributed
from titanforge.config.sections import Optimizer
from titanforge.optim import build_optimizer, build_rule
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.rule_groups import groups_of_rule

ENGINES = ("native", "fused", "for-loop")


def toy(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to(dtype)


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    x = torch.arange(32.0).view(4, 8).sin() + number
    (model(x.to(next(model.parameters()).dtype)) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def build(model: nn.Module, engine: str = "native", **options: Any) -> Any:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return build_optimizer(model, Optimizer(implementation=engine, lr=0.01, **options), dtype)


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)


def replace(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.zeros(8, 8))


def forget(model: Any) -> None:
    del model[0].bias
    model[0].register_parameter("bias", None)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            assign,
            r"the weight '0\.weight' was replaced \(load_state_dict with assign = True\?\) after the opt",
        ),
        (replace, r"the weight '2\.weight' was replaced .*: build it again"),
        (forget, r"the weight '0\.bias' was replaced"),
        (
            lambda model: model[1].requires_grad_(False),
            r"the weight '1\.weight' was frozen after the optimiz",
        ),
    ],
)
def test_a_step_for_other_weights_is_refused(
    engine: str, change: Callable[[nn.Module], Any], told: str
) -> None:
    model = toy()
    optimizer = build(model, engine)
    step(model, optimizer)
    change(model)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=told):
        step(model, optimizer)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    step(model, build(model, engine), 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_for_modules_that_are_gone_is_refused(engine: str) -> None:
    """A new head has weights of its own, and the former one's get no gradient."""
    for gone in (False, True):
        model: Any = toy()
        optimizer = build(model, engine)
        step(model, optimizer)
        if gone:
            del model[2]
        else:
            model[2] = nn.Linear(8, 8)
        for _ in range(2):  # and once more
            with pytest.raises(RuntimeError, match=r"module of the weight '2\.(weight|bias)' was replaced"):
                step(model, optimizer)
        step(model, build(model, engine), 1)


class Adapter(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_module_that_was_wrapped_or_has_the_weights_of_another_is_followed() -> None:
    model: Any = toy()
    optimizer = build(model)
    model[0] = Adapter(model[0])
    heir = nn.Linear(8, 8)
    heir.weight, heir.bias = model[2].weight, model[2].bias
    former, model[2] = model[2], heir
    before = [param.clone() for param in model.parameters()]
    step(model, optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    replace(model)
    with pytest.raises(RuntimeError, match=r"'2\.weight' was replaced"):
        step(model, optimizer)
    heir.weight = former.weight
    model[2] = former  # restored
    step(model, optimizer, 1)
    model[0].linear = nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match=r"module of the weight '0\.weight' was replaced"):
        step(model, optimizer)


def test_a_new_module_beside_one_that_shares_the_weight_is_refused() -> None:
    model: Any = toy()
    model[2].weight = model[0].weight
    optimizer = build(model)
    model[2] = nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match=r"module of the weight '0\.weight' was replaced"):
        step(model, optimizer)


def test_groups_of_a_rule_know_their_owners_too() -> None:
    model = toy()
    optimizer = RuleOptimizer(groups_of_rule(model, build_rule("AdamW")))
    replace(model)
    with pytest.raises(RuntimeError, match="was replaced"):
        step(model, optimizer)


def test_one_of_two_modules_that_share_a_weight_may_not_get_another() -> None:
    model = toy()
    model[2].weight = model[0].weight
    optimizer = build(model)
    step(model, optimizer)
    replace(model)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was replaced"):
        step(model, optimizer)


def test_a_weight_that_its_module_reads_under_another_name_is_the_same() -> None:
    model = toy()
    optimizer = build(model)
    prune.random_unstructured(model[0], "weight", amount=0.5)
    parametrizations.orthogonal(model[2])
    before = model[0].weight_orig.clone()
    step(model, optimizer)
    assert not torch.equal(model[0].weight_orig, before)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_that_moves_is_followed(engine: str) -> None:
    model, twin = toy(), toy()
    optimizer, undisturbed = build(model, engine), build(twin, engine)
    for number in range(3):
        for param in model.parameters():
            param.data = param.data.clone()
        step(model, optimizer, number)
        step(twin, undisturbed, number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


def test_a_weight_that_moves_away_from_its_master_is_refused() -> None:
    model = toy(torch.bfloat16)
    optimizer = build(model, master_weights="float32")
    step(model, optimizer)
    model[2].weight.data = torch.zeros(8, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"'2\.weight' moved .* refresh_master_weights"):
        step(model, optimizer)
    optimizer.refresh_master_weights()
    step(model, optimizer)
    assert 0 < model[2].weight.abs().max() < 0.05, "a step or two from zero"


def test_a_captured_step_follows_no_weight() -> None:
    model = toy()
    optimizer = build(model)
    step(model, optimizer)
    optimizer.begin_captured_step(1)
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(RuntimeError, match=r"'0\.weight' moved .*compile\.cuda_graph"):
        optimizer.begin_captured_step(1)


def gathered(rank: int, world_size: int) -> list[str]:
    """Steps while FSDP holds the weights gathered; then with others, which were loaded."""
    told = []
    for engine in ENGINES:
        model: Any = toy()
        fully_shard(model[0], reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
        optimizer = build(model, engine)
        step(model, optimizer)
        with torch.no_grad():
            model(torch.zeros(1, 8))
        optimizer.step()  # gathered since that forward
        step(model, optimizer, 1)
        saved = {name: one.detach().clone() for name, one in model.state_dict().items()}
        model.load_state_dict(saved, assign=True)
        try:
            step(model, optimizer, 2)
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_shards_that_are_gathered_are_the_same_and_assigned_ones_are_not() -> None:
    for told in run_distributed(gathered, 2, timeout=120):
        assert len(told) == len(ENGINES)
        assert all("'0.weight' was replaced" in line for line in told)
