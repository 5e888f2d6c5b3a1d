"""Weights from Hugging Face's format to ours and back, tensor by tensor: a 70B needs a few GiB of memory.

    python scripts/convert_hf.py export --checkpoint outputs/run/checkpoint/step-1000 --output my_model
    python scripts/convert_hf.py import --model path/to/Qwen3-0.6B --output imported

``export`` takes a checkpoint (step-N) or exported weights (export-step-N) and writes config.json, safetensors
and, with ``--hf_assets``, the tokenizer's files. ``import`` writes weights for checkpoint.initial_load_path;
a run can also read a Hugging Face folder itself (checkpoint.initial_load_in_hf).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

# Runs from a bare checkout too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from titanforge.assembly import build_meta_model
from titanforge.checkpoint import CheckpointError, dcp_format, huggingface, layout, loading
from titanforge.checkpoint.safetensors_format import Exporter, write_index
from titanforge.config import JobConfig, load_config, to_toml
from titanforge.layout import DTYPES
from titanforge.models.huggingface import HuggingFaceForm, form_from_config, form_of
from titanforge.models.registry import MODELS
from titanforge.parallelisms import init_distributed

Read = Callable[[str], Tensor]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Convert weights between Hugging Face's format and ours.")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="a checkpoint of ours to a Hugging Face folder")
    export.add_argument("--checkpoint", required=True, help="folder step-N or export-step-N")
    export.add_argument("--config_file", help="job file; default: the one saved in the checkpoint's folder")
    export.add_argument("--hf_assets", help="folder whose tokenizer files are copied beside the weights")
    imported = commands.add_parser("import", help="a Hugging Face folder to weights of ours")
    imported.add_argument("--model", required=True, help="folder with config.json and safetensors")
    for command, dtype in ((export, "bfloat16"), (imported, "float32")):
        command.add_argument("--output", required=True, help="folder to make; must not exist")
        command.add_argument("--dtype", choices=DTYPES, default=dtype, help="default: %(default)s")
    return parser.parse_args(argv)


def export_checkpoint(options: argparse.Namespace) -> str:
    """Write the Hugging Face folder of a checkpoint; returns what to tell.

    Raises:
        CheckpointError: the checkpoint is broken.
        FileNotFoundError, ValueError: there is none, or Hugging Face has no such model.
    """
    folder = Path(options.checkpoint)
    job_file = Path(options.config_file) if options.config_file else folder / layout.CONFIG
    if not job_file.is_file():
        raise FileNotFoundError(f"{job_file} does not exist: give a step-N folder, or --config_file")
    config = load_config(["--job.config_file", str(job_file)])
    dtype = DTYPES[options.dtype]
    with stored_weights(folder, config) as (vocab_size, read):
        model, args = build_meta_model(config, vocab_size)
        form = form_of(args)
        form.config(dtype)  # what cannot be exported is refused before anything is written
        state = model.state_dict()
        with written_aside(Path(options.output)) as written:
            write_weights(written, dtype, {name: state[name] for name in form.sources()}, read, form)
            assets = Path(options.hf_assets) if options.hf_assets else None
            huggingface.write_extras(written, form, dtype, assets)
    return f"{options.output}: {form.architecture}, {options.dtype}"


@contextlib.contextmanager
def stored_weights(folder: Path, config: JobConfig) -> Iterator[tuple[int, Read]]:
    """Rows of the embedding in a checkpoint or an export of ours, and a function that reads one weight.

    Raises:
        CheckpointError: incomplete or altered.
    """
    reason = layout.why_incomplete(folder)
    if reason is None and not (folder / layout.STATE).exists():  # weights alone
        if (folder / "config.json").exists():
            raise ValueError(f"{folder} is in Hugging Face's format already")
        files = huggingface.TensorFiles(folder, "")
        yield files.slice("tok_embeddings.weight").get_shape()[0], files.tensor
        return
    config.comm.trace_buf_size = 0  # no flight recorder for one process
    runtime = init_distributed(config.comm, "cpu")
    group = runtime.checkpoint_group
    try:
        reason = reason or loading.why_unusable(folder, group)
        if reason is not None:
            raise CheckpointError(f"{folder} is unusable: {reason}")
        stored = dcp_format.shapes(dcp_format.read_table(folder))

        def read(name: str) -> Tensor:
            shape, dtype = stored[f"model.{name}"]
            whole = torch.empty(shape, dtype=dtype)
            dcp_format.read_tensors(folder, {f"model.{name}": whole}, group)
            return whole

        yield stored["model.tok_embeddings.weight"][0][0], read
    finally:
        runtime.close()


def import_model(options: argparse.Namespace) -> str:
    """Write our weights of a Hugging Face folder; returns what to tell.

    Raises:
        FileNotFoundError, ValueError: it is no such folder, incomplete, or asks for what we lack.
    """
    folder, dtype = Path(options.model), DTYPES[options.dtype]
    form = form_from_config(huggingface.read_config(folder))
    files = huggingface.open_model(folder, form)
    with torch.device("meta"):
        state = MODELS[form.family].build(form.args).state_dict()
    sources = form.sources()

    def read(name: str) -> Tensor:
        whole = torch.empty(state[name].shape, dtype=dtype)
        huggingface.fill(name, whole, sources[name], files)
        return whole

    with written_aside(Path(options.output)) as written:
        write_weights(written, dtype, {name: state[name] for name in sources}, read, None)
        flavor = matching_flavor(form)
        if flavor is not None:
            config = JobConfig()
            config.model.name, config.model.flavor = form.family, flavor
            config.model.hf_assets_path = str(folder.resolve())
            (written / layout.CONFIG).write_text(to_toml(config), encoding="utf-8")
    size = f"model.flavor = {flavor!r}" if flavor else "no flavor of these sizes: override one in [model]"
    return f"{options.output}: model.name = {form.family!r}, {size}, {options.dtype}"


def matching_flavor(form: HuggingFaceForm) -> str | None:
    """The size of ours that is the same model, if there is one."""
    for name, args in MODELS[form.family].flavors.items():
        if all(getattr(args, key) == getattr(form.args, key) for key in form.compared):
            return name
    return None


@contextlib.contextmanager
def written_aside(output: Path) -> Iterator[Path]:
    """A folder that gets the name ``output`` when all is written.

    Raises:
        FileExistsError: the name is taken.
    """
    if output.exists():
        raise FileExistsError(f"--output {output} exists; choose another name, or delete it")
    written = output.with_name(output.name + ".tmp")
    written.mkdir(parents=True)
    yield written
    written.rename(output)


def write_weights(
    folder: Path,
    dtype: torch.dtype,
    state: Mapping[str, Tensor],
    read: Read,
    form: HuggingFaceForm | None,
) -> None:
    """Write the weights named in ``state`` (meta tensors), one file in memory at a time.

    form: whose names and layout the files get; None: ours.
    """
    exporter = Exporter(dtype)
    plan = exporter.plan(state, {})
    progress = huggingface.Progress("writing", len(state), show=True)
    names: dict[str, list[str]] = {}
    for index, members in enumerate(plan):
        batch: dict[str, Tensor] = {}
        for name in members:
            whole = exporter.gather(read(name))
            batch |= huggingface.to_huggingface(name, whole, form) if form else {name: whole}
            progress.advance(whole.numel() * whole.element_size())
        new = exporter.write(folder, index, len(plan), batch, {})
        names.update((file, list(batch)) for file in new)
    if len(plan) > 1:
        write_index(folder, names)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; 1 with one line on stderr for whatever cannot be converted."""
    options = parse_arguments(argv)
    try:
        print(export_checkpoint(options) if options.command == "export" else import_model(options))
    except (CheckpointError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
