"""Replicas: sums, accumulation, missing gradients, sharding beside replication, drift 0 (gate T1)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed_harness import run_distributed
from titanforge.config.sections import Optimizer
from titanforge.optim import build_optimizer
from titanforge.sync import CommLedger, EveryStep, Replication

BATCH, MICRO_BATCHES, STEPS = 8, 2, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.expert = nn.Linear(6, 6, bias=False)
        self.output = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor, with_expert: bool = True) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        if with_expert:
            hidden = hidden + self.expert(hidden)
        return self.output(hidden)


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 11, (BATCH, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: Tensor, **options: bool) -> Tensor:
    """Sum over the local tokens, divided by the tokens of the whole global batch."""
    logits = model(tokens[:, :-1], **options)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return losses / (BATCH * 4)


def train(model: nn.Module, policy: EveryStep, part: slice, micro_batches: int) -> None:
    optimizer = build_optimizer(model, Optimizer(lr=1e-2), "float32")
    for step in range(STEPS):
        optimizer.zero_grad()
        policy.begin_step(micro_batches)
        for index, tokens in enumerate(tokens_of(step)[part].chunk(micro_batches)):
            policy.before_backward(index)
            loss_of(model, tokens).backward()
        policy.reduce_gradients()
        optimizer.step(torch.tensor(1.0))


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def alone() -> dict[str, Tensor]:
    model, policy = Model(), EveryStep()
    policy.attach(model, None, CommLedger())
    train(model, policy, slice(None), 1)
    return full_weights(model)


def assert_no_drift(weights: dict[str, Tensor]) -> None:
    """Every rank holds the same bits."""
    for weight in weights.values():
        low, high = weight.clone(), weight.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        assert torch.equal(low, weight) and torch.equal(high, weight)


def replicas(rank: int, world_size: int, bucket_mib: float) -> dict:
    model, policy, ledger = Model(), EveryStep(bucket_mib), CommLedger()
    policy.attach(model, Replication(dist.group.WORLD), ledger)
    size = BATCH // world_size
    train(model, policy, slice(rank * size, (rank + 1) * size), MICRO_BATCHES)
    weights = full_weights(model)
    assert_no_drift(weights)
    policy.close()
    return {"weights": weights, "ledger": ledger.metrics()}


def scaled_model() -> nn.Module:
    """With a weight of one row, which leaves an empty shard; 11 rows leave uneven ones."""
    model = Model()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    model.forward = lambda tokens, inner=model.forward: inner(tokens) * model.scale  # pyright: ignore
    return model


def hybrid(rank: int, world_size: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = scaled_model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    for module in (*model.layers, model):
        module.set_gradient_divide_factor(1.0)  # pyright: ignore
        module.set_force_sum_reduction_for_comms(True)  # pyright: ignore
    policy = EveryStep(0.0002)
    policy.attach(model, Replication(mesh.get_group("dp_replicate")), CommLedger())
    size = BATCH // world_size
    train(model, policy, slice(rank * size, (rank + 1) * size), MICRO_BATCHES)
    weights = full_weights(model)
    assert_no_drift(weights)
    return weights


def uneven_use(rank: int, world_size: int) -> dict[str, Tensor]:
    """The expert sees no token on rank 1: same collectives, same gradients everywhere."""
    model, policy, ledger = Model(), EveryStep(0.0002), CommLedger()
    policy.attach(model, Replication(dist.group.WORLD), ledger)
    policy.begin_step(1)
    policy.before_backward(0)
    loss_of(model, tokens_of(rank), with_expert=rank == 0).backward()
    assert (model.expert.weight.grad is None) == (rank == 1)
    policy.reduce_gradients()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    assert_no_drift(gradients)
    return gradients


def overlap(rank: int, world_size: int) -> tuple[int, int, int]:
    model, policy, ledger = Model(), EveryStep(0.0002), CommLedger()
    policy.attach(model, Replication(dist.group.WORLD), ledger)
    policy.begin_step(2)
    policy.before_backward(0)
    loss_of(model, tokens_of(0)).backward()
    first = ledger.total().count
    policy.before_backward(1)
    loss_of(model, tokens_of(1)).backward()
    second = ledger.total().count
    policy.reduce_gradients()
    return first, second, ledger.total().count


def low_precision(rank: int, world_size: int) -> tuple[Tensor, torch.dtype]:
    layer = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    policy = EveryStep()
    policy.attach(layer, Replication(dist.group.WORLD), CommLedger())
    policy.begin_step(1)
    policy.before_backward(0)
    # 256 + 1 + 1 + 1: bf16 partial sums would lose every 1, the fp32 sum rounds once.
    layer(torch.full((1, 4), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)).sum().backward()
    policy.reduce_gradients()
    assert layer.weight.grad is not None
    return layer.weight.grad.float(), layer.weight.grad.dtype


def misuse(rank: int, world_size: int) -> None:
    model, policy = Model(), EveryStep(0.0002)
    policy.attach(model, Replication(dist.group.WORLD), CommLedger())
    policy.begin_step(1)
    policy.before_backward(0)
    loss_of(model, tokens_of(0)).backward()
    with pytest.raises(RuntimeError, match=r"gradient of 'output\.weight' grew after its bucket was reduced"):
        loss_of(model, tokens_of(0)).backward()
    policy.reduce_gradients()
    with pytest.raises(RuntimeError, match="begin_step must come before each step"):
        policy.reduce_gradients()


# Starting processes costs seconds and the checks milliseconds: one start per world size serves all of them.


def on_two_ranks(rank: int, world_size: int) -> dict:
    misuse(rank, world_size)
    return {
        "replicas": replicas(rank, world_size, 32.0),
        "small_buckets": replicas(rank, world_size, 0.0002),
        "uneven_use": uneven_use(rank, world_size),
        "overlap": overlap(rank, world_size),
    }


def on_four_ranks(rank: int, world_size: int) -> dict:
    return {
        "replicas": replicas(rank, world_size, 0.0002),
        "hybrid": hybrid(rank, world_size),
        "low_precision": low_precision(rank, world_size),
    }


@pytest.fixture(scope="module")
def two_ranks() -> dict:
    return run_distributed(on_two_ranks, 2)[0]


@pytest.fixture(scope="module")
def four_ranks() -> dict:
    return run_distributed(on_four_ranks, 4)[0]


@pytest.mark.parametrize(
    ("ranks", "run"), [("two_ranks", "replicas"), ("two_ranks", "small_buckets"), ("four_ranks", "replicas")]
)
def test_replicas_equal_one_process_and_never_drift(
    ranks: str, run: str, request: pytest.FixtureRequest
) -> None:
    result = request.getfixturevalue(ranks)[run]
    expected = alone()
    for name, weight in result["weights"].items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-6)
    elements = sum(p.numel() for p in Model().parameters())
    # One reduction a step, whatever the micro-batches, and every weight once in fp32.
    assert result["ledger"]["comm/dp_replicate/gradients_bytes"] == STEPS * 4 * elements
    count = result["ledger"]["comm/dp_replicate/gradients_count"]
    assert count == STEPS if (ranks, run) == ("two_ranks", "replicas") else count > STEPS


def test_hybrid_sharding_equals_one_process(four_ranks: dict) -> None:
    model = scaled_model()
    train(model, EveryStep(), slice(None), 1)
    for name, weight in full_weights(model).items():
        torch.testing.assert_close(four_ranks["hybrid"][name], weight, rtol=0, atol=2e-6)


def test_a_missing_gradient_counts_as_zero_and_hangs_nobody(two_ranks: dict) -> None:
    model = Model()
    loss_of(model, tokens_of(0)).backward()
    loss_of(model, tokens_of(1), with_expert=False).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(two_ranks["uneven_use"][name], param.grad, rtol=0, atol=1e-6)


def test_buckets_leave_during_the_last_backward_only(two_ranks: dict) -> None:
    first, second, last = two_ranks["overlap"]
    assert first == 0
    assert second == last > 1


def test_reduction_is_in_fp32(four_ranks: dict) -> None:
    gradient, dtype = four_ranks["low_precision"]
    assert dtype == torch.bfloat16
    assert torch.equal(gradient, torch.full((1, 4), 260.0))  # 259 rounds to 260


def test_one_replica_needs_no_group() -> None:
    model, policy, ledger = Model(), EveryStep(), CommLedger()
    policy.attach(model, None, ledger)
    policy.begin_step(1)
    policy.before_backward(0)
    loss_of(model, tokens_of(0)).backward()
    policy.reduce_gradients()
    assert ledger.total().count == 0
    assert all(param.grad is not None for param in model.parameters())
