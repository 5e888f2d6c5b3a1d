"""Split models with what else a run may ask for: recomputation, bfloat16, Hugging Face's files."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from tests.trainer.runs import column, train_all, write_corpus
from tests.trainer.test_split_models import LAYOUTS, run

OPTIONS = {  # name: (keys, greatest difference of the losses)
    "full": ({"activation_checkpoint__mode": "full"}, 1e-5),
    "per_operator": ({"activation_checkpoint__mode": "selective"}, 1e-5),
    "bfloat16": ({"training__mixed_precision_param": "bfloat16"}, 2e-2),
    "stored_bfloat16": (
        {"training__dtype": "bfloat16", "optimizer__master_weights": "float32"}, 2e-2
    ),
    "int8_states": ({"optimizer__state_dtype": "int8"}, 2e-3),
    "compiled": (
        {
            "compile__enable": True, "compile__backend": "aot_eager",
            "activation_checkpoint__mode": "selective",
        },
        1e-5,
    ),
    "muon": ({"optimizer__name": "Muon"}, 1e-5),
    "dion": ({"optimizer__name": "Dion", "optimizer__dion__rank_fraction": 0.25}, 1e-5),
    "rmnp": ({"optimizer__name": "RMNP"}, 1e-5),
    # Where signs are taken the last bit of a sum may become a step.
    "dobb": (
        {"optimizer__name": "Dobb", "optimizer__dobb__norm": "l2", "optimizer__dobb__blocks": 4}, 2e-5
    ),
}  # fmt: skip
LEAN = {
    "training__steps": 3,
    "validation__enable": False,
    "checkpoint__enable": False,
    "checkpoint__initial_load_path": None,
    "checkpoint__initial_load_model_only": None,
}


def test_options_change_split_models_as_they_change_whole_ones(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=60)

    def arguments(name: str, layout: str) -> list[str]:
        return run(tmp_path / name, corpus, "llama3", layout, **LEAN, **OPTIONS[name][0])

    # The blocks of int8 states lie along the axis that the tensor axis splits, and Dobb's l2 sums along it.
    # On two ranks the context axis cuts matrices as FSDP alone does, whose rules of matrices are shown
    # elsewhere.
    out = [("int8_states", "tp2"), ("dobb", "tp2")]
    out += [(name, "cp2_ring") for name in ("muon", "rmnp")]
    split = [(n, layout) for layout in ("tp2", "cp2_ring") for n in OPTIONS if (n, layout) not in out]
    train_all(1, [arguments(name, "single") for name in OPTIONS])
    train_all(2, [arguments(*each) for each in split])
    for name, layout in split:
        losses, wanted = (column(tmp_path / name / f"llama3_{x}", "loss") for x in (layout, "single"))
        worst = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        assert worst < OPTIONS[name][1], (name, layout)


def test_hugging_face_files_of_a_split_model(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=60)
    export = LEAN | {
        "checkpoint__enable": True,
        "checkpoint__last_save_model_only": True,
        "checkpoint__last_save_in_hf": True,
    }
    families, layouts = ("llama3", "gpt2"), ("single", "tp2_fsdp2")
    for layout in layouts:
        train_all(
            LAYOUTS[layout][0], [run(tmp_path, corpus, family, layout, **export) for family in families]
        )
    written = {
        family: [tmp_path / f"{family}_{layout}" / "checkpoint/export-step-3" for layout in layouts]
        for family in families
    }
    for family in families:
        theirs, ours = (load_file(folder / "model.safetensors") for folder in written[family])
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(
                ours[name], tensor, rtol=0, atol=1e-4, msg=f"{family} {name}: {{}}".format
            )

    imported = LEAN | {
        "checkpoint__enable": True,
        "checkpoint__initial_load_model_only": True,
        "checkpoint__initial_load_in_hf": True,
    }
    for layout in layouts:
        runs = [
            run(
                tmp_path / "again", corpus, family, layout,
                **{**imported, "checkpoint__initial_load_path": written[family][1]},
            )
            for family in families
        ]  # fmt: skip
        train_all(LAYOUTS[layout][0], runs)
    for family in families:
        losses = [column(tmp_path / "again" / f"{family}_{layout}", "loss") for layout in layouts]
        assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5, family
        first = column(tmp_path / f"{family}_single", "loss")[0]
        assert losses[0][0] < first - 0.05, f"{family} went on from there"
