"""Pipeline stages beside one process: each schedule, other axes with it, options, and checkpoints across.

Everything trains six steps of two accumulated batches, of which the stages make four micro-batches or more;
documents of very different lengths leave each of those another number of targets. Runs of as many ranks share
one launch; those of one rank need none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed_harness import run_distributed
from tests.parallelisms.pipelines import HIDDEN_BYTES, MICROBATCHES, run_schedules, run_with_shards
from tests.trainer.runs import column, distance, greatest_difference, lines, write_corpus
from tests.trainer.test_split_models import LAYOUTS, run
from titanforge.config import load_config
from titanforge.launch import run as run_here

STEPS, SAVED = 6, 3
BLOCKS = {"model__n_layers": 4}  # two stages on each of two ranks
SIZES = {"model__n_heads": 4, "model__n_kv_heads": 4, **BLOCKS}
FAMILIES = {  # not their debug models, which are tied
    "qwen3": {
        **SIZES, "model__name": "qwen3", "model__flavor": "8B", "model__hidden_dim": 64,
        "model__head_dim": 16, "model__vocab_size": 512,
    },
    "gpt2": {
        **BLOCKS, "model__name": "gpt2", "model__flavor": "modern-160M", "model__n_heads": 4,
        "model__n_kv_heads": None, "model__vocab_size": 512,
    },
}  # fmt: skip
EXPERTS = {
    **SIZES, "model__name": "qwen3", "model__flavor": "debugmodel_moe", "model__head_dim": 8,
    "model__hidden_dim": 24, "model__n_experts": 8, "model__n_experts_per_token": 2,
    # So strong that a stage without its own term, or with one of another size, would be seen in the losses.
    "model__moe_auxiliary_loss_coefficient": 0.3,
    "validation__enable": False,
}  # fmt: skip
TWO = [name for name, (ranks, axes) in LAYOUTS.items() if ranks == 2 and "pipeline" in axes]
FOUR = [
    name
    for name, (ranks, axes) in LAYOUTS.items()
    if ranks == 4 and "pipeline" in axes and "expert" not in axes
]
EIGHT = [name for name, (ranks, axes) in LAYOUTS.items() if ranks == 8 and "pipeline" in axes]
NAMED = {
    "parallelism__module_fqns_per_model_part": (
        '[["tok_embeddings"], ["layers.0", "layers.1", "layers.2", "layers.3", "norm", "output"]]'
    )
}
OPTIONS = {  # beside a pipeline: (keys, greatest difference of the losses from one process with the same)
    "recomputed": (
        {
            "activation_checkpoint__mode": "full",
            # The pattern's weight is on the first stage alone.
            "optimizer__param_groups": '[{pattern = "tok_embeddings", lr = 0.01}]',
        },
        1e-5,
    ),
    "compiled": (
        {
            "activation_checkpoint__mode": "selective",
            "compile__enable": True,
            "compile__backend": "aot_eager",
        },
        1e-5,
    ),
    "bfloat16": ({"training__mixed_precision_param": "bfloat16", "optimizer__name": "Muon"}, 2e-2),
}
LEAN = {"validation__enable": False, "checkpoint__enable": False, "training__steps": 3}
RESUMED = [("single", "tp2_pp2"), ("tp2_pp2", "fsdp4"), ("tp2_pp2", "single")]
EXPORT = {
    "training__steps": 2, "validation__enable": False, "checkpoint__last_save_model_only": True,
    "checkpoint__last_save_in_hf": True,
}  # fmt: skip


def arguments(tmp: Path, layout: str, name: str = "", **keys) -> list[str]:
    """Without a seed checkpoint: initial weights depend on names alone, so every layout draws the same."""
    keys = {
        "training__steps": STEPS,
        "checkpoint__interval": SAVED,
        "checkpoint__initial_load_path": None,
        "checkpoint__initial_load_model_only": None,
        "validation__freq": STEPS,
        "validation__sample_tokens": 3,
        "debug__seed": 7,
        **SIZES,
        **keys,
    }
    return run(tmp / name, tmp / "corpus.jsonl", "llama3", layout, **keys)


def resume(tmp: Path, source: str, layout: str) -> list[str]:
    """A run that starts in the middle of another, with its states and its place in the data."""
    saved = tmp / f"llama3_{source}/checkpoint/step-{SAVED}"
    keys = {"checkpoint__initial_load_path": saved, "checkpoint__initial_load_model_only": False}
    return arguments(tmp, layout, f"from_{source}", **keys, validation__enable=False)


def train_two(rank: int, world_size: int, runs: list[list[str]]) -> list:
    train_ranks(rank, world_size, runs)
    return run_schedules(world_size)


def train_four(rank: int, world_size: int, runs: list[list[str]]) -> list:
    train_ranks(rank, world_size, runs)
    return run_with_shards()


def train_ranks(rank: int, world_size: int, runs: list[list[str]]) -> None:
    for arguments in runs:
        assert run_here(load_config(arguments)) == 0, arguments


class Done(NamedTuple):
    """folder: of all runs; what changes more than the layout stands below its name. two, four: what the ranks
    counted, see tests/parallelisms/pipelines.py."""

    folder: Path
    two: list
    four: list


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Done:
    tmp = tmp_path_factory.mktemp("pipeline")
    write_corpus(tmp / "corpus.jsonl", documents=150)

    def others(layout: str) -> list[list[str]]:
        return [
            *(arguments(tmp, layout, name, **LEAN, **keys) for name, (keys, _) in OPTIONS.items()),
            *(
                arguments(tmp, layout, name, **keys, **(NAMED if layout == "pp2" and name == "gpt2" else {}))
                for name, keys in FAMILIES.items()
            ),
        ]

    train_ranks(
        0,
        1,
        [
            arguments(tmp, "single"),
            *others("single"),
            arguments(tmp, "single", "export", **EXPORT),
            # The balancing term is about a micro-batch, so one process takes those of the stages.
            arguments(tmp, "single", "experts", **EXPERTS, training__local_batch_size=1),
        ],
    )
    imported = {
        **EXPORT, "checkpoint__last_save_in_hf": False, "checkpoint__initial_load_in_hf": True,
        "checkpoint__initial_load_path": tmp / "export/llama3_single/checkpoint/export-step-2",
        "checkpoint__initial_load_model_only": True,
    }  # fmt: skip
    two = run_distributed(
        train_two,
        2,
        [
            *(arguments(tmp, layout) for layout in TWO),
            *others("pp2"),
            arguments(tmp, "pp2_zbv", "export", **EXPORT),
            arguments(tmp, "pp2_interleaved", "import", **imported),
            arguments(tmp, "pp2_interleaved", "experts", **EXPERTS),
        ],
        timeout=300,
    )
    LAYOUTS["fsdp4"] = (4, {})
    continued = [resume(tmp, *move) for move in RESUMED if LAYOUTS[move[1]][0] == 4]
    four = run_distributed(
        train_four,
        4,
        [
            *(arguments(tmp, layout) for layout in FOUR),
            *continued,
            arguments(tmp, "ep2_pp2", "experts", **EXPERTS),
        ],
        timeout=300,
    )
    train_ranks(0, 1, [resume(tmp, *move) for move in RESUMED if LAYOUTS[move[1]][0] == 1])
    return Done(tmp, two, four)


@pytest.fixture
def trained(done) -> Path:
    return done.folder


def assert_same_run(folder: Path, wanted: Path) -> None:
    assert greatest_difference(folder, wanted) < 1e-5, folder
    assert greatest_difference(folder, wanted, "grad_norm") < 1e-4, folder
    assert column(folder, "tokens_seen") == column(wanted, "tokens_seen")
    last = f"checkpoint/step-{STEPS}"
    assert distance(folder / last, wanted / last) < 1e-4, folder
    ours, theirs = ([line for line in lines(f) if "validation_loss" in line] for f in (folder, wanted))
    assert abs(ours[-1]["validation_loss"] - theirs[-1]["validation_loss"]) < 1e-5, folder
    assert ours[-1]["validation_tokens"] == theirs[-1]["validation_tokens"] > 0
    texts = [[line["text"] for line in lines(f, "samples.jsonl")] for f in (folder, wanted)]
    assert texts[0] == texts[1] and len(texts[0]) == 2


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_training_equals_one_process(trained, layout):
    losses = column(trained / "llama3_single", "loss")
    assert losses[-1] < losses[0] - 0.1, "it learns"
    assert_same_run(trained / f"llama3_{layout}", trained / "llama3_single")


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_and_stages_by_name(trained, name):
    """GPT-2's stages are named ones."""
    assert_same_run(trained / name / "llama3_pp2", trained / name / "llama3_single")


