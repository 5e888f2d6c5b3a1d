"""Degrees that cannot be: one line that names the key, before any process group; dry runs of good ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.trainer.runs import argv, write_corpus
from train import main

QWEN_MOE = {
    "model__name": "qwen3", "model__flavor": "debugmodel_moe", "model__n_heads": 4, "model__n_kv_heads": 4,
    "model__head_dim": 16, "model__n_experts": 4, "model__n_experts_per_token": 2,
}  # fmt: skip
BATCH = {"training__local_batch_size": 4}
PIPELINE = {"parallelism__pipeline_parallel_degree": 2, **BATCH}
ZERO_BUBBLE = {**PIPELINE, "model__n_layers": 4, "parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"}
REPLICAS = {"parallelism__data_parallel_replicate_degree": 4}
AT_RANDOM = {"training__dtype": "bfloat16", "optimizer__master_weights": "stochastic_rounding"}
MISTAKES = [  # what is set; what the line says
    ({"parallelism__tensor_parallel_degree": 3}, "tensor_parallel_degree = 3: does not divide the number"),
    (
        {"parallelism__tensor_parallel_degree": 2, "parallelism__data_parallel_shard_degree": 4},
        "data_parallel_shard_degree = 4: times tensor_parallel_degree = 2 makes 8 ranks, but 4",
    ),
    ({"parallelism__tensor_parallel_degree": 4, "model__n_heads": 4}, "does not divide model.n_kv_heads = 1"),
    ({"parallelism__tensor_parallel_degree": 4}, "does not divide model.n_heads = 2: use one of 1, 2"),
    (
        {"parallelism__tensor_parallel_degree": 2, **QWEN_MOE},
        "expert_parallel_degree = 1: with parallelism.tensor_parallel_degree = 2",
    ),
    ({"parallelism__expert_parallel_degree": 2}, "expert_parallel_degree = 2: this model has no experts"),
    (
        {"parallelism__expert_parallel_degree": 3, **QWEN_MOE},
        "expert_parallel_degree = 3 does not divide the number of ranks of a replica, 4",
    ),
    (
        {"parallelism__expert_parallel_degree": 4, **QWEN_MOE, "model__n_experts": 6},
        "expert_parallel_degree = 4 does not divide model.n_experts = 6: use one of 1, 2, 3",
    ),
    (
        {"parallelism__expert_parallel_degree": 2, **QWEN_MOE, "model__n_experts": 6, "model__hidden_dim": 9},
        "leaves 3 of 6 experts to each 2 ranks, which divide neither them nor the widths 32 and 9",
    ),
    (
        {
            "parallelism__expert_parallel_degree": 2,
            "training__enable_cpu_offload": True,
            **QWEN_MOE,
        },
        "training.enable_cpu_offload = true: is not available with parallelism.expert_parallel_degree",
    ),
    (
        {"parallelism__context_parallel_degree": 4, "parallelism__context_parallel_method": "ulysses"},
        "context_parallel_degree = 4 does not divide the 2 query heads of a rank",
    ),
    (
        {"parallelism__context_parallel_degree": 4, "training__seq_len": 60},
        "training.seq_len = 60: must be a multiple of 8",
    ),
    (
        {
            "parallelism__tensor_parallel_degree": 2,
            "optimizer__name": "Dobb",
            "optimizer__dobb__blocks": 2,
        },
        "optimizer.dobb.blocks = 2: blocks of 'layers.0.attention.wo.weight', 32 x 32, are 16 wide and would"
        " not lie within one of 4 shards of 8: take a multiple of 4",
    ),
    (
        {
            "parallelism__expert_parallel_degree": 2,
            **QWEN_MOE,
            "model__n_experts": 6,
            "optimizer__name": "Dobb",
        },
        "leaves rows of 3 experts to each 2 ranks, and Dobb takes experts whole",
    ),
    (
        {"parallelism__expert_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2}
        | {**QWEN_MOE, "optimizer__name": "Dobb"},
        "is not available with parallelism.expert_parallel_degree above 1 beside tensor_parallel_degree",
    ),
    ({"parallelism__tensor_parallel_degree": 2, "optimizer__name": "LAMB"}, 'optimizer.name = "LAMB"'),
    (
        {"parallelism__pipeline_parallel_degree": 3},
        "pipeline_parallel_degree = 3: does not divide the number",
    ),
    ({"parallelism__pipeline_parallel_degree": 4, **BATCH}, "makes 4 stages, but the model has 2 layers"),
    (
        {**PIPELINE, "parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"},
        "makes 4 stages, but the model has 2 layers",
    ),
    ({**PIPELINE, "training__local_batch_size": 1}, "makes 1 micro-batches, fewer than"),
    (
        {**PIPELINE, "parallelism__pipeline_parallel_microbatch_size": 3},
        "does not divide training.local_batch",
    ),
    ({**PIPELINE, "parallelism__pipeline_parallel_schedule": "2F2B"}, "must be one of GPipe, 1F1B"),
    ({**PIPELINE, "parallelism__module_fqns_per_model_part": '[["norm"], ["output"]]'}, "is in no stage"),
    ({**PIPELINE, "model__name": "gpt2", "model__n_kv_heads": None}, "tied weights"),
    (
        {**ZERO_BUBBLE, **QWEN_MOE},
        "experts (model.n_experts = 4) form gradients of inputs and weights together",
    ),
    ({**PIPELINE, "forge__enable": True}, "forge.enable = true: is not available with parallelism.pipeline"),
    (
        {**ZERO_BUBBLE, "forge__enable": True},
        'schedule "ZBVZeroBubble" runs a custom backward twice',
    ),
    ({**ZERO_BUBBLE, "compile__enable": True}, "compile.enable = true: schedule"),
    ({**ZERO_BUBBLE, "parallelism__fsdp_reshard_after_forward": "always"}, "weights must still be there"),
    ({"optimizer__state_dtype": "fp8"}, 'optimizer.state_dtype = "fp8": has one scale per weight'),
    (
        {"optimizer__name": "Muon", **AT_RANDOM},
        'optimizer.master_weights = "stochastic_rounding": is not available where ranks send the updates',
    ),
    (
        {"optimizer__state_dtype": "int8", "optimizer__name": "Muon"},
        'optimizer.state_dtype = "int8": is not available for the momenta of muon where ranks hold parts',
    ),
    (
        {"optimizer__state_dtype": "int8", "optimizer__name": "Adafactor", **REPLICAS},
        "optimizer.state_dtype = 'int8' is for rules whose state update is elementwise, not for adafactor",
    ),
    (
        {"optimizer__name": "RMNP", **AT_RANDOM, **REPLICAS},
        "is for elementwise rules, and for Muon and Scion without Nesterov, not for rmnp",
    ),
    (
        {"optimizer__name": "LAMB"},
        "optimizer.name = 'lamb' reads whole layers, but 'tok_embeddings.weight' is",
    ),
    (
        {"optimizer__name": "Muon", "optimizer__scalar__name": "LAMB"},
        "optimizer.scalar.name = 'lamb' reads whole layers, but 'tok_embeddings.weight' is sharded",
    ),
    (
        {"sync__policy": "rmmc", "optimizer__name": "SGD", "optimizer__momentum": 0, **REPLICAS},
        'sync.policy = "rmmc" watches the momentum, and no weight has one with optimizer.name = "SGD"',
    ),
    ({**PIPELINE, "sync__policy": "rmmc"}, 'sync.policy = "rmmc": is not available with'),
]


@pytest.fixture
def four_ranks(monkeypatch):
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("keys", "says"), MISTAKES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_bad_mesh_is_one_line(tmp_path, four_ranks, capsys, keys, says):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    model = {} if "model__n_experts" in keys else {"model__n_kv_heads": 1}
    code = main(argv(tmp_path / "run", corpus, **{**model, **keys}))
    told = capsys.readouterr()
    errors = [line for line in told.err.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1 and errors[0].startswith("error: ") and says in errors[0], told.err
    assert code == 2 and not dist.is_initialized() and not (tmp_path / "run").exists()


def test_no_ranks_at_all_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "0")
    assert main(argv(tmp_path / "run", write_corpus(tmp_path / "corpus.jsonl"))) == 2
    assert "error: WORLD_SIZE = 0: torchrun sets it" in capsys.readouterr().err


def test_the_dry_run_says_what_each_axis_splits_and_what_a_rank_holds(tmp_path, monkeypatch, capsys):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    sizes = {"model__n_heads": 4, "model__n_kv_heads": 2, "model__dim": 512, "model__n_layers": 8}

    def weights(ranks: int, **degrees) -> tuple[float, str]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        assert main(argv(tmp_path / "run", corpus, job__dry_run=True, **sizes, **degrees)) == 0
        told = capsys.readouterr().out
        (line,) = [line for line in told.splitlines() if line.strip().startswith("weights ")]
        return float(line.split()[1]), told

    whole, _ = weights(1)
    tensor, told = weights(2, parallelism__tensor_parallel_degree=2)
    assert "tp 2: 2 query and 1 key/value heads" in told and "32 tokens of a sequence between blocks" in told
    assert tensor == pytest.approx(whole / 2, abs=0.002)
    degrees = {"parallelism__tensor_parallel_degree": 2, "parallelism__context_parallel_degree": 2}
    all_axes, told = weights(16, parallelism__data_parallel_replicate_degree=2, **degrees)
    assert "16 ranks = dp_replicate 2 x dp_shard 2 x cp 2 x tp 2" in told
    for line in (
        "dp_replicate 2: whole replicas",
        "dp_shard x cp 4: 1/4 of each",
        "cp 2: 32 of the 64 tokens",
    ):
        assert line in told
    assert all_axes == pytest.approx(whole / 8, abs=0.002)

    sizes |= {**QWEN_MOE, "model__n_experts": 8, "model__hidden_dim": 512, "model__n_kv_heads": 2}
    whole, _ = weights(1)
    degrees = {"parallelism__tensor_parallel_degree": 2, "parallelism__expert_parallel_degree": 4}
    experts, told = weights(8, **degrees)
    assert "8 ranks = dp_shard 4 x tp 2, experts over ep 4" in told
    assert "ep 4: 2 of the 8 experts of a block a rank, 1/2 of them between steps" in told
    assert experts == pytest.approx(whole / 8, abs=0.003)
    assert not dist.is_initialized()


def test_the_dry_run_counts_factors_of_whole_experts(tmp_path, monkeypatch, capsys):
    """Experts are dealt whole, so that replicas average their factors where other weights are sharded."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    dion = {"optimizer__name": "dion", "optimizer__dion__rank_fraction": 0.25, "sync__reduce": "states"}

    def lines(ranks: int, **more: Any) -> list[str]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        replicas = {"parallelism__data_parallel_replicate_degree": 2, "training__global_batch_size": None}
        arguments = {**QWEN_MOE, **dion, **replicas, "model__n_layers": 2, "model__hidden_dim": 16, **more}
        assert main(argv(tmp_path / "run", corpus, job__dry_run=True, **arguments)) == 0
        told = capsys.readouterr().out.splitlines()
        return [line.strip() for line in told if "values of factors" in line]

    def factors(ranks: int, **more: Any) -> int:
        told = lines(ranks, **more)
        return int(told[0].split()[2].replace(",", "")) if told and "densely" not in told[0] else 0

    experts = 2 * 4 * 3 * 4 * (16 + 32)  # layers, experts, matrices; rank 4 of 16 x 32
    assert factors(2) > experts
    assert factors(4) == factors(4, parallelism__expert_parallel_degree=2) == experts
    assert factors(6) == 0  # three ranks hold rows of each
    whole, needs = factors(2), "sync.low_rank needs weights that are whole within a replica, and "
    assert len(lines(2)) == 1, "nothing is averaged densely"
    shards = "parallelism.data_parallel_shard_degree"
    assert lines(4)[1:] == [
        f"replicas average the other momenta densely, not by {whole - experts:,} values of factors: {needs}"
        f"{shards} = 2 cuts them"
    ]
    assert lines(6) == [
        f"replicas average momenta densely, not by {whole:,} values of factors: {needs}{shards} = 3 cuts them"
    ]
    tensor = {"parallelism__tensor_parallel_degree": 2, "parallelism__expert_parallel_degree": 2}
    (_, told) = lines(8, **tensor, model__n_kv_heads=2)
    assert f"{shards} = 2 x parallelism.tensor_parallel_degree = 2 cuts them" in told
    assert lines(6, sync__low_rank="false") == lines(6, optimizer__dion__rank_fraction=1.0) == []
    assert factors(4, sync__reduce="gradients") == 0
    # Where these are all that would go as codes, a run without any is refused.
    codes = {"optimizer__scalar__name": "sgd", "sync__exchange_dtype": "int4"}
    assert factors(4, **codes) == experts
    with pytest.raises(AssertionError):
        factors(6, **codes)
    assert 'sync.exchange_dtype = "int4": ' in capsys.readouterr().err
