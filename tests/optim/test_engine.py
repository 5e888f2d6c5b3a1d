"""The ordinary engine: complete states, refused steps, resume, storage, missing gradients."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from titanforge.config.sections import Optimizer, ParamGroup, ScalarOptimizer
from titanforge.optim import build_optimizer
from titanforge.optim.baseline import TorchOptimizer
from titanforge.optim.build import build_groups
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.hyper_table import HyperTable
from titanforge.optim.registry import RULES

ALL_RULES = sorted(RULES)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
        self.norm = nn.RMSNorm(8)
        self.output = nn.Linear(8, 16, bias=False)
        self.to(dtype)


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(model, step)
        optimizer.set_lr(1.0 / (1 + step))
        optimizer.step(torch.tensor(1.0))


def through_a_file(state: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b))


def flat_states(optimizer: Any) -> list[torch.Tensor]:
    return [t.clone() for slots in optimizer.state_dict()["state"].values() for t in slots.values()]


@pytest.mark.parametrize("name", ALL_RULES)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_resume_is_bit_exact(name: str, state_dtype: str) -> None:
    options = Optimizer(name=name, state_dtype=state_dtype)  # pyright: ignore[reportArgumentType]
    model = Model()
    optimizer = build_optimizer(model, options, "float32")
    train(model, optimizer, 0, 3)
    saved_model = copy.deepcopy(model.state_dict())
    saved = through_a_file(optimizer.state_dict())
    train(model, optimizer, 3, 6)

    resumed = Model()
    resumed.load_state_dict(saved_model)
    again = build_optimizer(resumed, options, "float32")
    again.load_state_dict(saved)
    train(resumed, again, 3, 6)
    assert_same(weights(model), weights(resumed))
    assert_same(flat_states(optimizer), flat_states(again))
    assert int(again.step_count) == 6


@pytest.mark.parametrize("name", ALL_RULES)
def test_refused_step_is_as_if_it_never_was(name: str) -> None:
    """Weights and states keep their bits, and bias corrections count applied steps only."""
    options = Optimizer(name=name)
    model, plain = Model(), Model()
    optimizer = build_optimizer(model, options, "float32")
    reference = build_optimizer(plain, options, "float32")
    train(model, optimizer, 0, 2)
    train(plain, reference, 0, 2)
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.nan)
    before, states = weights(model), flat_states(optimizer)
    optimizer.step(torch.tensor(0.0))
    # The path of an accelerator, where the host does not know the flag.
    optimizer.prepare_step()  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.apply_step(torch.tensor(False))  # pyright: ignore[reportAttributeAccessIssue]
    assert_same(before, weights(model))
    assert_same(states, flat_states(optimizer))
    assert int(optimizer.step_count) == 2
    train(model, optimizer, 2, 4)
    train(plain, reference, 2, 4)
    assert_same(weights(model), weights(plain))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon", "adafactor"])
def test_gradient_scale_is_a_scaled_gradient(name: str) -> None:
    options = Optimizer(name=name)
    model, plain = Model(), Model()
    optimizer = build_optimizer(model, options, "float32")
    reference = build_optimizer(plain, options, "float32")
    for step in range(3):
        set_gradients(model, step)
        optimizer.step(grad_scale=torch.tensor(0.25))
        set_gradients(plain, step)
        for param in plain.parameters():
            assert param.grad is not None
            param.grad *= 0.25
        reference.step()
    assert_same(weights(model), weights(plain))


def test_states_are_complete_from_the_start() -> None:
    model = Model()
    optimizer = build_optimizer(model, Optimizer(), "float32")
    state = optimizer.state_dict()["state"]
    assert sorted(state) == sorted(name for name, _ in model.named_parameters())
    assert all(sorted(slots) == ["m", "v"] for slots in state.values())
    keys = {(name, slot) for name, slots in state.items() for slot in slots}
    train(model, optimizer, 0, 1)
    after = optimizer.state_dict()["state"]
    assert keys == {(name, slot) for name, slots in after.items() for slot in slots}


def test_missing_gradient_counts_as_zero() -> None:
    model, plain = Model(), Model()
    optimizer = build_optimizer(model, Optimizer(), "float32")
    reference = build_optimizer(plain, Optimizer(), "float32")
    train(model, optimizer, 0, 1)
    train(plain, reference, 0, 1)
    set_gradients(model, 1)
    set_gradients(plain, 1)
    model.layers[1].weight.grad = None
    plain.layers[1].weight.grad = torch.zeros(8, 8)
    before = plain.layers[1].weight.detach().clone()
    optimizer.step()
    reference.step()
    assert_same(weights(model), weights(plain))
    assert not torch.equal(before, plain.layers[1].weight)


def test_large_and_strided_tensors() -> None:
    """More than one cache chunk with a ragged end, and a gradient that is no flat run of memory."""
    linear, whole = nn.Linear(301, 501, bias=False), nn.Linear(301, 501, bias=False)
    with torch.no_grad():
        whole.weight.copy_(linear.weight)
    ours = build_optimizer(linear, Optimizer(), "float32")
    theirs = torch.optim.AdamW(whole.parameters(), 8e-4, (0.9, 0.95), 1e-8, weight_decay=0.1)
    for _ in range(3):
        gradient = torch.randn(301, 501)
        linear.weight.grad = gradient.t()
        whole.weight.grad = gradient.t().contiguous()
        ours.step()
        theirs.step()
    torch.testing.assert_close(linear.weight, whole.weight, rtol=0, atol=1e-6)


def test_master_weights_keep_small_updates() -> None:
    model, exact = Model(torch.bfloat16), Model(torch.bfloat16).float()
    options = Optimizer(lr=1e-4, master_weights="float32")
    optimizer = build_optimizer(model, options, "bfloat16")
    reference = build_optimizer(exact, Optimizer(lr=1e-4), "float32")
    for step in range(8):
        set_gradients(model, step)
        for param, other in zip(model.parameters(), exact.parameters()):
            assert param.grad is not None
            other.grad = param.grad.float()
        optimizer.step()
        reference.step()
    assert_same([w.bfloat16() for w in weights(exact)], weights(model))
    masters = [slots["master"] for slots in optimizer.state_dict()["state"].values()]
    named = dict(exact.named_parameters())
    assert all(torch.equal(m, named[n]) for n, m in zip(optimizer.state_dict()["state"], masters))
    with torch.no_grad():
        model.norm.weight.fill_(3.0)
    optimizer.refresh_master_weights()
    assert torch.equal(optimizer.state_dict()["state"]["norm.weight"]["master"], torch.full((8,), 3.0))


@pytest.mark.parametrize(
    ("change", "training_dtype", "message"),
    [
        ({"state_dtype": "int4"}, "float32", r"optimizer\.state_dtype = 'int4'"),
        ({"master_weights": "float32"}, "float32", r"optimizer\.master_weights = 'float32' is for bfloat16"),
        (
            {"implementation": "fused", "name": "Lion"},
            "float32",
            r"optimizer\.implementation = 'fused' has no",
        ),
        ({"implementation": "fused", "state_dtype": "bfloat16"}, "float32", r"optimizer\.state_dtype"),
        ({"implementation": "fused", "master_weights": "float32"}, "bfloat16", r"optimizer\.master_weights"),
        ({"momentum": 1.0}, "float32", r"optimizer\.momentum"),
        ({"lr": -1.0}, "float32", r"optimizer\.lr must be at least 0"),
    ],
)
def test_impossible_options_are_named(change: dict, training_dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(Model(), Optimizer(**change), training_dtype)


def test_meta_weights_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="meta"):
        build_optimizer(model, Optimizer(), "float32")
    assert sum(group.num_parameters for group in build_groups(model, Optimizer())) == 6


def test_load_names_what_does_not_fit() -> None:
    saved = build_optimizer(Model(), Optimizer(), "float32").state_dict()
    with pytest.raises(ValueError, match=r"written with optimizer rule \['adamw'\].*uses \['lion'\]"):
        build_optimizer(Model(), Optimizer(name="Lion"), "float32").load_state_dict(saved)
    muon = build_optimizer(Model(), Optimizer(name="Muon"), "float32").state_dict()
    for written, name, scalar, told in (
        (muon, "Muon", "Lion", "set optimizer.scalar.name back"),
        (muon, "Scion", "AdamW", "set optimizer.name back"),
        (muon, "Scion", "Lion", "set optimizer.name and optimizer.scalar.name back"),
        (muon, "AdamW", "AdamW", "set optimizer.name back"),
        (saved, "Muon", "AdamW", "set optimizer.name back"),
    ):
        options = Optimizer(name=name, scalar=ScalarOptimizer(name=scalar))
        with pytest.raises(ValueError, match=told):
            build_optimizer(Model(), options, "float32").load_state_dict(written)
    beside = build_optimizer(Model(), Optimizer(name="Muon"), "float32")
    muon["state"]["norm.weight"] = {}
    with pytest.raises(ValueError, match=r"'norm\.weight': adamw .* with another optimizer\.scalar\.name"):
        beside.load_state_dict(muon)
    fresh = build_optimizer(Model(), Optimizer(), "float32")

    def broken(change: Any) -> dict:
        state = {name: dict(slots) for name, slots in saved["state"].items()}
        change(state)
        return {**saved, "state": state}

    with pytest.raises(ValueError, match=r"nothing for 'norm\.weight'"):
        fresh.load_state_dict(broken(lambda s: s.pop("norm.weight")))
    with pytest.raises(ValueError, match=r"no trainable parameter 'extra'"):
        fresh.load_state_dict(broken(lambda s: s.update(extra={})))
    with pytest.raises(ValueError, match=r"'norm\.weight': adamw needs \['m', 'v'\].*has \['m'\]"):
        fresh.load_state_dict(broken(lambda s: s["norm.weight"].pop("v")))
    with pytest.raises(ValueError, match=r"'m' of 'norm\.weight' has shape \(9,\)"):
        fresh.load_state_dict(broken(lambda s: s["norm.weight"].update(m=torch.zeros(9))))
    with pytest.raises(ValueError, match="'rule'"):
        fresh.load_state_dict({"step": saved["step"], "state": saved["state"]})
    sgd = build_optimizer(Model(), Optimizer(name="SGD"), "float32").state_dict()
    with pytest.raises(ValueError, match=r"optimizer\.momentum"):
        build_optimizer(Model(), Optimizer(name="SGD", momentum=0.0), "float32").load_state_dict(sgd)


def test_window_of_hyperparameters_is_refilled() -> None:
    groups = build_groups(Model(), Optimizer(name="NAdam"))
    pairs = [(groups[0].rule, [group.options for group in groups])]
    small = HyperTable(pairs, torch.device("cpu"), window=3)
    large = HyperTable(pairs, torch.device("cpu"), window=100)
    for step in range(20):
        flag = torch.tensor(float(step % 4 != 2))
        for table in (small, large):
            table.prepare([[0.5, 0.25]])
            table.select(flag, torch.tensor(2.0))
        (a,), (b,) = small.tables(), large.tables()
        assert torch.equal(a, b)
        assert a[:, 0].tolist() == [float(flag)] * 2
        assert a[:, 1].tolist() == [0.5, 0.25]
        assert a[:, 3].tolist() == [2.0, 2.0]
        small.advance(flag)
        large.advance(flag)
    assert int(small.count) == 15


def test_param_groups_show_the_current_rate() -> None:
    options = Optimizer(lr=1e-2, param_groups=[ParamGroup(pattern="norm", lr=4e-2)])
    optimizer = build_optimizer(Model(), options, "float32")
    optimizer.set_lr(0.5)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates["norm.weight"] == pytest.approx(2e-2)
    assert rates["output.weight"] == pytest.approx(5e-3)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_baseline_arms(name: str, implementation: str) -> None:
    """Equal to the native rule; honour flag and scale; resume exactly; states interchangeable."""
    options = Optimizer(name=name, implementation=implementation)  # pyright: ignore[reportArgumentType]
    model, plain = Model(), Model()
    optimizer = build_optimizer(model, options, "float32")
    assert isinstance(optimizer, TorchOptimizer)
    native = build_optimizer(plain, Optimizer(name=name), "float32")
    assert isinstance(native, RuleOptimizer)
    for step in range(3):
        for each in (model, plain):
            set_gradients(each, step)
        for each in (optimizer, native):
            each.set_lr(1.0 / (1 + step))
            each.step(torch.tensor(1.0), torch.tensor(0.5))
        before, states = weights(model), flat_states(optimizer)
        for param in model.parameters():
            param.grad = torch.full_like(param, torch.nan)
        optimizer.step(torch.tensor(0.0))
        assert_same(before, weights(model))
        assert_same(states, flat_states(optimizer))
    for mine, other in zip(weights(model), weights(plain)):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    assert int(optimizer.step_count) == 3

    resumed = Model()
    resumed.load_state_dict(model.state_dict())
    again = build_optimizer(resumed, options, "float32")
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    native.load_state_dict(through_a_file(optimizer.state_dict()))
    plain.load_state_dict(model.state_dict())
    train(model, optimizer, 3, 5)
    train(resumed, again, 3, 5)
    train(plain, native, 3, 5)
    assert_same(weights(model), weights(resumed))
    for mine, other in zip(weights(model), weights(plain)):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
