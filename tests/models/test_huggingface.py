"""Hugging Face's models and ours: the same logits, both ways; what cannot be exchanged is refused by name."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from tests.models.huggingface_models import CONFIGS, logits, random_model  # noqa: E402
from tests.models.published_configs import PUBLISHED  # noqa: E402
from titanforge.checkpoint import huggingface as files  # noqa: E402
from titanforge.models.huggingface import form_from_config, form_of  # noqa: E402
from titanforge.models.initialization import initialize_weights  # noqa: E402
from titanforge.models.registry import MODELS, build_model  # noqa: E402

TOKENS = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))


def ours(form):
    model = MODELS[form.family].build(form.args)
    initialize_weights(model, seed=0)
    return model


def imported(folder: Path):
    form = form_from_config(files.read_config(folder))
    model = ours(form)
    files.read_huggingface(folder, model.state_dict(), form)
    return model, form


def export(model, form, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    folder.mkdir()
    state = model.state_dict()
    tensors = {}
    for name in form.sources():
        tensors |= files.to_huggingface(name, state[name].to(dtype), form)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    files.write_extras(folder, form, dtype, None)


@pytest.mark.parametrize("name", CONFIGS)
def test_import_gives_their_logits(name, tmp_path):
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    model, _ = imported(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(TOKENS)), logits(theirs, TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_export_gives_our_logits(name, tmp_path):
    random_model(name).save_pretrained(tmp_path / "theirs")
    model, form = imported(tmp_path / "theirs")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    export(model, form, tmp_path / "ours")
    again, problems = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not problems["missing_keys"] and not problems["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(
            logits(again.eval(), TOKENS), model.logits(model(TOKENS)), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_export_then_import_is_the_same_model(name, tmp_path):
    random_model(name).save_pretrained(tmp_path / "theirs")
    model, form = imported(tmp_path / "theirs")
    export(model, form, tmp_path / "ours")
    again, form_again = imported(tmp_path / "ours")
    assert form_again.args == form.args
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
    theirs, back = (load_file(tmp_path / f / "model.safetensors") for f in ("theirs", "ours"))
    assert set(back) == set(theirs)
    for key, tensor in theirs.items():
        assert torch.equal(tensor, back[key]), key


@pytest.mark.parametrize("family", MODELS)
def test_every_size_has_a_form_that_covers_its_parameters(family):
    for flavor in MODELS[family].flavors:
        with torch.device("meta"):
            model, args = build_model(family, flavor, vocab_size=257, seq_len=64)
        if getattr(args, "modern", False):
            with pytest.raises(ValueError, match="modern sizes"):
                form_of(args)
            continue
        form = form_of(args)
        assert set(form.sources()) == {name for name, _ in model.named_parameters()}
        form.check(form.config(torch.bfloat16))


@pytest.mark.parametrize(("family", "flavor"), PUBLISHED)
def test_published_config_is_our_size(family, flavor):
    with torch.device("meta"):
        _, args = build_model(family, flavor, seq_len=1024)
    form_of(args).check(PUBLISHED[family, flavor])
    assert form_from_config(PUBLISHED[family, flavor]).family == family


def test_published_gpt2_has_no_prefix_and_carries_masks(tmp_path):
    theirs = random_model("gpt2")
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)}
    save_file(tensors, path)
    model, _ = imported(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(TOKENS)), logits(theirs, TOKENS), rtol=1e-4, atol=1e-4)


def test_several_files_with_an_index_and_a_stored_tied_head(tmp_path):
    theirs = random_model("qwen3_tied")
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, form = imported(tmp_path)
    assert form.args.tie_embeddings and model.output.weight is model.tok_embeddings.weight
    first = min(tmp_path.glob("*.safetensors"))
    embedding = theirs.get_input_embeddings().weight.detach().clone()
    save_file({**load_file(first), "lm_head.weight": embedding}, first)
    imported(tmp_path)  # a head that repeats the embedding, as some files do
    save_file({**load_file(first), "lm_head.weight": embedding + 1}, first)
    with pytest.raises(ValueError, match=r"lm_head\.weight is another tensor"):
        imported(tmp_path)
    os.truncate(first, first.stat().st_size - 100)
    with pytest.raises(ValueError, match=rf"{first.name} is not a whole safetensors file \("):
        imported(tmp_path)
    first.unlink()
    with pytest.raises(FileNotFoundError, match="download is incomplete"):
        imported(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"head_dim": 16}, "head_dim = 16"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"something_new": 3}, "something_new = 3"),
        ("llama", {"model_type": "mistral"}, "model_type = 'mistral'"),
        ("llama", {"hidden_size": None}, "no hidden_size"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"n_inner": 77}, "n_inner = 77"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_what_we_lack_is_refused_by_name(name, change, message):
    config = json.loads(CONFIGS[name]().to_json_string()) | change
    with pytest.raises(ValueError, match=message):
        form_from_config(config)


def test_older_spelling_of_the_rotary_keys():
    config = json.loads(CONFIGS["llama"]().to_json_string())
    rope = config.pop("rope_parameters")
    older = config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert form_from_config(older).args == form_from_config(config | {"rope_parameters": None} | older).args
    assert form_from_config(older).args.rope_theta == 500_000.0
    assert form_from_config(older).args.rope_scaling.original_context == 16


def test_another_model_than_the_runs_is_refused(tmp_path):
    random_model("qwen3").save_pretrained(tmp_path)
    form = form_from_config(files.read_config(tmp_path))
    form.args.dim, form.args.tie_embeddings = 64, True
    with pytest.raises(ValueError, match="dim is 32 there and 64 in this run; tie_embeddings is False there"):
        form.check(files.read_config(tmp_path))
    with pytest.raises(ValueError, match="model_type = 'gpt2'"):
        form.check({"model_type": "gpt2"})


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path):
    random_model("qwen3").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    without = {name: t for name, t in whole.items() if name != "model.norm.weight"}
    save_file({**without, "model.extra": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"Missing: model\.norm\.weight\. Left over: model\.extra\."):
        imported(tmp_path)
    save_file({**whole, "model.norm.weight": torch.zeros(31)}, path)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[31\] in the file"):
        imported(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        imported(tmp_path / "nowhere")


def test_dtype_of_an_export(tmp_path):
    random_model("gpt2").save_pretrained(tmp_path / "theirs")
    model, form = imported(tmp_path / "theirs")
    export(model, form, tmp_path / "half", torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_progress_says_how_far_it_is():
    stream = io.StringIO()
    progress = files.Progress("reading", 3, True, stream)
    for _ in range(3):
        progress.advance(2**30)
    lines = stream.getvalue().splitlines()
    assert lines[-1] == "reading 3/3 tensors, 3.00 GiB" and len(lines) == 2  # the first and the last
    silent = io.StringIO()
    files.Progress("reading", 1, False, silent).advance(1)
    assert silent.getvalue() == ""
