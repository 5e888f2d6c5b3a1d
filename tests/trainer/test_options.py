"""Switches that change how a step is computed, not what: recomputation, compilation, determinism."""

from __future__ import annotations

import torch

from tests.trainer.runs import (
    argv,
    assert_same_checkpoint,
    column,
    greatest_difference,
    train_all,
    write_corpus,
)


def test_recomputation_compilation_and_determinism_give_the_same_run(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    variants = {
        "none": {},
        "op": {"activation_checkpoint__mode": "selective"},
        "every_second": {
            "activation_checkpoint__mode": "selective",
            "activation_checkpoint__selective_ac_option": "2",
        },
        "full": {"activation_checkpoint__mode": "full"},
        "compiled": {"compile__enable": True, "compile__backend": "aot_eager"},
        "compiled_full": {
            "compile__enable": True,
            "compile__backend": "aot_eager",
            "compile__components": ["model"],
            "activation_checkpoint__mode": "full",
        },
        "again": {},
        "bfloat16": {"training__mixed_precision_param": "bfloat16"},
        "deterministic": {"debug__deterministic": True},  # last: it stays on for the process
        "deterministic_again": {"debug__deterministic": True},
    }
    runs = [
        argv(
            tmp_path / name,
            corpus,
            training__steps=8,
            training__global_batch_size=4,
            checkpoint__enable=True,
            **more,
        )
        for name, more in variants.items()
    ]
    train_all(1, runs)
    wanted = tmp_path / "none"
    for name in ("op", "every_second", "full", "again"):
        assert column(tmp_path / name, "loss") == column(wanted, "loss"), name
        assert column(tmp_path / name, "grad_norm") == column(wanted, "grad_norm"), name
        assert_same_checkpoint(tmp_path / name / "checkpoint/step-8", wanted / "checkpoint/step-8")
    for name in ("compiled", "compiled_full", "deterministic"):
        assert greatest_difference(tmp_path / name, wanted) < 1e-5, name
    assert column(tmp_path / "deterministic", "loss") == column(tmp_path / "deterministic_again", "loss")
    assert 0 < greatest_difference(tmp_path / "bfloat16", wanted) < 0.05
    assert not torch.are_deterministic_algorithms_enabled(), "the runs had processes of their own"
