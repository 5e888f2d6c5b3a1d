"""Text from a checkpoint: ``python scripts/generate.py --checkpoint …/step-100 --prompt "def "``.

Needs nothing but the checkpoint's folder: the configuration is read from the copy saved in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

# Runs from a bare checkout too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from titanforge.assembly import build_meta_model, huggingface_form
from titanforge.checkpoint import CheckpointError, CheckpointManager
from titanforge.checkpoint.layout import CONFIG, list_steps
from titanforge.config import JobConfig, load_config
from titanforge.data import build_tokenizer
from titanforge.models.generation import generate
from titanforge.models.initialization import initialize_weights
from titanforge.parallelisms import init_distributed


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continue a prompt with the model of a checkpoint.")
    parser.add_argument("--checkpoint", required=True, help="folder of one checkpoint, …/step-N")
    parser.add_argument("--config_file", help="job file; default: the one saved in the checkpoint's folder")
    parser.add_argument("--prompt", required=True, help="text to continue, at least one character")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top_k", type=int, help="draw among the k likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    return parser.parse_args(argv)


def find_config(folder: Path) -> Path:
    """The configuration saved beside the weights.

    Raises:
        FileNotFoundError: there is none; says what to pass instead.
    """
    if (folder / CONFIG).is_file():
        return folder / CONFIG
    if steps := list_steps(folder):
        raise FileNotFoundError(
            f"--checkpoint {folder} holds several; choose one, as {folder}/step-{steps[-1]}"
        )
    if steps := list_steps(folder.parent):
        raise FileNotFoundError(
            f"--checkpoint {folder}: no {CONFIG} there; {folder.parent} holds "
            + ", ".join(f"step-{step}" for step in steps)
        )
    raise FileNotFoundError(
        f"--checkpoint {folder}: no {CONFIG} there; give a step-N folder, or the job file as --config_file"
    )


def load_model(config: JobConfig, folder: Path, vocab_size: int, device: torch.device) -> torch.nn.Module:
    """The whole model on one device, with the checkpoint's weights.

    Raises:
        CheckpointError: the folder is no whole checkpoint.
        ValueError: its weights are of another model.
    """
    model, args = build_meta_model(config, vocab_size)
    model.to_empty(device=device)
    # Fills what no checkpoint holds: the tables of the position embedding.
    initialize_weights(model, seed=0)
    config.comm.trace_buf_size = 0  # no flight recorder for one process
    runtime = init_distributed(config.comm, device.type)
    try:
        settings = config.checkpoint
        settings.enable = settings.load_only = settings.initial_load_model_only = True
        settings.initial_load_path, settings.load_step = str(folder), -1
        settings.exclude_from_loading = []
        settings.initial_load_in_hf = (folder / "config.json").is_file()  # an export with last_save_in_hf
        settings.last_save_in_hf = False
        form = huggingface_form(config, args)
        with tempfile.TemporaryDirectory() as empty:
            manager = CheckpointManager(settings, empty, config_toml="", runtime=runtime, form=form)
            loaded = manager.load({"model": model.state_dict()})
            manager.close()
        assert loaded is not None, "initial_load_path was given"
        model.load_state_dict(loaded["model"])
    finally:
        runtime.close()
    return model.eval()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; 1 with one line on stderr for a missing or broken checkpoint or a bad option."""
    options = parse_arguments(argv)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder = Path(options.checkpoint)
    try:
        config = load_config(["--job.config_file", options.config_file or str(find_config(folder))])
        tokenizer = build_tokenizer(config.data.tokenizer, config.model.hf_assets_path)
        model = load_model(config, folder, tokenizer.vocab_size, device)
        # No beginning-of-text token: packed documents have none, so the model never saw it.
        tokens = tokenizer.encode(options.prompt)
        output = generate(
            model,
            torch.tensor([tokens], device=device),
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            generator=torch.Generator(device=device).manual_seed(options.seed),
            eos_id=tokenizer.eos_id,
        )
    except (CheckpointError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    new = [token for token in output[0, len(tokens) :].tolist() if token != tokenizer.eos_id]
    print(options.prompt + tokenizer.decode(new))
    return 0


if __name__ == "__main__":
    sys.exit(main())
