"""Experts shared by ranks: the loss and gradients of whole layers, however uneven the routing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from tests.distributed_harness import run_distributed
from tests.parallelisms.test_tensor_parallel import assert_same_gradients, batch, build, fill
from titanforge.optim import build_rule
from titanforge.optim.states import new_auxiliary
from titanforge.parallelisms import (
    ParallelDims,
    apply_activation_checkpoint,
    apply_expert_parallel,
    apply_fsdp,
    clip_factor,
)
from titanforge.parallelisms.expert_parallel import Exchange

LAYERS, EXPERTS, CHOSEN = 2, 6, 2
BUSY = {  # the experts of 6 that get any token
    "as it comes": None,
    "one gets none": (0, 1, 2, 3, 5),
    "one rank gets none": (0, 2),
}


def restrict(model, busy) -> None:
    """Have the router choose among ``busy`` alone."""
    for block in model.layers.values():
        router = block.feed_forward.router
        bias = torch.zeros(EXPERTS)
        if busy is not None:
            bias -= 100.0
            bias[list(busy)] = 0.0
        router.register_buffer("expert_bias", bias)


def _split_equals_whole(rank: int, world_size: int, ep: int, busy: str, mode: str) -> dict[str, int]:
    dims = ParallelDims(ep=ep, world_size=world_size)
    dims.build_mesh("cpu")
    whole, split = build("qwen3_moe"), build("qwen3_moe")
    sent: list[tuple[str, str, int]] = []
    assert apply_expert_parallel(split, dims.get_mesh("ep"), lambda *told: sent.append(told)) == LAYERS
    apply_activation_checkpoint(split, mode)
    apply_fsdp(
        split,
        dims.get_mesh("dp_shard_cp"),
        torch.float32,
        expert_mesh=dims.get_mesh("dp_shard_mod_ep"),
    )
    for model in (whole, split):
        fill(model)
        restrict(model, BUSY[busy])
    held = split.layers["0"].feed_forward.experts.w1
    assert held.to_local().numel() * world_size == held.numel()
    rows = 4 // world_size
    shares = [[each[r * rows : (r + 1) * rows] for each in batch()] for r in range(world_size)]
    for _ in range(2):  # two micro-batches: gradients add up
        losses = [whole(*share) for share in shares]
        torch.stack(losses).sum().backward()
        with CommDebugMode() as communication:
            loss = split(*shares[rank])
            loss.backward()
        torch.testing.assert_close(loss, losses[rank], rtol=2e-6, atol=1e-5)
    assert_same_gradients(split, whole)
    for experts in (block.feed_forward.experts for block in whole.layers.values()):
        idle = {e for e in range(EXPERTS) if not experts.w2.grad[e].any()}
        assert BUSY[busy] is None or idle == set(range(EXPERTS)) - set(BUSY[busy])
    norm, _ = clip_factor(split.parameters(), 1.0)
    torch.testing.assert_close(norm, clip_factor(whole.parameters(), 1.0)[0], rtol=1e-5, atol=1e-5)
    # The record agrees with what was issued.
    counts = {str(op).rpartition(".")[2]: n for op, n in communication.get_comm_counts().items()}
    assert len(sent) == 2 * counts["alltoall_base_"]
    assert sum(size for _, what, size in sent if what == "token counts") == 8 * EXPERTS * sum(
        what == "token counts" for _, what, _ in sent
    )
    return counts


CASES = {  # by ranks; on four, a rank's 3 experts are in shares of rows
    2: [(busy, "selective") for busy in BUSY] + [("one rank gets none", mode) for mode in ("none", "full")],
    4: [("as it comes", "selective")],
}


def _all_cases(rank: int, world_size: int) -> None:
    for busy, mode in CASES[world_size]:
        try:
            counts = _split_equals_whole(rank, world_size, 2, busy, mode)
        except Exception as error:
            raise AssertionError((busy, mode)) from error
        # Counts, rows there, rows back, which recomputing a block repeats; backward: rows there and back.
        exchanges = {"none": 5, "selective": 5, "full": 8}[mode]
        assert counts["alltoall_base_"] == exchanges * LAYERS, (mode, counts)
    (_exchange if world_size == 2 else _states_follow_experts)(rank, world_size)


@pytest.mark.parametrize("ranks", CASES)
def test_shared_experts_equal_whole_ones(ranks):
    run_distributed(_all_cases, ranks)


def _states_follow_experts(rank: int, world_size: int) -> None:
    """A factor of Dion per expert is on the rank that has the expert, also where two axes cut the experts."""
    dims = ParallelDims(ep=2, world_size=world_size)
    dims.build_mesh("cpu")
    whole = nn.Parameter(torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(0)))
    experts = nn.Module()
    experts.w1 = nn.Parameter(whole.detach().clone())
    experts.grouped_weights = ("w1",)
    apply_expert_parallel(experts, dims.get_mesh("ep"))
    fully_shard(experts, mesh=dims.get_mesh("dp_shard_mod_ep"))
    rule = build_rule("dion")
    wanted = new_auxiliary(rule, "w1", whole, 1)["q"]
    mine = new_auxiliary(rule, "w1", experts.w1, 1)["q"]
    (first,) = [e for e in range(8) if torch.equal(whole[e], experts.w1.to_local()[0])]
    assert torch.equal(mine.to_local(), wanted[first : first + 2])
    assert torch.equal(mine.full_tensor(), wanted)


def _exchange(rank: int, world_size: int) -> None:
    exchange = Exchange(init_device_mesh("cpu", (world_size,)).get_group())
    experts = 2 * world_size
    # Rank r sends r rows to expert 0, e rows to every other expert e: rank 0 of two has nothing for expert 0.
    counts = [[sender if e == 0 else e for e in range(experts)] for sender in range(world_size)]
    mine = counts[rank]
    ends = torch.tensor(mine).cumsum(0).to(torch.int32)
    rows = torch.tensor([[100.0 * rank + e] for e in range(experts) for _ in range(mine[e])])
    rows.requires_grad_()
    deal = exchange.deal(ends)
    own = range(2 * rank, 2 * rank + 2)
    wanted = [
        [100.0 * sender + e] for e in own for sender in range(world_size) for _ in range(counts[sender][e])
    ]
    received = exchange.send(rows, deal)
    assert received.tolist() == wanted
    assert (
        deal.ends_e.tolist()
        == torch.tensor([sum(counts[s][e] for s in range(world_size)) for e in own]).cumsum(0).tolist()
    )
    returned = exchange.give_back(received * 3, deal)
    assert torch.equal(returned, rows * 3)
    (gradient,) = torch.autograd.grad(returned, rows, torch.arange(len(rows))[:, None].float())
    assert gradient.flatten().tolist() == [3.0 * i for i in range(len(rows))]
    # No row at all, from or to anyone.
    empty = exchange.deal(torch.zeros(experts, dtype=torch.int32))
    assert exchange.give_back(exchange.send(torch.empty(0, 1), empty), empty).shape == (0, 1)
