"""What a model's call is told of documents, as `data.document_mask` says."""

from __future__ import annotations

import pytest

from tests.trainer.runs import argv, write_corpus
from titanforge.config import load_config
from titanforge.trainer import Trainer


@pytest.mark.parametrize("masked", [True, False])
def test_without_document_mask_a_call_has_no_document_ids(tmp_path, masked):
    """Equal ids mask nothing, and yet any mask keeps attention from the plain causal kernels."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    settings = {
        "training__steps": 1,
        "validation__enable": True,
        "validation__freq": 1,
        "validation__steps": 1,
        "data__validation_fraction": 0.2,
        "data__document_mask": masked,
    }
    trainer = Trainer(load_config(argv(tmp_path / "run", corpus, **settings)), "cpu")
    told = []
    trainer.model.register_forward_pre_hook(lambda model, args: told.append(args[2] if args[3:] else None))
    try:
        trainer.train()
    finally:
        trainer.close()
    assert len(told) > 1
    assert (told[0] is not None) == (told[-1] is not None) == masked
