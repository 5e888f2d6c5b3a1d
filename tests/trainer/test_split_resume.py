"""A checkpoint of a split model, taken up mid-run by other layouts: the same losses from there on."""

from __future__ import annotations

import shutil

import pytest

from tests.trainer.runs import column, distance, train_all, training_lines, write_corpus
from tests.trainer.test_split_models import LAYOUTS, run

STEPS, SAVED = 6, 3
ON_OTHERS = {"llama3": ["single", "tp2", "tp2_cp2", "fsdp4"], "gpt2": ["single", "tp2"]}


@pytest.mark.parametrize("family", ON_OTHERS)
def test_saved_on_tensor_by_shards_and_resumed_elsewhere(tmp_path, family, monkeypatch):
    monkeypatch.setitem(LAYOUTS, "fsdp4", (4, {}))
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=150)
    keys = {
        "training__steps": STEPS,
        "checkpoint__interval": SAVED,
        "checkpoint__initial_load_path": None,
        "checkpoint__initial_load_model_only": None,
        "validation__enable": False,
    }

    def arguments(layout: str) -> list[str]:
        return run(tmp_path, corpus, family, layout, **keys)

    train_all(4, [arguments("tp2_fsdp2")])
    whole, layouts = tmp_path / f"{family}_tp2_fsdp2", ON_OTHERS[family]
    for layout in layouts:
        folder = tmp_path / f"{family}_{layout}"
        shutil.copytree(whole / f"checkpoint/step-{SAVED}", folder / f"checkpoint/step-{SAVED}")
    for ranks in sorted({LAYOUTS[layout][0] for layout in layouts}):
        train_all(ranks, [arguments(layout) for layout in layouts if LAYOUTS[layout][0] == ranks])
    wanted = column(whole, "loss")[SAVED:]
    for layout in layouts:
        folder = tmp_path / f"{family}_{layout}"
        losses = [line["loss"] for line in training_lines(folder)]
        assert len(losses) == STEPS - SAVED, layout
        assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-5, layout
        last = f"checkpoint/step-{STEPS}"
        assert distance(folder / last, whole / last) < 1e-4, layout
