from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_script", ROOT / "scripts" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, its checkpoint, and its weights exported."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "corpus.txt").write_text("one two three four five six seven eight nine ten\n" * 40)
    command = [sys.executable, str(ROOT / "train.py"), "--job.config_file"]
    command += [str(ROOT / "train_configs" / "debug_model.toml"), f"--job.dump_folder={folder}"]
    command += ["--training.dataset=text", f"--training.dataset_path={folder / 'corpus.txt'}"]
    command += ["--data.validation_fraction=0", "--data.num_streams=2", "--training.seq_len=32"]
    command += ["--model.dim=32", "--model.n_layers=1", "--model.n_heads=2", "--model.n_kv_heads=1"]
    command += ["--checkpoint.enable", "--checkpoint.interval=1", "--training.steps=2"]
    command += ["--checkpoint.last_save_model_only"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "checkpoint"


def generate(folder: Path, *more: str) -> int:
    options = ["--checkpoint", str(folder), "--device", "cpu", "--max_new_tokens", "24", *more]
    return load_script().main(options)


def test_same_seed_same_text(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert generate(run_folder / "step-1", "--prompt", "one two", "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("one two") for text in texts)
    assert texts[0] == texts[1] != texts[2]


def test_weights_are_those_of_the_checkpoint(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Greedy text follows from the weights alone: step 1 twice, and step 2 through the other format.
    texts = []
    for name in ("step-1", "step-1", "export-step-2"):
        assert generate(run_folder / name, "--prompt", "one two", "--temperature", "0") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[2].startswith("one two")

    import torch
    from safetensors.torch import load_file

    from titanforge.config import load_config

    script = load_script()
    folder = run_folder / "export-step-2"
    config = load_config(["--job.config_file", str(folder / "config.toml")])
    model = script.load_model(config, folder, 258, torch.device("cpu"))
    stored = load_file(next(folder.glob("*.safetensors")))
    assert stored.keys() <= model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name]), name


@pytest.mark.parametrize("break_it", ["missing", "parent", "truncated", "option"])
def test_errors_are_one_line(
    run_folder: Path, break_it: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = run_folder / "step-1", ["--prompt", "x"]
    if break_it == "missing":
        folder = run_folder / "step-99"
    elif break_it == "parent":
        folder = run_folder
    elif break_it == "truncated":
        folder = tmp_path / "step-1"
        folder.mkdir()
        for file in (run_folder / "step-1").iterdir():
            data = file.read_bytes()
            (folder / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".distcp" else data)
    else:
        options = ["--prompt", "x", "--temperature", "-1"]
    assert generate(folder, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and len(error.splitlines()) == 1
    expected = {"missing": "step-99", "parent": "step-1", "truncated": "truncated", "option": "temperature"}
    assert expected[break_it] in error
