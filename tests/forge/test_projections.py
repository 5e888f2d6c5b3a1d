"""q, k and v, and gate and up, multiplied as one."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
from pathlib import Path

import pytest
import safetensors.torch as safetensors_torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.forge.toy import fuse as fuse_apart
from tests.forge.toy import (
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
from titanforge.forge import attach, sources
from titanforge.forge.modules import fuse_module, is_fused
from titanforge.forge.ops import consume_product
from titanforge.models.layers.mlp import SwiGLU
from titanforge.optim import build_rule


def fuse(model, *options, merge_projections: bool = True, **steps):
    return fuse_apart(model, *options, merge_projections=merge_projections, **steps)


class _Products(TorchDispatchMode):
    """Counts matrix products of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def _products(model, optimizer) -> tuple[int, int]:
    """Of forward, and of forward and backward; takes the step."""
    optimizer.begin_step(1)
    with _Products() as counted:
        loss = llama_loss(model, 0)
        forward = counted.count
        optimizer.before_backward(0)
        loss.backward()
    optimizer.step()
    return forward, counted.count


def test_a_group_takes_one_product_each_way() -> None:
    merged, apart = llama(), llama()
    first, second = fuse(merged, options_of()), fuse(apart, options_of(), merge_projections=False)
    (forward, both), (forward_apart, both_apart) = _products(merged, first), _products(apart, second)
    # Three products fewer in each of two blocks (two of q, k, v and one of gate, up), both ways. Weight
    # gradients are formed by the sinks as before.
    assert forward_apart - forward == 6
    assert both_apart - both == 12
    assert "4 groups of linears of one input (w1+w3, wq+wk+wv) are multiplied as one" in first.report()
    assert "multiplied as one" not in second.report()


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "lamb"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_is_that_of_the_ordinary_engine(name: str, micro_batches: int) -> None:
    plain, merged = llama(), llama()
    options = options_of(name)
    losses = train(plain, ordinary(plain, options), 0, 4, micro_batches=micro_batches)
    found = train(
        merged, fuse(merged, options, micro_batches=micro_batches), 0, 4, micro_batches=micro_batches
    )
    assert found == pytest.approx(losses, abs=2e-5)
    assert largest_difference(weights(plain), weights(merged)) < 1e-4


def test_updates_do_not_depend_on_it() -> None:
    """The sinks' own bits: against gradients formed from the same operands, also rounded at random."""
    changes = {"state_dtype": "int8", "master_weights": "stochastic_rounding"}
    formed, merged = llama(torch.bfloat16), llama(torch.bfloat16)
    options = options_of(**changes)
    first = fuse_materialised(formed, options, "bfloat16", merge_projections=True)
    second = fuse(merged, options, "bfloat16")
    assert train(formed, first, 0, 3) == train(merged, second, 0, 3)
    assert same(weights(formed), weights(merged))
    assert same(states(first), states(second))


def _adjacent(parts: list[Tensor]) -> bool:
    return all(b.data_ptr() == a.data_ptr() + a.nbytes for a, b in itertools.pairwise(parts))


def test_weights_lie_side_by_side_and_stay_parameters() -> None:
    model = llama()
    before, names = weights(model), [name for name, _ in model.named_parameters()]
    optimizer = fuse(model, options_of())
    attention, feed_forward = model.layers["0"].attention, model.layers["0"].feed_forward
    assert _adjacent([attention.wq.weight, attention.wk.weight, attention.wv.weight])
    assert _adjacent([feed_forward.w1.weight, feed_forward.w3.weight])
    assert same(before, weights(model))
    assert [name for name, _ in model.named_parameters()] == names
    train(model, optimizer, 0, 1)
    moved = weights(model)
    assert not any(torch.equal(before[name], moved[name]) for name in names)
    model.load_state_dict(before)
    assert same(before, weights(model))
    train(model, optimizer, 1, 2)  # the weights are where they were: still attached


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_weights_and_states_are_saved_as_those_of_ordinary_models(tmp_path: Path, state_dtype: str) -> None:
    """Each by itself: its storage is its own."""
    merged, apart, options = llama(torch.bfloat16), llama(torch.bfloat16), options_of(state_dtype=state_dtype)
    optimizer = fuse(merged, options, "bfloat16")
    train(merged, optimizer, 0, 1)
    apart.load_state_dict(merged.state_dict())
    assert len(pickle.dumps(merged)) == pytest.approx(len(pickle.dumps(apart)), rel=0.01)
    safetensors_torch.save_model(merged, str(tmp_path / "merged"))
    safetensors_torch.save_model(apart, str(tmp_path / "apart"))
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "apart").read_bytes()
    state = optimizer.state_dict()["state"]["layers.0.attention.wk.weight"]
    for tensor in (merged.layers["0"].attention.wk.weight, *state.values()):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    expected = weights(merged)
    optimizer.detach()
    del optimizer
    gc.collect()
    assert same(expected, weights(merged)), "their memory goes with the last of them"


