"""What a run reads and evaluates on: datasets, mixes, tokenizers."""

from __future__ import annotations

import pytest

from tests.config.jobs import refusal_of, validate


@pytest.mark.parametrize("dataset", ["text", "jsonl", "parquet"])
def test_datasets_that_need_a_path(dataset, tmp_path):
    argv = (f"--training.dataset={dataset}",)
    message = refusal_of(*argv)
    assert (
        message.startswith("training.dataset_path = none: ")
        and f'training.dataset = "{dataset}" needs' in message
    )
    missing = str(tmp_path / "none" / "*.x")
    message = refusal_of(*argv, f"--training.dataset_path={missing}")
    assert message.startswith(f'training.dataset_path = "{missing}": no such file')
    assert "no such file" in refusal_of(*argv, f"--training.dataset_path={tmp_path}")  # an empty folder
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.x").write_text("x")
    for path in (tmp_path, tmp_path / "deep" / "a.x", tmp_path / "*" / "*.x", tmp_path / "**" / "a.x"):
        assert validate(*argv, f"--training.dataset_path={path}") == []


def test_embedded_text_takes_no_path():
    message = refusal_of("--training.dataset_path=x")
    assert (
        message
        == 'training.dataset_path = "x": training.dataset = "python_stdlib" brings its own files: unset it'
    )


def test_unknown_datasets():
    assert refusal_of("--training.dataset=jsnol").endswith('did you mean "jsonl"?')
    assert refusal_of("--training.dataset=pile").startswith(
        'training.dataset = "pile": must be one of python_stdlib,'
    )
    message = refusal_of("--validation.enable", "--validation.dataset=pile_validation")
    assert message.startswith('validation.dataset = "pile_validation": must be one of')
    assert "torchtitan's own test file" in refusal_of("--training.dataset=c4_test")


def test_hugging_face_datasets(tmp_path):
    assert validate("--training.dataset=c4", "--data.subset=en", "--data.shuffle_window=10") == []
    assert validate("--training.dataset=huggingface", f"--training.dataset_path={tmp_path}") == []
    assert validate("--training.dataset=huggingface", "--training.dataset_path=a-b/c.d@v1") == []
    assert refusal_of("--training.dataset=huggingface").endswith("the path of a folder or hub id here")
    message = refusal_of("--training.dataset=huggingface", "--training.dataset_path=/no/such/folder")
    assert message.startswith('training.dataset_path = "/no/such/folder": no such folder')
    (warning,) = validate("--data.split=test")
    assert warning.endswith("training.dataset is no Hugging Face dataset")
    (warning,) = validate("--data.shuffle_window=7")
    assert warning.endswith("or data.shuffle = false")


def test_a_mix_of_sources(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    mix = f'[{{dataset = "jsonl", path = "{path}", weight = 3}}, {{dataset = "python_stdlib"}}]'
    assert validate(f"--data.sources={mix}", "--data.text_key=body") == []
    message = refusal_of(f"--data.sources={mix}", "--training.dataset=text")
    assert message == (
        'training.dataset = "text": [[data.sources]] names what to train on: keep one of the two'
    )
    message = refusal_of('--data.sources=[{dataset = "text"}]')
    assert message.startswith('data.sources[0].path = none: data.sources[0].dataset = "text" needs the path')
    message = refusal_of('--data.sources=[{}, {dataset = "jsnol"}]')
    assert message.startswith('data.sources[1].dataset = "jsnol": must be one of')
    assert refusal_of("--data.sources=[{weight = 0}]").startswith("data.sources[0].weight = 0.0: must be")


def test_tokenizer_paths(tmp_path):
    missing = str(tmp_path / "none")
    assert refusal_of(f"--data.tokenizer={missing}").startswith(f'data.tokenizer = "{missing}": ')
    message = refusal_of(f"--model.hf_assets_path={missing}")
    assert message.startswith(f'model.hf_assets_path = "{missing}": no such folder')
    assert validate(f"--model.hf_assets_path={missing}", "--data.tokenizer=byte") == []
    assert validate(f"--model.hf_assets_path={tmp_path}") == []
    file = tmp_path / "tokenizer.model"
    file.write_text("x")
    assert validate(f"--data.tokenizer={file}") == []
    assert validate("--data.tokenizer=package:somewhere/tokenizer.model") == []


def test_validation_needs_something_to_evaluate_on(tmp_path):
    assert validate("--validation.enable") == []
    message = refusal_of("--validation.enable", "--data.validation_fraction=0")
    assert message.startswith(
        "data.validation_fraction = 0.0: validation.enable = true has nothing to evaluate on"
    )
    file = tmp_path / "a.txt"
    file.write_text("x")
    message = refusal_of("--validation.enable", f"--validation.dataset_path={file}")
    assert message.startswith(f'validation.dataset_path = "{file}": needs validation.dataset')
    own = ("--validation.enable", "--validation.dataset=text")
    assert refusal_of(*own).startswith("validation.dataset_path = none: ")
    assert validate(*own, f"--validation.dataset_path={file}", "--data.validation_fraction=0") == []
