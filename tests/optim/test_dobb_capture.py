"""What Dobb's hooks capture, and what of it a checkpoint keeps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.optim.test_dobb import Net, T, micro_batch, net, options, train
from titanforge.optim import build_optimizer
from titanforge.parallelisms import apply_activation_checkpoint, apply_compile


@pytest.mark.parametrize("basis_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("side", ["A", "G"])
def test_resume_within_a_period_is_bit_exact(side: str, basis_dtype: str) -> None:
    chosen = options(side=side, basis_dtype=basis_dtype)
    model = net()
    optimizer = build_optimizer(model, chosen, "float32")
    keys = {name: set(slots) for name, slots in optimizer.state_dict()["state"].items()}
    assert all(slots == {"m", "statistic", "basis", "captured_steps"} for slots in keys.values())
    train(model, optimizer, 0, T + 1)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, T + 1, 3 * T + 1)
    again = net(seed=5)
    resumed = build_optimizer(again, chosen, "float32")
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(again, resumed, T + 1, 3 * T + 1)
    for a, b in zip(model.parameters(), again.parameters()):
        assert torch.equal(a, b)
    for name, slots in optimizer.state_dict()["state"].items():
        for slot, tensor in slots.items():
            assert torch.equal(tensor, resumed.state_dict()["state"][name][slot]), (name, slot)


def test_a_distributed_checkpoint_within_a_period_goes_on_bit_exact(tmp_path) -> None:
    model = net()
    optimizer = build_optimizer(model, options(), "float32")
    train(model, optimizer, 0, T + 1)
    dcp.save(  # pyright: ignore[reportPrivateImportUsage]
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path
    )
    train(model, optimizer, T + 1, 3 * T)
    again = net(seed=5)
    resumed = build_optimizer(again, options(), "float32")
    state = {"model": again.state_dict(), "optimizer": resumed.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)  # pyright: ignore[reportPrivateImportUsage]
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    train(again, resumed, T + 1, 3 * T)
    for a, b in zip(model.parameters(), again.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("capture", ["first", "all"])
def test_micro_batches_that_are_captured(capture: str) -> None:
    model = net()
    optimizer = build_optimizer(model, options(capture=capture, side="A"), "float32")
    train(model, optimizer, 0, 1, micro_batches=3)
    count = 1 if capture == "first" else 3
    x = torch.cat([micro_batch(0, index) for index in range(count)])
    saved = optimizer.state_dict()["state"]["layers.0.w1.weight"]["statistic"]
    torch.testing.assert_close(saved[0], x.T @ x / len(x))


def test_hooks_idle_outside_training_and_between_refreshes() -> None:
    model = net()
    optimizer = build_optimizer(model, options(), "float32")
    train(model, optimizer, 0, 1)
    first = copy.deepcopy(optimizer.state_dict()["state"]["layers.0.w1.weight"])
    train(model, optimizer, 1, T)
    later = optimizer.state_dict()["state"]["layers.0.w1.weight"]
    assert torch.equal(first["statistic"], later["statistic"]) and torch.equal(first["basis"], later["basis"])
    optimizer.begin_step(1)  # a refresh step
    model.eval()
    model(micro_batch(7))
    model.train()
    assert all(float(weight.sums[1]) == 0 for weight in optimizer.capture.weights)  # pyright: ignore


@pytest.mark.parametrize("side", ["A", "G"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_activations_are_captured_once(side: str, mode: str) -> None:
    plain, recomputed = net(), net()
    apply_activation_checkpoint(recomputed, mode, "op")
    ends = []
    for model in (plain, recomputed):
        optimizer = build_optimizer(model, options(side=side), "float32")
        train(model, optimizer, 0, 2 * T)
        ends.append(optimizer.state_dict()["state"]["layers.0.w2.weight"])
    assert torch.equal(ends[0]["statistic"], ends[1]["statistic"])
    for a, b in zip(plain.parameters(), recomputed.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("side", ["A", "G"])
@pytest.mark.parametrize("mode", ["none", "full", "outside"])
def test_compiled_blocks_capture_the_same(mode: str, side: str) -> None:
    """outside: the recomputation around the compiled forward."""
    torch._dynamo.reset()  # compiled code of other tests counts against its limit
    torch.manual_seed(0)
    plain = Net(8, 8)  # of one width: what is captured of both lies in one tensor
    compiled = copy.deepcopy(plain)
    apply_activation_checkpoint(compiled, "none" if mode == "none" else "full", "op")
    apply_compile(compiled, "aot_eager", recompute_outside=mode == "outside")
    ends = []
    for model in (plain, compiled):
        optimizer = build_optimizer(model, options(side=side), "float32")
        train(model, optimizer, 0, T + 1, micro_batches=2)
        ends.append(optimizer.state_dict()["state"])
    for name in ("layers.0.w1.weight", "layers.0.w2.weight"):
        assert bool(ends[0][name]["statistic"].any())
        torch.testing.assert_close(ends[0][name]["statistic"], ends[1][name]["statistic"])
    for a, b in zip(plain.parameters(), compiled.parameters()):
        torch.testing.assert_close(a, b)