@pytest.mark.parametrize("layout", ["pp2_interleaved", "ep2_pp2"])
def test_experts_are_balanced_on_every_stage(trained, layout):
    folder, wanted = (trained / "experts" / f"llama3_{name}" for name in (layout, "single"))
    assert max(column(wanted, "router/max_load")) > 1.2, "the routing is uneven"
    for key in ("loss", "grad_norm", "router/max_load", "router/min_load", "router/imbalance"):
        assert greatest_difference(folder, wanted, key) < 1e-5, key
    last = f"checkpoint/step-{STEPS}"
    assert distance(folder / last, wanted / last) < 1e-4


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_a_pipeline_as_they_change_one_process(trained, name):
    folders = [trained / name / f"llama3_{layout}" for layout in ("pp2", "single")]
    assert greatest_difference(*folders) < OPTIONS[name][1]


def test_norm_and_communication_are_seen_on_the_logging_rank(trained):
    (line,) = [line for line in lines(trained / "llama3_pp2") if line.get("step") == STEPS and "loss" in line]
    assert line["grad_norm"] > 0.01
    # Two batches of four micro-batches, one hidden state [1, 64, 32] each, in float32.
    assert line["comm/pp/hidden states and gradients_count"] == STEPS * 2 * 4
    assert line["comm/pp/hidden states and gradients_bytes"] == STEPS * 2 * 4 * 64 * 32 * 4
    assert line["comm/pp/grad_norm_count"] == STEPS


