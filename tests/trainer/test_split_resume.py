"""A checkpoint of a split model, taken up mid-run by other layouts: the same losses from there on."""

from __future__ import annotations

import shutil

from tests.trainer.runs import column, distance, train_all, training_lines, write_corpus
from tests.trainer.test_split_models import LAYOUTS, run

STEPS, SAVED = 6, 3
ON_OTHERS = {"llama3": ["single", "tp2", "tp2_cp2", "fsdp4"], "gpt2": ["single", "tp2"]}


def test_saved_on_tensor_by_shards_and_resumed_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setitem(LAYOUTS, "fsdp4", (4, {}))
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=150)
    keys = {
        "training__steps": STEPS,
        "checkpoint__interval": SAVED,
        "checkpoint__initial_load_path": None,
        "checkpoint__initial_load_model_only": None,
        "validation__enable": False,
    }

    def arguments(family: str, layout: str) -> list[str]:
        return run(tmp_path, corpus, family, layout, **keys)

    train_all(4, [arguments(family, "tp2_fsdp2") for family in ON_OTHERS])
    cells = [(family, layout) for family, layouts in ON_OTHERS.items() for layout in layouts]
    for family, layout in cells:
        whole, folder = (tmp_path / f"{family}_{name}" for name in ("tp2_fsdp2", layout))
        shutil.copytree(whole / f"checkpoint/step-{SAVED}", folder / f"checkpoint/step-{SAVED}")
    for ranks in (1, 2, 4):
        train_all(ranks, [arguments(*cell) for cell in cells if LAYOUTS[cell[1]][0] == ranks])
    for family, layout in cells:
        whole, folder = (tmp_path / f"{family}_{name}" for name in ("tp2_fsdp2", layout))
        losses = [line["loss"] for line in training_lines(folder)]
        assert len(losses) == STEPS - SAVED, folder.name
        wanted = column(whole, "loss")[SAVED:]
        assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-5, folder.name
        last = f"checkpoint/step-{STEPS}"
        assert distance(folder / last, whole / last) < 1e-4, folder.name
