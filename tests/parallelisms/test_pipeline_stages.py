"""Where models are cut, and what cannot be cut: names and numbers alone."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from titanforge.parallelisms.pipeline_stages import (
    SCHEDULES,
    balance,
    check_pipeline_parallel,
    plan_pipeline,
    show_modules,
)

SIZES = {"batch_size": 8}


def layers(plan) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in plan.stages]


def test_every_module_is_in_one_stage_in_order():
    plan = plan_pipeline(2, "interleaved1f1b", 6, **SIZES)
    assert [name for stage in plan.stages for name in stage] == [
        "tok_embeddings", *(f"layers.{layer}" for layer in range(6)), "norm", "output",
    ]  # fmt: skip
    assert layers(plan) == [1, 2, 2, 1] and plan.kind.name == "Interleaved1F1B"
    assert [plan.stages_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert plan.lines() == [
        "pipeline rank 0: stage 0: tok_embeddings, layer 0; stage 2: layers 3-4",
        "pipeline rank 1: stage 1: layers 1-2; stage 3: layer 5, norm, output",
    ]
    assert show_modules(["norm", "output"]) == "norm, output"


@pytest.mark.parametrize(
    ("n_layers", "stages", "embedding", "head", "expected"),
    [
        (8, 2, 0.0, 0.0, [4, 4]),
        (32, 4, 1.0, 1.0, [7, 8, 9, 8]),
        (32, 4, 2.4, 2.4, [7, 9, 9, 7]),  # llama3 8B
        (28, 4, 10.0, 10.0, [2, 12, 12, 2]),  # a large vocabulary before small blocks
        (4, 4, 5.0, 5.0, [1, 1, 1, 1]),
    ],
)
def test_blocks_are_dealt_so_that_the_fullest_stage_is_as_light_as_can_be(
    n_layers, stages, embedding, head, expected
):
    counts = balance(n_layers, stages, embedding, head)
    assert counts == expected and sum(counts) == n_layers
    load = [count + embedding * (i == 0) + head * (i == stages - 1) for i, count in enumerate(counts)]
    # No block can move from the fullest stage to another and leave the greatest load smaller.
    fullest = max(range(stages), key=load.__getitem__)
    assert counts[fullest] == 1 or all(load[i] + 1 >= load[fullest] for i in range(stages) if i != fullest)


@pytest.mark.parametrize("kind", SCHEDULES, ids=lambda kind: kind.name)
def test_stages_lie_where_the_schedules_of_torch_look_for_them(kind):
    plan = plan_pipeline(4, kind.name, 16, **SIZES)
    style = "v" if kind.v_shaped else "loop"
    mapping = generate_stage_to_rank_mapping(4, len(plan.stages), style)
    assert mapping == {stage: plan.rank_of(stage) for stage in range(len(plan.stages))}
    crossings = sum(mapping[stage] != mapping[stage + 1] for stage in range(len(plan.stages) - 1))
    assert sum(plan.transfers(rank) for rank in range(4)) == 2 * crossings


def test_named_stages_and_layers_per_stage():
    named = [["tok_embeddings", "pos_embeddings"], ["layers.0", "layers.1"], ["norm", "output"]]
    plan = plan_pipeline(3, "1F1B", 2, named=named, **SIZES)
    assert plan.stages == (("tok_embeddings",), ("layers.0", "layers.1"), ("norm", "output"))
    plan = plan_pipeline(2, "Interleaved1F1B", 10, layers_per_stage=2, **SIZES)
    assert len(plan.stages) == 6, "embedding and head count as a block each"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schedule": "2F2B"}, 'schedule = "2F2B": must be one of GPipe, 1F1B'),
        ({"n_layers": 1}, "makes 2 stages, but the model has 1 layers"),
        ({"schedule": "ZBVZeroBubble", "n_layers": 3}, "makes 4 stages, but the model has 3 layers"),
        ({"batch_size": 1}, "makes 1 micro-batches, fewer than parallelism.pipeline_parallel_degree = 2"),
        ({"microbatch_size": 3}, "microbatch_size = 3 does not divide training.local_batch_size = 8"),
        ({"ranks": 3, "schedule": "Interleaved1F1B", "n_layers": 6, "batch_size": 7}, "deals in 2 rounds"),
        ({"layers_per_stage": 2}, "layers_per_stage = 2 makes 3 stages, but .* takes one on each"),
        ({"schedule": "ZBVZeroBubble", "layers_per_stage": 1}, "takes two on each"),
        ({"schedule": "Interleaved1F1B", "layers_per_stage": 3}, "takes two or more on each"),
        ({"named": [["tok_embeddings"], ["layers.0"]]}, r"layers\.1 is in no stage"),
        ({"named": [["tok_embeddings"], ["layers.9"]]}, r'"layers.9" is no module \(the model has fewer'),
        ({"named": [["tok_embeddings", "layers.1"], ["layers.0", "layers.2"]]}, "layers.3 is in no stage"),
        (
            {
                "named": [
                    ["layers.0", "tok_embeddings"],
                    ["layers.1", "layers.2", "layers.3", "norm", "output"],
                ]
            },
            "layers.0 stands out of order or twice",
        ),
        (
            {"named": [["tok_embeddings", *(f"layers.{i}" for i in range(4)), "norm"], ["output"]]},
            "norm and output belong into the last",
        ),
        ({"named": [["tok_embeddings"], ["layers.0"], ["norm"]]}, "names 3 stages, but .* takes one on each"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_key(changes, says):
    arguments = {"ranks": 2, "schedule": "1F1B", "n_layers": 4, **SIZES, **changes}
    with pytest.raises(ValueError, match=says) as error:
        plan_pipeline(
            arguments.pop("ranks"), arguments.pop("schedule"), arguments.pop("n_layers"), **arguments
        )
    assert "parallelism." in str(error.value) and "\n" not in str(error.value)


def test_tied_weights_and_experts_whose_backward_would_be_split_are_refused():
    check_pipeline_parallel(1, "ZBVZeroBubble", tied=True, n_experts=8)
    check_pipeline_parallel(2, "1F1B", tied=False, n_experts=8)
    with pytest.raises(ValueError, match=r"tied weights"):
        check_pipeline_parallel(2, "1F1B", tied=True)
    with pytest.raises(ValueError, match=r"model\.n_experts = 8"):
        check_pipeline_parallel(2, "ZBVZeroBubble", tied=False, n_experts=8)
