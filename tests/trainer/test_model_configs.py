"""Job files of each family: they pass a dry run on the GPUs that they name, and train when cut down."""

from __future__ import annotations

import json
import math
import re

import pytest

from tests.distributed_harness import REPOSITORY
from titanforge.config import load_config, validate_config
from titanforge.dry_run import dry_run_report
from titanforge.trainer import Trainer

# Job file → ranks and GiB of the GPUs that its first lines name.
SIZED_FOR = {
    "debug_model_moe": (2, 2),
    "debug_model_moe_ep": (2, 2),
    "debug_model_pp": (2, 2),
    "llama3_70b_pp": (32, 80),
    "llama3_8b_forge": (1, 80),
    "llama3_8b_forge_int8": (1, 48),
    "qwen3_0.6b": (1, 80),
    "qwen3_1.7b": (1, 80),
    "qwen3_4b": (8, 80),
    "qwen3_8b": (8, 80),
    "qwen3_14b": (8, 80),
    "qwen3_32b": (16, 80),
    "qwen3_30b_a3b": (8, 141),
    "qwen3_30b_a3b_ep": (8, 141),
    "qwen3_235b_a22b": (64, 141),
    "qwen3_32b_forge": (1, 141),
    "qwen3_32b_forge_fp8": (1, 141),
    "qwen3_32b_forge_muon": (1, 141),
    "qwen3_30b_a3b_forge_muon": (1, 141),
    "gpt2_124m": (1, 24),
    "gpt2_124m_muon": (1, 24),
    "gpt2_124m_rmnp": (1, 24),
    "gpt2_124m_dion": (1, 24),
    "gpt2_124m_dobb": (1, 24),
    "gpt2_1.56b": (1, 80),
    "gpt2_8b": (8, 80),
    "gpt2_modern_160m": (1, 80),
    "gpt2_modern_1.3b": (1, 80),
}
# Share of a GPU that a file may take by its estimate; more where its peak was seen on such a card
# (docs/performance.md: 131.9 GiB of the 139.8 that an H200 has).
SHARE, SEEN = 0.92, {"qwen3_32b_forge": 0.94}
FOLDER = REPOSITORY / "train_configs"


def test_every_file_of_these_families_is_listed():
    stems = {
        path.stem
        for path in FOLDER.glob("*.toml")
        if re.match("qwen3|gpt2|debug_model_|.*(_pp$|_forge)", path.stem)
    }
    assert stems == set(SIZED_FOR)


@pytest.mark.parametrize("stem", SIZED_FOR)
def test_dry_run_fits_the_gpus_that_the_file_names(stem):
    ranks, gib = SIZED_FOR[stem]
    path = FOLDER / f"{stem}.toml"
    config = load_config(["--job.config_file", str(path)])
    assert validate_config(config, ranks, "cuda") == []
    report = dry_run_report(config, ranks, "cpu")
    (total,) = re.findall(r"total per rank\s+([\d.]+) GiB", report)
    assert float(total) < SEEN.get(stem, SHARE) * gib
    head = re.sub(r"\s*\n# ", " ", path.read_text())
    told = pools_told(path.read_text())
    assert len(told) >= 5 or "_forge" not in stem
    for pool, gib_told in told.items():
        (estimated,) = re.findall(rf"{pool}.*?\s+([\d.]+) GiB$", report, re.MULTILINE)
        # Of states the file may name two, each rounded.
        assert gib_told == pytest.approx(float(estimated), abs=0.11 if pool == "  states" else 0.06), pool
    if gib > 2:
        words = {1: "one", 8: "eight", 16: "sixteen", 32: "thirty-two", 64: "sixty-four"}
        assert re.search(rf"Sized for {words[ranks]} {gib} GiB GPU", head)


