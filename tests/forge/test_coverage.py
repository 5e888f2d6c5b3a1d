"""Which parameters are fused, and the reason for each that is not; what happens when the probe was wrong."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.forge.toy import fuse, options_of, ordinary, same, train, weights
from titanforge.forge import ForgeOptimizer, Ranks, attach
from titanforge.forge.coverage import cover
from titanforge.forge.probe import probe_readers
from titanforge.optim.build import build_groups


class Zoo(nn.Module):
    """One module of each kind that is fused, and one for each reason not to be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8, padding_idx=3)
        self.scaled = nn.Embedding(20, 8, scale_grad_by_freq=True)
        self.linear = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.bypassed = nn.Linear(8, 8)
        self.read_beside = nn.Linear(8, 8, bias=False)
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.own = Own(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.plain = nn.Parameter(torch.randn(8, 8))
        self.conv = nn.Conv1d(8, 8, 1)
        self.replaced = nn.Linear(8, 8, bias=False)
        self.replaced.forward = lambda input: input @ self.replaced.weight
        self.wide = nn.Linear(8, 8, bias=False).double()
        self.head = nn.Linear(8, 20, bias=False)  # does not own the loss
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.scaled(ids)
        x = checkpoint(self.linear, x, use_reentrant=False)
        x = self.twice(self.twice(x))
        x = F.linear(x, self.bypassed.weight, self.bypassed.bias)
        x = self.read_beside(x) + x @ self.read_beside.weight
        x = self.own(self.frozen(self.norm(x))) @ self.plain
        x = self.replaced(self.conv(x.transpose(-1, -2)).transpose(-1, -2))
        return self.head(self.wide(x.double()).float()).square().mean()


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


REASONS = {
    "embed.weight": "tied: embed.weight and head.weight are one tensor",
    "scaled.weight": "an embedding with scale_grad_by_freq",
    "linear.weight": "",
    "linear.bias": "",
    "twice.weight": "its module is called 2 times in a forward",
    "twice.bias": "its module is called 2 times in a forward",
    "bypassed.weight": "bypassed: read without calling its module",
    "bypassed.bias": "bypassed: read without calling its module",
    "read_beside.weight": "read 2 times in a forward",
    "unused.weight": "not used in the probe forward",
    "unused.bias": "not used in the probe forward",
    "own.weight": "Own has a forward of its own",
    "norm.weight": "",
    "norm.bias": "",
    "plain": "a plain parameter of Zoo, which is no linear, embedding or norm",
    "conv.weight": "a plain parameter of Conv1d, which is no linear, embedding or norm",
    "conv.bias": "",
    "replaced.weight": "the forward of this Linear was replaced",
    "wide.weight": "float64 weights have no kernel",
}
# Of other models than the zoo: see the tests that name them.
OTHER_REASONS = (
    "a head that owns its loss, with a bias",
    "an embedding with max_norm",
    "no gradient reached it in the probe forward",
    "not contiguous in memory",
)
IDS = torch.arange(6).view(2, 3)


def zoo_loss(model: nn.Module, number: int) -> Tensor:
    return model((IDS + number) % 20)


def test_every_reason() -> None:
    model = Zoo()
    covered = cover(model, probe_readers(model, lambda: model(IDS)))
    assert {name: one.placement.excluded for name, one in covered.items()} == REASONS
    kinds = {name: one.placement.kind for name, one in covered.items() if not one.placement.excluded}
    assert set(kinds.values()) == {"linear", "vector"}


def test_a_weight_without_gradient_or_in_strides_says_so() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = nn.Parameter(torch.randn(8, 8).t())

    def detached() -> Tensor:
        hidden = model[0](torch.ones(2, 8)).detach()
        return model[1](hidden).sum()

    covered = cover(model, probe_readers(model, detached))
    assert covered["0.weight"].placement.excluded == "no gradient reached it in the probe forward"
    assert covered["1.weight"].placement.excluded == "not contiguous in memory"


def test_every_reason_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "forge.md").read_text()
    rows = [re.escape(row).replace("…", ".*") for row in re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)]
    # What a row lists beside its first example, in brackets, is the same reason.
    for reason in {*REASONS.values(), *OTHER_REASONS} - {""}:
        words = re.sub(r"\d+ times", "2 times", reason)
        words = re.sub(r"with (scale_grad_by_freq|sparse)$", "with max_norm", words)
        assert any(re.match(row, words) for row in rows), reason


