"""Launches that are made ready once: the same bits as those found anew, whatever moves between two calls."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from tests.kernels.cases import Weight, assert_same_bits, hyper_vector
from titanforge.config.sections import Optimizer
from titanforge.kernels.epilogues import get_epilogue
from titanforge.kernels.flat import flat_update
from titanforge.kernels.flat_plan import FlatPlan
from titanforge.kernels.row_norm_update import RowNormUpdates
from titanforge.optim import build_optimizer

ADAMW = get_epilogue("adamw")
SHAPES = [(70,), (4, 64), (3, 64), (2, 2, 7)]


def test_a_plan_has_the_bits_of_a_call_without_one(device: torch.device) -> None:
    recipes = ["bf16_sr", "bf16", "master", "bf16"]
    mine, theirs = (
        [
            Weight(ADAMW, recipe, shape, device, seed)
            for seed, (recipe, shape) in enumerate(zip(recipes, SHAPES))
        ]
        for _ in range(2)
    )
    rows, ids = [0, 1, 1, 0], [5, 6, 7, 8]
    plan = FlatPlan(
        ADAMW,
        [one.weight for one in mine],
        [one.states for one in mine],
        [one.master for one in mine],
        rows,
        ids,
    )
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
    narrow = [grad.bfloat16() for grad in grads]
    padded = [torch.cat([grad.new_zeros(1), grad.flatten()])[1:].view(grad.shape) for grad in grads]
    strided = [torch.stack([grad, grad], -1)[..., 0] for grad in grads]
    counts = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
    # The first, others, unaligned, of mixed types, not contiguous, and the first again.
    sequence = (grads, [-grad for grad in grads], padded, [*grads[:2], *narrow[2:]], strided, grads)
    for step, given in enumerate(sequence):
        hyper = torch.stack([hyper_vector(ADAMW, lr=0.01), hyper_vector(ADAMW, lr=0.1 * step)]).to(device)
        rng = torch.tensor([7, step], device=device)
        given[1][0, 3] = torch.inf if step == 1 else 0.5
        plan(given, hyper, rng, counts[0])
        flat_update(
            ADAMW, [one.weight for one in theirs], given, [one.states for one in theirs], hyper,
            masters=[one.master for one in theirs], hyper_rows=rows, rng=rng, tensor_ids=ids,
            nonfinite=counts[1],
        )  # fmt: skip
        for a, b in zip(mine, theirs):
            assert_same_bits(a.tensors(), b.tensors())
    assert counts[0].tolist() == counts[1].tolist() == [1]
    with pytest.raises(ValueError, match="shape"):
        plan([*grads[:3], grads[3][:1]], torch.stack([hyper_vector(ADAMW)] * 2).to(device), rng, None)


@pytest.mark.parametrize("applies", [True, False])
def test_rows_of_unit_norm(applies: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    momenta = [torch.randn(3, 70, generator=generator).to(device, torch.bfloat16) for _ in range(2)]
    momenta[1][1] = 0.0
    momenta[0][2, 4] = torch.nan
    masters = [torch.randn(3, 70, generator=generator).to(device) for _ in range(2)]
    copies = [torch.zeros(3, 70, dtype=torch.bfloat16, device=device) for _ in range(2)]
    old = [master.clone() for master in masters]
    hyper = torch.tensor([float(applies), 0.1, 0.2, 1.0], device=device)
    RowNormUpdates(momenta, masters, copies)(hyper, 3.0)
    for m, w, stored, before in zip(momenta, masters, copies, old):
        norm = m.float().norm(dim=1, keepdim=True)
        step = torch.where(norm > 0, m.float() / norm, 0.0)
        expected = before * 0.98 - 0.1 * 3.0 * step if applies else before
        torch.testing.assert_close(w, expected, rtol=1e-5, atol=1e-6)
        rounded = w if applies else torch.zeros_like(w)  # the interpreter cuts what a GPU rounds
        torch.testing.assert_close(stored.float(), rounded, rtol=2**-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["AdamW", "RMNP"])
def test_an_engine_follows_gradients_and_weights_that_move(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    still = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5, bias=False))}).to(device)
    moving = copy.deepcopy(still)
    engines = [build_optimizer(model, Optimizer(name=name, lr=0.1), "float32") for model in (still, moving)]
    held = {name: torch.empty_like(p) for name, p in still.named_parameters()}
    for step in range(3):
        for (key, a), b in zip(still.named_parameters(), moving.parameters()):
            held[key].copy_(torch.randn(a.shape, generator=torch.Generator().manual_seed(step)))
            a.grad, b.grad = held[key], held[key].clone()
        if step == 1:
            for b in moving.parameters():
                b.data = b.data.clone()
        if step == 2:
            next(still.parameters()).grad = next(moving.parameters()).grad = None
        for engine in engines:
            engine.step()
        for a, b in zip(still.parameters(), moving.parameters()):
            assert torch.equal(a, b)
    last = list(moving.parameters())[-1]
    gone = weakref.ref(last.grad)
    engines[1].zero_grad()
    assert gone() is None  # nothing that lives from step to step holds it
