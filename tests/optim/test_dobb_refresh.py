"""Dobb's refresh: bases from statistics, what fails, and where it runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.optim.test_dobb import Block, T, micro_batch, net, options, train
from titanforge.optim import build_optimizer
from titanforge.optim.dobb.capture import DobbCapture
from titanforge.optim.dobb.refresh import eigenbases, orthonormal_stack, refresh_bases
from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.matrix_options import DobbOptions


def test_a_refused_refresh_keeps_every_bit() -> None:
    model = net()
    optimizer = build_optimizer(model, options(period=1), "float32")
    train(model, optimizer, 0, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    optimizer.begin_step(1)
    loss = model(micro_batch(2) * torch.inf).square().mean()
    optimizer.before_backward(0)
    loss.backward()
    # The path of an accelerator, which does not look at the flag on the host.
    assert isinstance(optimizer, RuleOptimizer)
    optimizer.prepare_step()
    optimizer.apply_step(torch.zeros(()))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[0][name])
    for name, slots in before[1].items():
        for slot in ("m", "statistic", "basis"):
            assert torch.equal(slots[slot], optimizer.state_dict()["state"][name][slot])


def test_failed_factorisations_keep_the_basis_and_are_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 20, generator=generator)
    c = x @ x.mT / 20
    basis = torch.linalg.qr(torch.randn(4, 6, 6, generator=generator)).Q
    c[1, 2, 3] = torch.nan
    c[2] = 0.0  # nothing captured: no direction is better than another
    for qr in ("cholesky", "householder"):
        new, failed = refresh_bases(c, basis, DobbOptions(qr=qr))
        assert torch.equal(new[1], basis[1])
        assert int(failed) == (2 if qr == "cholesky" else 1)
        torch.testing.assert_close(new.mT @ new, torch.eye(6).expand(4, 6, 6), rtol=0, atol=1e-5)
    cold, failed = eigenbases(c, basis, DobbOptions())
    assert int(failed) == 1 and torch.equal(cold[1], basis[1])


@pytest.mark.parametrize("qr", ["cholesky", "householder"])
def test_iterations_keep_the_order_of_the_first_basis(qr: str) -> None:
    """Largest eigenvalue first: from the opposite order they would pass through mixtures."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(2, 32, 32, generator=generator)).Q
    c = (vectors * torch.logspace(0, -1.5, 32)) @ vectors.mT

    def unaligned(basis: Tensor) -> float:
        rotated = basis.mT @ c @ basis
        beside = rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
        return float((beside.square().sum() / rotated.square().sum()).sqrt())

    first, _ = eigenbases(c, torch.eye(32).expand(2, 32, 32), DobbOptions())
    assert (first.mT @ c @ first).diagonal(dim1=1, dim2=2).diff(dim=-1).max() < 0
    off = {}
    for order, basis in (("kept", first), ("opposite", first.flip(-1))):
        basis = basis.to(torch.bfloat16)
        for _ in range(4):
            basis, failed = refresh_bases(c, basis, DobbOptions(qr=qr))
            assert int(failed) == 0
        off[order] = unaligned(basis.float())
    assert off["kept"] < 0.01 and off["opposite"] > 5 * off["kept"], off


@pytest.mark.parametrize("decades", [3, 8])
def test_the_householder_form_for_gpus_has_its_columns_but_for_signs(decades: int) -> None:
    """Of (C + eps I) U as it is met: eigenvalues far apart, U near the eigenvectors, in bf16 storage."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(5, 48, 48, generator=generator, dtype=torch.float64)).Q
    c = (vectors * torch.logspace(0, -decades, 48, dtype=torch.float64)) @ vectors.mT
    u = vectors.to(torch.bfloat16).float()
    y = c.float() @ u + 1e-6 * u
    exact = torch.linalg.qr(y.double()).Q
    found = orthonormal_stack(y, most=2 * 8 * 48 * 48).double()
    torch.testing.assert_close(found.mT @ found, torch.eye(48).double().expand(5, 48, 48), rtol=0, atol=2e-6)
    torch.testing.assert_close(
        found * torch.sign((found * exact).sum(-2, keepdim=True)), exact, rtol=0, atol=1e-4
    )


def test_cholesky_converges_to_eigenvectors() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(2, 8, 8, generator=generator)).Q
    c = vectors @ torch.diag(2.0 ** -torch.arange(8.0)) @ vectors.mT
    basis = torch.eye(8).expand(2, 8, 8).clone()
    for _ in range(400):
        basis, failed = refresh_bases(c, basis, DobbOptions(relative_shift=1e-2))
        assert int(failed) == 0
    rotated = basis.mT @ c @ basis
    assert (rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))).abs().max() < 1e-4


@pytest.mark.parametrize("capture", ["first", "all"])
def test_a_refresh_during_backward_has_the_same_bits(capture: str) -> None:
    ends, early = [], []
    for overlap in (True, False):
        model = net()
        chosen = options(capture=capture, overlap_refresh=overlap)
        optimizer = build_optimizer(model, chosen, "float32")
        train(model, optimizer, 0, 2 * T + 1, micro_batches=2)
        ends.append((model.state_dict(), optimizer.state_dict()["state"]))
        assert isinstance(optimizer, RuleOptimizer) and optimizer.capture is not None
        # What had been refreshed when the optimizer call began: nothing at the cold start.
        optimizer.capture.steps.fill_(T)
        optimizer.capture.loaded()
        optimizer.begin_step(2)
        for index in range(2):
            model(micro_batch(50, index)).sum().backward()
            optimizer.before_backward(index)
        assert isinstance(optimizer.capture, DobbCapture)
        early.append(bool(optimizer.capture._prepared))
    assert early == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0].values(), ends[1][0].values()))
    for name, slots in ends[0][1].items():
        assert all(torch.equal(tensor, ends[1][1][name][slot]) for slot, tensor in slots.items()), name


class Operators(TorchDispatchMode):
    """How many operators there were that are not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [one.alias_info for one in func._schema.returns]
        self.count += not (returned and all(alias and not alias.is_write for alias in returned))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("side", ["A", "G"])
def test_a_refresh_is_as_many_operators_for_many_weights_as_for_two(side: str) -> None:
    """States and sums lie as the refresh reads them; states are views of what it writes."""
    counts = []
    for layers in (1, 4):
        model = net()
        model.layers.update({str(index): Block(8, 12) for index in range(1, layers)})
        optimizer = build_optimizer(model, options(side=side, overlap_refresh=False), "float32")
        train(model, optimizer, 0, T)
        assert isinstance(optimizer, RuleOptimizer) and optimizer.capture is not None
        optimizer.begin_step(1)
        loss = model(micro_batch(T)).square().mean()
        optimizer.before_backward(0)
        loss.backward()
        with torch.no_grad(), Operators() as operators:
            optimizer.capture.refresh(torch.ones(()), None)
        counts.append(operators.count - (2 * layers if side == "G" else 0))  # each weight's positions
        assert len(optimizer.capture.stacks) == 2
        for stack in optimizer.capture.stacks:
            states = [optimizer.state_dict()["state"][weight.name] for weight in stack.weights]
            assert len(states) == layers
            for slot, whole in (("statistic", stack.statistic), ("basis", stack.basis)):
                assert torch.equal(torch.cat([state[slot] for state in states]), whole)
                whole.zero_()
                assert not any(state[slot].any() for state in states)
    assert counts[0] == counts[1] < 150, counts
