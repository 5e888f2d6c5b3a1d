"""Degrees are checked without any process; meshes on real ones."""

from __future__ import annotations

import pytest

from tests.distributed_harness import run_distributed
from titanforge.parallelisms import ParallelDims


@pytest.mark.parametrize(
    ("degrees", "world_size", "expected_shard"),
    [({}, 1, 1), ({}, 4, 4), ({"dp_replicate": 2}, 4, 2), ({"dp_replicate": 4, "dp_shard": 1}, 4, 1)],
)
def test_shard_degree_is_what_the_others_leave(degrees, world_size, expected_shard):
    assert ParallelDims(**degrees, world_size=world_size).dp_shard == expected_shard


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        ({"dp_replicate": 3}, 4, "data_parallel_replicate_degree = 3 does not divide the 4 ranks"),
        (
            {"dp_replicate": 2, "dp_shard": 4},
            4,
            "replicate_degree = 2 x .*shard_degree = 4 makes 8 ranks, but 4 ranks",
        ),
        ({"dp_shard": 0}, 1, "data_parallel_shard_degree = 0"),
        ({"dp_replicate": -1}, 1, "data_parallel_replicate_degree = -1"),
        ({"tp": 3}, 4, "tensor_parallel_degree = 3 does not divide the 4 ranks"),
        ({"pp": 2, "dp_shard": 2}, 2, "pipeline_parallel_degree = 2 makes 4 ranks, but 2"),
        ({"cp": 2, "dp_shard": 2}, 2, "context_parallel_degree = 2 makes 4 ranks, but 2"),
        (
            {"ep": 3},
            4,
            "expert_parallel_degree = 3 does not divide the number of ranks .*, 4 .* 1, 2, 4, or another",
        ),
        ({"ep": 2, "tp": 4}, 8, "expert_parallel_degree = 2 is no multiple of .*tensor_parallel_degree = 4"),
    ],
)
def test_impossible_degrees_name_their_key(degrees, world_size, message):
    with pytest.raises(ValueError, match=message):
        ParallelDims(**degrees, world_size=world_size)


def test_degrees_that_gave_an_axis_its_ranks_are_named():
    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2, world_size=16)
    names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
    replicate, shard, context, tensor = (f"parallelism.{name}_degree = 2" for name in names)
    assert dims.degrees_of("dp_replicate") == replicate
    assert dims.degrees_of("tp") == tensor
    assert dims.degrees_of("dp_shard") == f"{shard} x {context}"
    assert dims.degrees_of("replica") == f"{shard} x {context} x {tensor}"
    assert dims.degrees_of("world") == f"{replicate} x {shard} x {context} x {tensor}"
    assert dims.degrees_of("nobody") == ""


def test_unknown_axis_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"'dp_shrad'.*dp_shard"):
        ParallelDims(world_size=2).get_mesh("dp_shrad")


def _axes_on_four_ranks(rank: int, world_size: int) -> dict:
    dims = ParallelDims(dp_replicate=2, dp_shard=-1, world_size=world_size)
    dims.build_mesh("cpu")
    assert dims.get_optional_mesh("tp") is None and dims.get_group("cp") is None
    return {
        "data": dims.data_rank_and_size(),
        "shard": dims.get_mesh("dp_shard").mesh.tolist(),
        "replicate": dims.get_mesh("dp_replicate").mesh.tolist(),
        "loss": dims.get_mesh("loss").mesh.tolist(),
        "fsdp": dims.get_mesh("dp_shard_cp").mesh.tolist(),
        "describe": dims.describe(),
    }


def test_axes_of_replicas_that_shard():
    ranks = run_distributed(_axes_on_four_ranks, 4)
    assert [r["data"] for r in ranks] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [r["shard"] for r in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["replicate"] for r in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(r["loss"] == [0, 1, 2, 3] for r in ranks)
    assert [r["fsdp"] for r in ranks] == [r["shard"] for r in ranks]
    assert ranks[0]["describe"] == "4 ranks = dp_replicate 2 x dp_shard 2"