def test_the_report_says_what_goes_where() -> None:
    model = Zoo()
    report = fuse(model, options_of(), loss=zoo_loss).report()
    assert report.startswith("forge: 9.")
    for reason in set(REASONS.values()) - {""}:
        assert reason in report
    assert "frozen          1 weights" in report
    assert "(read_beside.weight)" in report


def test_what_is_not_fused_trains_as_ever() -> None:
    fused, plain = Zoo(), Zoo()
    options = options_of()
    optimizer, reference = fuse(fused, options, loss=zoo_loss), ordinary(plain, options)
    train(fused, optimizer, 0, 10, loss=zoo_loss)
    train(plain, reference, 0, 10, loss=zoo_loss)
    ours, theirs = weights(fused), weights(plain)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-5, msg=name)
    assert torch.equal(fused.frozen.weight, Zoo().frozen.weight)
    assert not torch.equal(fused.linear.weight, Zoo().linear.weight)


def test_padding_row_gets_no_gradient() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(20, 8, padding_idx=3)

        def forward(self, ids: Tensor) -> Tensor:
            return (self.embed(ids) - 1).square().mean()

    fused, plain = Bag(), Bag()
    options = options_of()
    optimizer = fuse(fused, options, loss=zoo_loss)
    assert all(line.plan.fused for line in optimizer.plan)
    train(fused, optimizer, 0, 5, loss=zoo_loss)
    train(plain, ordinary(plain, options), 0, 5, loss=zoo_loss)
    torch.testing.assert_close(fused.embed.weight, plain.embed.weight, rtol=0, atol=1e-6)
    assert torch.equal(fused.embed.weight[3], torch.zeros(8))