@pytest.mark.parametrize(("source", "layout"), RESUMED)
def test_one_layout_goes_on_from_what_another_saved(trained, source, layout):
    wanted = column(trained / "llama3_single", "loss")[SAVED:]
    resumed = [line for line in lines(trained / f"from_{source}/llama3_{layout}") if "loss" in line]
    assert [line["step"] for line in resumed] == list(range(SAVED + 1, STEPS + 1))
    assert max(abs(line["loss"] - loss) for line, loss in zip(resumed, wanted, strict=True)) < 1e-5


def test_hugging_face_files_are_written_and_read_by_stages(trained):
    ours, theirs = (
        load_file(trained / f"export/llama3_{layout}/checkpoint/export-step-2/model.safetensors")
        for layout in ("pp2_zbv", "single")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5, msg=f"{name}: {{}}".format)
    first, started = (column(trained / f"{name}/llama3_{layout}", "loss") for name, layout in (
        ("import", "pp2_interleaved"), ("export", "single")
    ))  # fmt: skip
    assert first[0] < started[0] - 0.005, "it went on from there"


def test_each_rank_says_what_its_stages_hold(trained, capsys):
    config = load_config([*arguments(trained, "pp2_zbv", "dry"), "--job.dry_run=true"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        assert run_here(config) == 0
    told = capsys.readouterr().out
    assert "pp 2: 4 stages, schedule ZBVZeroBubble of 4 micro-batches of 1" in told
    assert "pipeline rank 0: stage 0: tok_embeddings, layer 0; stage 3: layer 3, norm, output" in told
    assert re.search(r"most memory on pipeline rank 0", told)


@pytest.mark.parametrize("layout", EIGHT)
def test_eight_ranks_along_three_axes_equal_one_process(trained, layout):
    lean = {"validation__enable": False, "checkpoint__enable": False}
    run_distributed(train_ranks, 8, [arguments(trained, layout, **lean)], timeout=240)
    for key in ("loss", "grad_norm"):
        difference = greatest_difference(trained / f"llama3_{layout}", trained / "llama3_single", key)
        assert difference < 1e-5, key


def test_each_schedule_gives_the_gradients_of_the_whole_and_sends_no_more_than_it_must(done):
    crossings = {  # of a stage on a rank with one elsewhere
        "GPipe": 1,
        "1F1B": 1,
        "Interleaved1F1B": 3,
        "InterleavedZeroBubble": 3,
        "ZBVZeroBubble": 2,  # stages 1 and 2 are on one rank
    }
    for found in done.two:
        assert [name for name, *_ in found] == list(crossings)
        for name, counts, recorded in found:
            sends = crossings[name] * MICROBATCHES
            assert counts == {"send": sends, "recv_": sends}, name
            assert recorded == [("pp", "hidden states and gradients", HIDDEN_BYTES)] * sends


def test_shards_of_a_stage_are_gathered_once_and_reduced_once_a_step(done):
    """Not once a micro-batch: that is what keeping a stage's weights and gradients whole buys."""
    for found in done.four:
        for name, counts, groups in found:
            sends = (1 if name == "1F1B" else 2) * MICROBATCHES
            assert counts.pop("send") == counts.pop("recv_") == sends
            assert counts == {"_allgather_base_": groups, "_reduce_scatter_base_": groups}, name