def test_evaluation_copies_and_detached_models_are_ordinary() -> None:
    model = llama()
    optimizer = fuse(model, options_of())
    with torch.no_grad():
        assert llama_loss(model, 0) == llama_loss(llama(), 0)
    copied = copy.deepcopy(model)
    assert not any(is_fused(module) for module in copied.modules())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert not any(is_fused(module) for module in loaded.modules())
    optimizer.detach()
    assert not any(is_fused(module) for module in model.modules())
    for other in (copied, loaded, model):
        assert type(other.layers["0"].attention) is type(llama().layers["0"].attention)
        llama_loss(other, 0).backward()
        assert other.layers["0"].attention.wk.weight.grad is not None


def test_a_second_optimizer_takes_the_model_over() -> None:
    model = llama()
    former = fuse(model, options_of())
    train(model, former, 0, 1)
    later = fuse(model, options_of())
    with pytest.raises(RuntimeError, match="attach again"):
        former.begin_step(1)
    former.detach()
    assert is_fused(model.layers["0"].attention)
    train(model, later, 1, 2)


def test_a_hook_is_called() -> None:
    """What waits for a linear to be called is not passed by, whether it came before or after attaching."""
    for late in (False, True):
        model, seen = llama(), []

        def hook(module, inputs, seen=seen):
            seen.append(module)

        if not late:
            model.layers["0"].attention.wk.register_forward_pre_hook(hook)
        optimizer = fuse(model, options_of())
        if late:
            model.layers["0"].attention.wk.register_forward_pre_hook(hook)
        seen.clear()
        train(model, optimizer, 0, 1)
        assert len(seen) == 1


class _Adapter(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.linear(x)


def _wrap(attention) -> None:
    attention.wk = _Adapter(attention.wk)


def _patch(attention) -> None:
    former = attention.wk.forward
    attention.wk.forward = lambda x: 2 * former(x)


def _swap(attention) -> None:
    attention.wk, attention.wv = attention.wv, attention.wk


@pytest.mark.parametrize(
    ("change", "compiled"), [(_wrap, False), (_wrap, True), (_patch, False), (_swap, False), (_swap, True)]
)
def test_what_takes_a_linears_place_is_called(change, compiled: bool) -> None:
    """An adapter that came after attaching was passed by in training, and not in evaluation."""
    model, apart = llama(n_layers=1), llama(n_layers=1)
    optimizers = fuse(model, options_of()), fuse(apart, options_of(), merge_projections=False)
    for one in (model, apart):
        if compiled:
            for block in one.layers.values():
                block.compile(backend="aot_eager")
        llama_loss(one, 0)
        change(one.layers["0"].attention)
    with torch.no_grad():
        expected = llama_loss(model, 0).item()
    assert llama_loss(model, 0).item() == pytest.approx(expected, abs=1e-6)
    assert expected != pytest.approx(llama_loss(llama(n_layers=1), 0).item(), abs=1e-6)
    losses = [train(one, optimizer, 0, 3) for one, optimizer in zip((model, apart), optimizers)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
    assert largest_difference(weights(model), weights(apart)) < 1e-4


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.a(x), self.b(x)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.project(x)
        return a * b


def _named(self, x: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    return tuple(getattr(self, name)(x) for name in names)


@pytest.mark.parametrize(
    ("members", "merges"),
    [
        ({"projections": 2, "project": _Pair.project}, False),
        ({"projections": ("a", "b"), "project": _Pair.project}, False),
        ({"projections": (("a", "b"),), "project": lambda self, x: (self.a(x), self.b(x))}, False),
        ({"projections": (("a", "c"),), "project": _named}, False),
        ({"projections": property(lambda self: self.a), "project": _named}, False),
        ({"projections": (("a", "b"),), "project": staticmethod(_named)}, False),
        ({"projections": [["a", "b"]], "project": _named}, True),
    ],
)
def test_another_classes_projections_are_left_alone(members, merges: bool) -> None:
    own = members["project"]
    if own is _named:
        members = {**members, "forward": lambda self, x: torch.mul(*self.project(x, ("a", "b")))}
    elif isinstance(own, staticmethod):
        members = {
            **members,
            "forward": lambda self, x: torch.mul(*self.project(self, x, ("a", "b"))),
        }
    model = type("Own", (_Pair,), {**members, "__module__": __name__})()
    x = torch.ones(2, 8)
    optimizer = attach(model, build_rule("AdamW"), probe=lambda: model(x).sum())
    assert ("multiplied as one" in optimizer.report()) is merges
    optimizer.begin_step(1)
    loss = model(x).sum()
    optimizer.before_backward(0)
    loss.backward()
    optimizer.step()


def test_a_copy_of_a_module_that_is_fused_in_two_ways_is_ordinary() -> None:
    model = llama()
    attention = model.layers["0"].attention
    before = type(attention)
    fuse_module(attention, {"other": "vector"}, {})  # as of one that has weights of its own too
    fuse(model, options_of())
    assert type(copy.deepcopy(attention)) is before


def test_a_frozen_member_keeps_its_group_apart() -> None:
    model = llama()
    model.layers["1"].feed_forward.w3.weight.requires_grad_(False)
    optimizer = fuse(model, options_of())
    assert "3 groups of linears" in optimizer.report()
    before = weights(model)
    train(model, optimizer, 0, 2)
    after = weights(model)
    assert [name for name in before if torch.equal(before[name], after[name])] == [
        "layers.1.feed_forward.w3.weight"
    ]


def test_one_launch_takes_a_group_where_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[int, ...]] = []
    real = sources.update_target

    def counted(operands, target, *rest, **more):
        launches.append(tuple(target.shape))
        real(operands, target, *rest, **more)

    monkeypatch.setattr(sources, "update_target", counted)
    for changes, joint in (
        ({"state_dtype": "bfloat16"}, True),
        ({"state_dtype": "int8"}, True),
        ({"state_dtype": "fp8"}, False),
        ({"state_dtype": "bfloat16", "master_weights": "stochastic_rounding"}, False),
        ({"master_weights": "float32"}, False),
    ):
        model = llama(torch.bfloat16)
        optimizer = fuse(model, options_of(**changes), "bfloat16")
        train(model, optimizer, 0, 1)
        launches.clear()
        train(model, optimizer, 1, 2)
        assert ((64, 32) in launches, (144, 32) in launches) == (joint, joint), changes  # 32+16+16, 72+72
        # wo and w2 of two blocks beside the groups; norms and the head come in shapes of their own.
        assert sum(shape[-1] in (32, 72) and shape[0] in (16, 32, 64, 72, 144) for shape in launches) == (
            8 if joint else 14
        ), changes


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_a_joint_launch_is_that_of_each(state_dtype: str) -> None:
    joint, apart = llama(torch.bfloat16), llama(torch.bfloat16)
    options = options_of(state_dtype=state_dtype)
    first = fuse(joint, options, "bfloat16")
    second = fuse(apart, options, "bfloat16", merge_projections=False)
    saved = first.state_dict()["state"]
    gate, up = (saved[f"layers.0.feed_forward.{name}.weight"] for name in ("w1", "w3"))
    assert all(_adjacent([gate[slot], up[slot]]) for slot in gate)
    for optimizer in (first, second):
        optimizer.begin_step(1)
        optimizer.before_backward(0)
    names = ("layers.0.attention.wq", "layers.0.attention.wk", "layers.0.attention.wv")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 32, generator=generator).bfloat16()
    dys = [torch.randn(24, rows, generator=generator).bfloat16() for rows in (32, 16, 16)]
    attention = joint.layers["0"].attention
    together = attention._forge_wq_wk_wv_data
    consume_product(together, torch.cat(dys, -1), x, attention._forge_wq_wk_wv)
    for name, dy in zip(names, dys):
        linear = apart.get_submodule(name)
        consume_product(linear._forge_weight_data, dy, x, linear._forge_weight)
    for optimizer in (first, second):
        optimizer.step()
    weights_of = [weights(joint), weights(apart)]
    states_of = [states(first), states(second)]
    for name in names:
        a, b = (found[f"{name}.weight"].float() for found in weights_of)
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-6)
        for slot in ("m", "v"):
            a, b = (found[f"{name}.weight.{slot}"].float() for found in states_of)
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1.0 if state_dtype == "int8" else 1e-6)
    assert float(first.gradient_norm()) == pytest.approx(float(second.gradient_norm()), rel=1e-4)


