"""The global norm against torch's own, on plain tensors and over uneven and empty shards."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from tests.distributed_harness import run_distributed
from titanforge.parallelisms import clip_factor, clip_grad_norm_, global_grad_norm


def _parameters(dtype=torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((5, 3), (7,), (), (0, 4))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    parameters.append(torch.nn.Parameter(torch.zeros(2)))  # no gradient
    return parameters


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_in_place_clipping_equals_torch(max_norm):
    ours, theirs = _parameters(), _parameters()
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    norm = clip_grad_norm_((p for p in ours), max_norm)
    torch.testing.assert_close(norm, expected)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.grad, q.grad)
    assert max_norm > 1 or not torch.equal(ours[0].grad, _parameters()[0].grad)


def test_low_precision_gradients_are_summed_in_fp32():
    parameter = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    parameter.grad = torch.full((10_000,), 0.01, dtype=torch.bfloat16)
    exact = parameter.grad.double().norm()
    assert abs(global_grad_norm(parameter).double() - exact) / exact < 1e-5


def test_no_gradient_at_all_and_no_clipping():
    norm, factor = clip_factor([torch.nn.Parameter(torch.zeros(2))], 1.0)
    assert norm == 0 and factor == 1
    norm, factor = clip_factor(_parameters(), 0.0)
    assert norm > 1 and factor == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nonfinite_norm_gives_factor_zero_and_spoils_no_finite_entry(bad):
    parameters = _parameters()
    parameters[0].grad[0, 0] = bad
    norm, factor = clip_factor(parameters, 1.0)
    assert not torch.isfinite(norm) and factor == 0
    clip_grad_norm_(parameters, 1.0)
    assert torch.equal(parameters[1].grad, torch.zeros(7))


def _norm_over_shards(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    gradients = [torch.randn(3, 5), torch.randn(1, 4), torch.randn(6, 6), torch.randn(4)]
    placements = [
        (mesh["dp_shard"], (Shard(0),)),  # uneven: 2 rows and 1
        (mesh["dp_shard"], (Shard(0),)),  # empty on the second shard
        (mesh, (Shard(0), Shard(1))),  # two axes
        (mesh, (Replicate(), Shard(0))),  # counted once, not per replica
    ]
    parameters = []
    for gradient, (submesh, place) in zip(gradients, placements):
        parameter = torch.nn.Parameter(distribute_tensor(torch.zeros_like(gradient), submesh, list(place)))
        parameter.grad = distribute_tensor(gradient, submesh, list(place))
        parameters.append(parameter)
    plain = torch.nn.Parameter(torch.zeros(3))
    plain.grad = torch.tensor([1.0, 2.0, 3.0])
    expected = torch.cat([g.flatten() for g in [*gradients, plain.grad]]).norm()
    calls = []

    def counted(tensor, group):
        calls.append(group.size())
        torch.distributed.all_reduce(tensor, group=group)

    norm = global_grad_norm([plain, *parameters], all_reduce=counted)
    torch.testing.assert_close(norm, expected)
    assert len(calls) == 4, "one per axis of each kind of sharding, never one per parameter"

    # An expert that no token reached on one rank: ranks must still meet in the same collectives.
    if rank == 0:
        parameters[0].grad = None
    assert torch.isfinite(global_grad_norm([plain, *parameters]))

    stage = torch.nn.Parameter(torch.zeros(2))
    stage.grad = torch.full((2,), float(rank))
    pipeline = torch.distributed.new_group([0, 1, 2, 3])
    total = global_grad_norm(stage, groups=[pipeline])
    torch.testing.assert_close(total, torch.tensor(2 * (1 + 4 + 9.0)).sqrt())

    unreduced = torch.nn.Parameter(distribute_tensor(torch.zeros(2), mesh["dp_shard"], [Replicate()]))
    unreduced.grad = torch.distributed.tensor.DTensor.from_local(torch.ones(2), mesh["dp_shard"], [Partial()])
    with pytest.raises(ValueError, match="partial"):
        global_grad_norm(unreduced)


def test_norm_over_uneven_empty_and_two_axis_shards():
    run_distributed(_norm_over_shards, 4)
