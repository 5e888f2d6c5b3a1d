"""U of matrix rules inside of backward: when it runs, that its bits are those of U afterwards, what it waits
for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.forge.test_matrix import matrix_options
from tests.forge.toy import llama, llama_loss, options_of, same, states, train, weights
from titanforge.config.sections import Optimizer
from titanforge.forge import ForgeOptimizer, Steps, attach
from titanforge.forge.weight_updates import block_of
from titanforge.optim.build import build_groups, build_recipe
from titanforge.parallelisms import apply_activation_checkpoint, apply_compile


def options_for(name: str) -> Optimizer:
    return options_of(name) if name == "lamb" else matrix_options(name, norm="l2")


def fused(
    model: nn.Module, options: Optimizer, in_backward: bool = True, micro_batches: int = 1
) -> ForgeOptimizer:
    return attach(
        model,
        build_groups(model, options),
        build_recipe(options, "float32"),
        probe=lambda: llama_loss(model, 0),
        steps=Steps(micro_batches=micro_batches),
        seed=3,
        update_in_backward=in_backward,
    )


def matrices(model: nn.Module, layer: int) -> list[Tensor]:
    return [p for n, p in model.named_parameters() if n.startswith(f"layers.{layer}.") and p.dim() == 2]


class Watch:
    """Which blocks have moved, as seen when backward enters the first of two, and when it is over."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.entering: list[tuple[bool, bool]] = []
        model.layers["0"].register_full_backward_pre_hook(lambda *_: self.entering.append(self.moved()))

    def begin(self) -> None:
        self.before = [[w.detach().clone() for w in matrices(self.model, layer)] for layer in (0, 1)]

    def moved(self) -> tuple[bool, bool]:
        """Of each block: whether all of its matrices differ from those at `begin`; never only some do."""
        found = []
        for layer in (0, 1):
            now = matrices(self.model, layer)
            differ = [not torch.equal(a, b) for a, b in zip(now, self.before[layer], strict=True)]
            assert all(differ) or not any(differ)
            found.append(all(differ))
        return found[0], found[1]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_block_is_updated_before_backward_enters_the_next(checkpointing: bool) -> None:
    """On the last micro-batch alone; a refresh step of Dobb (here each second one) waits for `step`."""
    for name in ("muon", "dobb"):
        model = llama()
        watch = Watch(model)  # beneath what checkpoints it: seen by backward alone
        if checkpointing:
            apply_activation_checkpoint(model, "full", "op")
        optimizer = fused(model, options_for(name), micro_batches=2)
        for step in range(3):
            refreshes = name == "dobb" and step % 2 == 0
            optimizer.begin_step(2)
            watch.begin()
            watch.entering.clear()
            for index in range(2):
                optimizer.before_backward(index)
                (llama_loss(model, 2 * step + index) / 2).backward()
                assert watch.moved() == ((False, False) if refreshes or index == 0 else (True, True))
            assert watch.entering == [(False, False), (False, not refreshes)]
            optimizer.step()
            assert watch.moved() == (True, True)


@pytest.mark.parametrize("name", ["muon", "dion", "rmnp", "lamb", "dobb"])
def test_the_bits_are_those_of_updates_after_backward(name: str) -> None:
    models = llama(), llama()
    first, second = (fused(m, options_for(name), early) for m, early in zip(models, (True, False)))
    assert train(models[0], first, 0, 3) == train(models[1], second, 0, 3)
    assert same(weights(models[0]), weights(models[1]))
    assert same(states(first), states(second))


@pytest.mark.parametrize("name", ["muon", "dion", "dobb"])
def test_a_refused_step_changes_no_bit(name: str) -> None:
    model = llama()
    optimizer = fused(model, options_for(name))
    train(model, optimizer, 0, 1)
    before = weights(model), {k: v for k, v in states(optimizer).items() if "captured_steps" not in k}
    optimizer.begin_step(1)
    value = llama_loss(model, 1)
    optimizer.before_backward(0, torch.isfinite(value.detach() * torch.inf))
    value.backward()
    optimizer.step()
    after = {key: value for key, value in states(optimizer).items() if key in before[1]}
    assert same(before[0], weights(model)) and same(before[1], after)
    assert int(optimizer.step_count) == 1


def test_a_graph_that_writes_copies_back_keeps_the_update() -> None:
    """This backend hands copies of weights to the op and copies them back: U then comes after backward."""
    plain, compiled = llama(n_layers=1), llama(n_layers=1)
    apply_compile(compiled, "aot_eager")
    first, second = (fused(model, options_for("muon")) for model in (plain, compiled))
    train(plain, first, 0, 1)
    train(compiled, second, 0, 1)
    for (name, a), b in zip(weights(plain).items(), weights(compiled).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6, msg=name)


def test_a_weight_that_no_token_reached_holds_its_block_back() -> None:
    """Its momentum decays at the end of the step; the block's U follows, over the same matrices together."""

    class Twofold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))
            self.skip = False

        def forward(self, x: Tensor) -> Tensor:
            for first, second in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
                x = x + torch.tanh(first(x))
                x = x if self.skip else x + torch.tanh(second(x))
            return x.square().mean()

    ends = []
    for early in (True, False):
        torch.manual_seed(0)
        model, x = Twofold(), torch.randn(4, 8)
        options = options_of("muon")
        optimizer = attach(
            model,
            build_groups(model, options),
            probe=lambda model=model, x=x: model(x),
            update_in_backward=early,
        )
        for skip in (False, True):
            model.skip = skip
            optimizer.begin_step(1)
            before = [weight.detach().clone() for weight in model.parameters() if weight.dim() == 2]
            optimizer.before_backward(0)
            model(x).backward()
            now = [weight for weight in model.parameters() if weight.dim() == 2]
            moved = [not torch.equal(a, b) for a, b in zip(now, before, strict=True)]
            assert moved == [early and not skip] * 4
            optimizer.step()
            assert not any(torch.equal(a, b) for a, b in zip(now, before, strict=True))
        ends.append(weights(model))
    assert same(*ends)


def test_blocks_are_read_from_names() -> None:
    found = [block_of(f"{name}.weight") for name in ("layers.11.attention.wq", "0", "enc.fc1", "h.2.mlp.0")]
    assert found == ["layers.11", "0", "enc.fc1", "h.2"]