def test_kept_logits_are_estimated_where_they_are_kept():
    """2^19 tokens of 258 logits; a tied head's twice; none where the key has no effect, which is said."""

    def dry_run(*words):
        shape = ["--training.local_batch_size=256", "--training.seq_len=2048"]
        config = load_config(["--training.max_norm=0", "--model.flavor=debugmodel", *shape, *words])
        report = dry_run_report(config, 1, "cpu")
        return float(re.findall(r"activations\s+([\d.]+) GiB", report)[0]), report

    keep, two = "--forge.keep_logits=true", "--training.global_batch_size=512"
    fused = "--forge.enable=true"
    for words, times in (
        (["--model.name=llama3"], 1),
        (["--model.name=gpt2", "--model.n_positions=2048"], 2),
    ):
        (without, _), (kept, report) = dry_run(*words, fused), dry_run(*words, fused, keep)
        assert kept - without == pytest.approx(times * 2**19 * 258 * 2 / 2**30, abs=0.0011)
        assert "keep_logits" not in report
        kept, report = dry_run(*words, fused, two, keep)
        assert kept == dry_run(*words, fused, two)[0]
        assert "keep_logits = true has no effect: the head joins micro-batches by their tokens" in report
        assert dry_run(*words, keep)[0] == dry_run(*words)[0]


def pools_told(text):
    """GiB by the dry run's name of the pool, of the table that a file may have among its first lines."""
    names = {
        "weights,": "  weights", "m and v": "  states", "momentum": "  states", "AdamW's m and v": "  states",
        "gradients": "  gradients", "activations": "  activations", "Newton-Schulz": "  update",
        "estimated": "  total per rank",
    }  # fmt: skip
    told = {}
    for words, size in re.findall(r"^#   (\S.*?) {2,}([\d.]+)(?:$|  )", text, re.MULTILINE):
        (pool,) = {pool for start, pool in names.items() if words.startswith(start)}
        told[pool] = told.get(pool, 0) + float(size)
    return told


CUT = {
    "qwen3_0.6b": ["--model.dim=64", "--model.n_heads=2", "--model.n_kv_heads=1", "--model.head_dim=32"],
    "gpt2_124m": ["--model.dim=64", "--model.n_heads=4", "--model.n_positions=64"],
    "gpt2_modern_160m": ["--model.dim=64", "--model.n_heads=4"],
    "qwen3_30b_a3b": [
        *("--model.dim=64", "--model.n_heads=2", "--model.n_kv_heads=1", "--model.head_dim=32"),
        *("--model.n_experts=8", "--model.n_experts_per_token=2", "--model.moe_balancing=bias"),
    ],
}


@pytest.mark.parametrize("stem", CUT)
def test_trains_with_shapes_cut_down(stem, tmp_path):
    hidden = [] if stem.startswith("gpt2") else ["--model.hidden_dim=96"]
    config = load_config(
        [
            *("--job.config_file", str(FOLDER / f"{stem}.toml"), "--job.dump_folder", str(tmp_path)),
            *("--training.steps=8", "--training.seq_len=64", "--training.local_batch_size=4"),
            *("--training.dataloader.num_workers=0", "--compile.enable=false", "--metrics.log_freq=1"),
            *(
                "--model.n_layers=2",
                "--model.vocab_size=512",
                "--checkpoint.enable=false",
                "--data.num_streams=8",
            ),
            *(
                "--lr_scheduler.warmup_steps=2",
                "--optimizer.lr=3e-3",
                "--training.mixed_precision_param=float32",
            ),
            *hidden,
            *CUT[stem],
        ]
    )
    assert [line for line in validate_config(config, 1, "cpu") if "no effect" not in line] == []
    trainer = Trainer(config, "cpu")
    try:
        trainer.train()
    finally:
        trainer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.3 and all(map(math.isfinite, losses))
    # A tied head begins by repeating the token; how often that is wrong depends on this Python's own sources.
    assert losses[0] == pytest.approx(math.log(512), abs=2.2)
    if "b_a" in stem:
        assert all(1 <= line["router/max_load"] <= 4 and 0 <= line["router/min_load"] <= 1 for line in lines)
        assert all(0.5 < line["router/imbalance"] < 4 for line in lines)
    else:
        assert not any(key.startswith("router") for key in lines[0])
