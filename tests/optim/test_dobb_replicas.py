"""Dobb on replicas: one reduction of second moments each T steps, everything equal to one process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from tests.distributed_harness import run_distributed
from tests.optim.test_dobb import T, micro_batch, net, options
from titanforge.optim import build_optimizer
from titanforge.sync.ledger import CommLedger

STEPS, TOKENS = 2 * T + 1, 40


def train_share(rank: int, ranks: int, reduce_gradient, reduce_moments) -> tuple[dict, dict]:
    """Each rank takes its rows of a common batch; the loss is divided by the rows of all."""
    model = net()
    # l2: a sign would turn the last bit of a sum into a whole step.
    optimizer = build_optimizer(model, options(norm="l2"), "float32")
    optimizer.capture.all_reduce = reduce_moments  # pyright: ignore
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.begin_step(1)
        x = micro_batch(step, tokens=TOKENS)[rank::ranks]
        loss = model(x).square().sum() / TOKENS
        optimizer.before_backward(0)
        loss.backward()
        for param in model.parameters():
            reduce_gradient(param.grad)
        optimizer.step()
    return copy.deepcopy(model.state_dict()), optimizer.state_dict()["state"]


def replica(rank: int, world_size: int) -> None:
    ledger = CommLedger()
    group = dist.group.WORLD
    weights, states = train_share(
        rank,
        world_size,
        dist.all_reduce,
        lambda t: ledger.all_reduce(t, group, axis="dp_replicate", purpose="second moments"),  # pyright: ignore
    )
    # Steps 0, T and 2 T; n^2 / B entries a matrix (8 and 12 inputs, B = 1) and its count of positions.
    entry = ledger.total()
    assert (entry.count, entry.bytes) == (3, 3 * 4 * (8 * 8 + 12 * 12 + 2))
    for key, other in (("weights", weights), ("states", states)):
        first = [other if rank == 0 else None]
        dist.broadcast_object_list(first, src=0)
        for name, value in (first[0] or {}).items():
            mine = other[name]
            pairs = [(value, mine)] if key == "weights" else [(value[s], mine[s]) for s in value]
            assert all(torch.equal(a, b) for a, b in pairs), (key, name)
    alone, alone_states = train_share(0, 1, lambda t: None, None)
    for name, value in alone.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
        statistic = alone_states[name]["statistic"]
        torch.testing.assert_close(states[name]["statistic"], statistic, rtol=1e-4, atol=1e-5)


def test_two_replicas_equal_one_process_and_talk_once_a_period() -> None:
    run_distributed(replica, 2)