def test_checkpoints_do_not_depend_on_it(tmp_path: Path) -> None:
    merged, apart = llama(), llama()
    first, second = fuse(merged, options_of()), fuse(apart, options_of(), merge_projections=False)
    train(merged, first, 0, 2)
    saved = {"model": merged.state_dict(), "optimizer": first.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "a")
    loaded = {"model": apart.state_dict(), "optimizer": second.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path / "a")
    apart.load_state_dict(loaded["model"])
    second.load_state_dict(loaded["optimizer"])
    assert same(weights(merged), weights(apart))
    assert same(states(first), states(second))
    dcp.save(loaded, checkpoint_id=tmp_path / "b")
    sizes = [sum(file.stat().st_size for file in (tmp_path / one).glob("*.distcp")) for one in "ab"]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)  # of a part, not all that it lies in


def test_linears_that_hooks_wait_for_stay_apart() -> None:
    """Dobb's, which are there only after all else."""
    model = llama()
    assert "multiplied as one" not in fuse(model, options_of("Dobb")).report()
    assert "multiplied as one" in fuse(llama(), options_of("Muon")).report()


def test_groups_that_cannot_lie_side_by_side_are_left_alone() -> None:
    model = llama()
    for block in model.layers.values():
        block.attention.wq = _Adapter(block.attention.wq)
    optimizer = fuse(model, options_of())
    assert "2 groups of linears of one input (w1+w3) are" in optimizer.report()
    train(model, optimizer, 0, 1)


def test_a_project_of_its_own_is_left_alone() -> None:
    class Own(SwiGLU):
        def project(self, x: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
            return tuple(2 * one for one in super().project(x, names))

    model = llama()
    for block in model.modules():
        if type(block) is SwiGLU:
            block.__class__ = Own
    report = fuse(model, options_of()).report()
    assert "wk" in report and "w1" not in report
