"""Converting both ways from the command line, and starting a run from what came out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

from scripts import convert_hf, generate  # noqa: E402
from tests.models.huggingface_models import logits, random_model  # noqa: E402
from titanforge.checkpoint import safetensors_format  # noqa: E402
from titanforge.config import load_config  # noqa: E402
from titanforge.trainer import Trainer  # noqa: E402

QWEN3 = [
    "--model.name",
    "qwen3",
    "--model.flavor",
    "debugmodel",
    "--model.n_layers",
    "2",
    "--model.dim",
    "32",
]
GPT2 = ["--model.name", "gpt2", "--model.flavor", "debugmodel", "--model.n_layers", "2", "--model.dim", "32"]


def train(folder: Path, *options: str) -> Trainer:
    config = load_config(
        [
            *("--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(folder)),
            *("--training.steps", "1", "--training.seq_len", "32", "--checkpoint.enable", "true"),
            *options,
        ]
    )
    trainer = Trainer(config, "cpu")
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = convert_hf.main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("model", [QWEN3, GPT2])
def test_a_checkpoint_becomes_a_model_of_theirs_and_starts_a_run_again(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(safetensors_format, "SHARD_BYTES", 20_000)
    trained = train(tmp_path / "run", *model).model
    checkpoint, output = tmp_path / "run/checkpoint/step-1", tmp_path / "theirs"
    code, out, err = run(
        capsys, "export", "--checkpoint", str(checkpoint), "--output", str(output), "--dtype", "float32"
    )
    assert code == 0 and "float32" in out, err
    files = list(output.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:  # what is in memory at once: a file, or one tensor that is larger
        held = load_file(file)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= safetensors_format.SHARD_BYTES
    theirs, problems = transformers.AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not problems["missing_keys"] and not problems["unexpected_keys"]
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = trained.logits(trained(tokens))
    torch.testing.assert_close(logits(theirs.eval(), tokens), expected, rtol=1e-4, atol=1e-4)

    direct = train(
        tmp_path / "again",
        *(*model, "--checkpoint.initial_load_in_hf", "true", "--checkpoint.initial_load_path", str(output)),
        *("--checkpoint.last_save_model_only", "true", "--checkpoint.last_save_in_hf", "true"),
        *("--checkpoint.export_dtype", "bfloat16", "--optimizer.lr", "0"),
    )
    for name, tensor in direct.model.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name]), name
    exported = tmp_path / "again/checkpoint/export-step-1"
    assert transformers.AutoModelForCausalLM.from_pretrained(exported).dtype == torch.bfloat16
    assert generate.main(["--checkpoint", str(exported), "--prompt", "a", "--max_new_tokens", "2"]) == 0

    code, out, err = run(capsys, "import", "--model", str(output), "--output", str(tmp_path / "ours"))
    assert code == 0, err
    ours = {}
    for file in (tmp_path / "ours").glob("*.safetensors"):
        ours |= load_file(file)
    for name, tensor in ours.items():
        assert torch.equal(tensor, trained.state_dict()[name]), name
    back = train(
        tmp_path / "back",
        *(*model, "--checkpoint.initial_load_path", str(tmp_path / "ours"), "--optimizer.lr", "0"),
    )
    for name, tensor in back.model.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name]), name


def test_exported_weights_are_a_source_too(tmp_path, capsys):
    trained = train(tmp_path / "run", *QWEN3, "--checkpoint.last_save_model_only", "true").model
    export = tmp_path / "run/checkpoint/export-step-1"
    code, _, err = run(capsys, "export", "--checkpoint", str(export), "--output", str(tmp_path / "theirs"))
    assert code == 0, err
    assert "writing" in err and "tensors" in err
    whole = load_file(tmp_path / "theirs/model.safetensors")
    assert "lm_head.weight" not in whole
    embedding = trained.tok_embeddings.weight.to(torch.bfloat16)
    assert torch.equal(whole["model.embed_tokens.weight"], embedding)
    assert json.loads((tmp_path / "theirs/config.json").read_text())["tie_word_embeddings"] is True


def test_a_published_size_is_recognised(tmp_path, capsys):
    random_model("qwen3").save_pretrained(tmp_path / "small")
    code, out, _ = run(
        capsys, "import", "--model", str(tmp_path / "small"), "--output", str(tmp_path / "imported")
    )
    assert code == 0 and "no flavor of these sizes" in out
    with torch.device("meta"):
        _, args = convert_hf.build_meta_model(load_config(["--model.name=qwen3", "--model.flavor=4B"]), 257)
    assert convert_hf.matching_flavor(convert_hf.form_of(args)) == "4B"


def test_what_goes_wrong_is_one_line(tmp_path, capsys):
    nowhere = str(tmp_path / "nowhere")
    code, _, err = run(capsys, "import", "--model", nowhere, "--output", str(tmp_path / "o"))
    assert code == 1 and err.startswith("error: ") and "no config.json" in err
    code, _, err = run(capsys, "export", "--checkpoint", nowhere, "--output", str(tmp_path / "o"))
    assert code == 1 and "does not exist" in err
    random_model("gpt2").save_pretrained(tmp_path / "small")
    code, _, err = run(capsys, "import", "--model", str(tmp_path / "small"), "--output", str(tmp_path))
    assert code == 1 and "exists" in err