def test_the_probe_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    probe_readers(model, lambda: model(torch.ones(3, 4)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(param.grad is None for param in model.parameters())


class Changing(nn.Module):
    """Does something else than it did in the probe."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.other, self.way = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), way

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.way == "twice":
            x = self.linear(x)
        if self.way == "bypass":
            x = x @ self.linear.weight
        return (x if self.way == "skip" else self.other(x)).square().mean()


def changing_loss(model: nn.Module, number: int) -> Tensor:
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))


@pytest.mark.parametrize(
    ("way", "message"),
    [("twice", "modified by an inplace operation"), ("bypass", r"'linear\.weight' got a \.grad")],
)
def test_a_use_that_the_probe_did_not_show_is_an_error(way: str, message: str) -> None:
    """Autograd itself notices a weight that changed before its second use."""
    model = Changing("")
    optimizer = fuse(model, options_of(), loss=changing_loss)
    model.way = way
    with pytest.raises(RuntimeError, match=message):
        train(model, optimizer, 0, 1, loss=changing_loss)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lamb", "adafactor", "lion"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_weight_that_a_step_passes_by_takes_its_gradient_free_part(name: str, micro_batches: int) -> None:
    """As the ordinary engine does for a parameter without gradient: states and weight decay."""
    fused, plain = Changing(""), Changing("")
    options = options_of(name)
    optimizer = fuse(fused, options, loss=changing_loss, micro_batches=micro_batches, tokens=4)
    reference = ordinary(plain, options)
    for model, each in ((fused, optimizer), (plain, reference)):
        train(model, each, 0, 3, loss=changing_loss, micro_batches=micro_batches)
        model.way = "skip"
        train(model, each, 3, 5, loss=changing_loss, micro_batches=micro_batches)
    for ours, theirs in zip(fused.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_some_micro_batches_may_pass_a_weight_by() -> None:
    def loss(model: nn.Module, number: int) -> Tensor:
        assert isinstance(model, Changing)
        model.way = "skip" if number % 3 == 2 else ""
        return changing_loss(model, number)

    for name in ("adamw", "sgd", "muon"):
        for accumulation in ("auto", "stash", "buffer"):
            fused, plain = Changing(""), Changing("")
            options = options_of(name)
            steps = {"micro_batches": 3, "tokens": 4, "accumulation": accumulation}
            train(fused, fuse(fused, options, loss=loss, **steps), 0, 4, loss=loss, micro_batches=3)
            train(plain, ordinary(plain, options), 0, 4, loss=loss, micro_batches=3)
            for ours, theirs in zip(fused.parameters(), plain.parameters()):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_backward_outside_of_a_step_is_an_error() -> None:
    model = Changing("")
    optimizer = fuse(model, options_of(), loss=changing_loss)
    with pytest.raises(RuntimeError, match="outside of a step"):
        changing_loss(model, 0).backward()
    with pytest.raises(RuntimeError, match="0 of 1 micro-batches"):
        optimizer.step()
    optimizer.begin_step(1)
    with pytest.raises(RuntimeError, match="micro-batch 1 follows -1"):
        optimizer.before_backward(1)
    with pytest.raises(ValueError, match="the plan is for 1 micro-batches"):
        optimizer.begin_step(2)
    train(model, optimizer, 0, 1, loss=changing_loss)


def replaced(model: Changing) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def frozen(model: Changing) -> None:
    model.linear.weight.requires_grad_(False)


def attached_again(model: Changing) -> None:
    optimizer = fuse(model, options_of(), loss=changing_loss)
    train(model, optimizer, 0, 1, loss=changing_loss)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replaced, "moved or was replaced"),
        (lambda model: model.double(), "moved or was replaced"),
        (frozen, "was frozen"),
        (attached_again, "has another optimizer by now"),
    ],
)
def test_a_weight_that_is_no_longer_the_fused_one_is_an_error(change: Any, words: str) -> None:
    """Training would go on with the old weights, or change what nobody reads."""
    model = Changing("")
    optimizer = fuse(model, options_of(), loss=changing_loss)
    train(model, optimizer, 0, 1, loss=changing_loss)
    change(model)
    with pytest.raises(RuntimeError, match=rf"'linear\.weight' {words}.*: attach again"):
        optimizer.begin_step(1)


def test_weights_whose_gradients_are_handed_over_change_optimizers_too() -> None:
    """The former one's hooks must not take what is the new one's."""
    options, ranks = options_of(), Ranks({"dp_shard": 2})
    taken, fresh = Changing(""), Changing("")

    def attached(model: nn.Module) -> ForgeOptimizer:
        groups, probe = build_groups(model, options), lambda: changing_loss(model, 0)
        return attach(model, groups, probe=probe, ranks=ranks, seed=3)

    former = attached(taken)
    optimizer = attached(taken)
    former.detach()  # of what it has no more
    train(taken, optimizer, 0, 2, loss=changing_loss)
    train(fresh, attached(fresh), 0, 2, loss=changing_loss)
    assert same(weights(taken), weights(fresh))
    former = optimizer
    optimizer = attached(taken)
    with pytest.raises(RuntimeError, match=r"'linear\.weight' has another optimizer by now: attach again"):
        former.begin_step(1)
    frozen(taken)
    with pytest.raises(RuntimeError, match=r"'linear\.weight' was frozen .*: attach again"):
        optimizer.begin_step(1)
    optimizer.detach()
    changing_loss(taken, 0).backward()
    assert taken.other.weight.grad is not None


def test_detaching_a_former_optimizer_leaves_the_new_one_its_model() -> None:
    model = Changing("")
    former, optimizer = (fuse(model, options_of(), loss=changing_loss) for _ in range(2))
    former.detach()
    train(model, optimizer, 0, 1, loss=changing_loss)
    assert model.linear.weight.grad is None
    optimizer.detach()
    changing_loss(model, 0).backward()
    assert model.linear.weight.grad is not None


@pytest.mark.parametrize("pickled", [False, True])
def test_a_copy_is_an_ordinary_model(pickled: bool) -> None:
    """As weight averages are taken: it shares nothing with the fused one, and its backward is ordinary."""
    model: Any = nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 8))

    def loss(model: nn.Module, number: int) -> Tensor:
        return model(IDS + number).square().mean()

    optimizer = fuse(model, options_of(), loss=loss)
    train(model, optimizer, 0, 1, loss=loss)
    if pickled:
        torch.save(model, stored := io.BytesIO())
        stored.seek(0)
        twin = torch.load(stored, weights_only=False)
    else:
        twin = copy.deepcopy(model)
    before = weights(model)
    assert torch.equal(twin(IDS), model(IDS)) and type(twin[1]) is nn.LayerNorm
    with torch.no_grad():
        twin[1].bias += 1
        twin[2].bias += 1
        moved = twin[2](twin[1](twin[0](IDS)) - 1) - 1
    torch.testing.assert_close(moved, model(IDS), rtol=0, atol=1e-5)
    loss(twin, 0).backward()
    assert all(param.grad is not None for param in twin.parameters())
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())
    train(model, optimizer, 1, 2, loss=loss)
