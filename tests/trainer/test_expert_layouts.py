"""A model with experts on every layout: the losses, loads and weights of one process; resumed on others."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file

from tests.trainer.runs import argv, column, distance, greatest_difference, train_all, write_corpus
from tests.trainer.runs import training_lines as logged

LAYOUTS = {  # name: (ranks, degrees)
    "ep2": (2, {"expert": 2}),
    "ep2_tp2": (2, {"expert": 2, "tensor": 2}),
    "cp2": (2, {"context": 2}),
    "ep4": (4, {"expert": 4}),
    "ep2_fsdp2": (4, {"expert": 2}),
    "ep2_tp2_fsdp2": (4, {"expert": 2, "tensor": 2}),
    "ep4_tp2_fsdp2": (4, {"expert": 4, "tensor": 2}),
    "ep2_replicas2": (4, {"expert": 2, "data_replicate": 2}),
    "ep2_cp2_fsdp2": (4, {"expert": 2, "context": 2}),
}
STEPS, SAVED = 6, 3
SEED = "ep2_tp2_fsdp2"  # whose checkpoint the others resume from
MODEL = {
    "model__name": "qwen3",
    "model__flavor": "debugmodel_moe",
    "model__n_heads": 4,
    "model__n_kv_heads": 4,
    "model__head_dim": 8,
    "model__hidden_dim": 24,
    "model__n_experts": 8,
    "model__n_experts_per_token": 2,
    # So strong that a load or a count that is a rank's own alone would be seen in the losses.
    "model__moe_auxiliary_loss_coefficient": 0.3,
}
TRAINING = {
    "training__steps": STEPS,
    "training__global_batch_size": 4,
    "training__local_batch_size": 1,  # of every layout: the balancing term is about a micro-batch
    "optimizer__lr": 2e-3,
    "metrics__log_freq": 1,
    "checkpoint__enable": True,
    "checkpoint__interval": SAVED,
}
EXPORT = {"checkpoint__last_save_model_only": True, "checkpoint__last_save_in_hf": True}
TOLERANCE = 1e-5


KEYS = {
    "expert": "parallelism__expert_parallel_degree",
    "tensor": "parallelism__tensor_parallel_degree",
    "context": "parallelism__context_parallel_degree",
    "data_replicate": "parallelism__data_parallel_replicate_degree",
}


def run(tmp: Path, corpus: Path, layout: str, name: str | None = None, **overrides) -> list[str]:
    _, degrees = LAYOUTS.get(layout, (0, {}))
    degrees = {KEYS[axis]: size for axis, size in degrees.items()}
    return argv(tmp / (name or layout), corpus, **{**MODEL, **TRAINING, **degrees, **overrides})


def test_experts_on_every_layout_equal_one_process(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=100)
    one = tmp_path / "one"
    train_all(1, [run(tmp_path, corpus, "one", **EXPORT)])
    four = [run(tmp_path, corpus, name, **EXPORT) for name, (ranks, _) in LAYOUTS.items() if ranks == 4]
    # Blocks of every micro-batch: one process has four to these ranks' one.
    dobb = {"optimizer__name": "Dobb", "optimizer__dobb__norm": "l2", "optimizer__dobb__blocks": 4}
    dobb |= {"optimizer__dobb__capture": "all", "optimizer__dobb__period": 2, "checkpoint__enable": False}
    four += [run(tmp_path, corpus, "ep2_fsdp2", "dobb_4", **dobb)]
    train_all(4, four)
    for name in ("from_1", "from_2"):
        shutil.copytree(
            tmp_path / SEED / f"checkpoint/step-{SAVED}", tmp_path / name / f"checkpoint/step-{SAVED}"
        )
    two = [run(tmp_path, corpus, name) for name, (ranks, _) in LAYOUTS.items() if ranks == 2]
    muon = {"optimizer__name": "Muon", "checkpoint__enable": False}
    two += [run(tmp_path, corpus, "fsdp2", "from_2"), run(tmp_path, corpus, "ep2", "muon_2", **muon)]
    compiled = {
        "checkpoint__enable": False,
        "compile__enable": True,
        "compile__backend": "aot_eager",
        "activation_checkpoint__mode": "selective",
    }
    two += [run(tmp_path, corpus, layout, f"{layout}_compiled", **compiled) for layout in ("ep2", "ep2_tp2")]
    train_all(2, two)
    last = [("from_1", {}), ("muon_1", muon), ("dobb_1", dobb)]
    train_all(1, [run(tmp_path, corpus, "one", name, **keys) for name, keys in last])

    assert column(one, "loss")[-1] < column(one, "loss")[0] - 0.2, "it learns"
    assert max(column(one, "router/max_load")) > 1.2, "the routing is uneven"
    for name in LAYOUTS:
        folder = tmp_path / name
        for key in ("loss", "grad_norm", "router/max_load", "router/min_load", "router/imbalance"):
            assert greatest_difference(folder, one, key) < TOLERANCE, (name, key)
        assert distance(folder / f"checkpoint/step-{SAVED}", one / f"checkpoint/step-{SAVED}") < TOLERANCE, (
            name
        )
    for name in ("from_1", "from_2"):
        losses = [line["loss"] for line in logged(tmp_path / name)]
        wanted = column(one, "loss")[SAVED:]
        assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < TOLERANCE, name

    for name in ("ep2_compiled", "ep2_tp2_compiled"):
        assert greatest_difference(tmp_path / name, one) < TOLERANCE, name
    for ranks, name in ((2, "muon"), (4, "dobb")):
        assert greatest_difference(tmp_path / f"{name}_{ranks}", tmp_path / f"{name}_1") < TOLERANCE, name

    exported = f"checkpoint/export-step-{STEPS}/model.safetensors"
    wanted = load_file(one / exported)
    for name in ("ep4", SEED):
        theirs = load_file(tmp_path / name / exported)
        assert theirs.keys() == wanted.keys() and any("experts.7." in key for key in wanted)
        assert max((theirs[key] - wanted[key]).abs().max().item() for key in wanted) < TOLERANCE, name
