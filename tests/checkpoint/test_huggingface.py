"""Hugging Face weights in and out of a sharded model: each rank its own part, and the whole again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.distributed_harness import run_distributed
from tests.models.families import tiny
from titanforge.checkpoint import CheckpointManager
from titanforge.checkpoint.huggingface import to_huggingface, write_extras
from titanforge.config.sections import Checkpoint
from titanforge.models.huggingface import form_of
from titanforge.models.initialization import initialize_weights
from titanforge.parallelisms import ParallelDims
from titanforge.parallelisms.data_parallel import apply_fsdp

KINDS = ("llama3", "qwen3_tied", "gpt2", "qwen3_moe")


def write_theirs(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """The tiny model in Hugging Face's format; returns its file's content."""
    model = tiny(kind)
    form = form_of(model.args)
    state, tensors = model.state_dict(), {}
    for name in form.sources():
        tensors |= to_huggingface(name, state[name], form)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    write_extras(folder, form, torch.float32, None)
    return tensors


def sharded_runs(rank: int, world_size: int, folder: str) -> None:
    dims = ParallelDims(dp_replicate=1, dp_shard=world_size, cp=1, tp=1, pp=1, ep=1, world_size=world_size)
    dims.build_mesh("cpu")
    for kind in KINDS:
        one_run(rank, dims, kind, f"{folder}/{kind}", f"{folder}/{kind}_run")


def one_run(rank: int, dims: ParallelDims, kind: str, theirs: str, dump_folder: str) -> None:
    model = tiny(kind)
    form = form_of(model.args)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_fsdp(model, dims.get_mesh("dp_shard"), param_dtype=None)
    initialize_weights(model, seed=99)
    settings = Checkpoint(
        enable=True,
        initial_load_path=theirs,
        initial_load_in_hf=True,
        last_save_model_only=True,
        last_save_in_hf=True,
    )
    runtime = SimpleNamespace(
        rank=rank,
        world_size=dims.world_size,
        device=torch.device("cpu"),
        checkpoint_group=dist.new_group(backend="gloo"),
    )
    manager = CheckpointManager(settings, dump_folder, config_toml="", runtime=runtime, form=form)
    loaded = manager.load({"model": model.state_dict()})
    assert loaded is not None and set(loaded) == {"model"}
    model.load_state_dict(loaded["model"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), expected[name]), name
    manager.save(1, {"model": model.state_dict()}, last=True)
    manager.close()


def test_a_sharded_model_reads_and_writes_the_same_file(tmp_path):
    """Three ranks: rows that do not divide evenly, and ranks that hold nothing of a small tensor."""
    theirs = {kind: write_theirs(kind, tmp_path / kind) for kind in KINDS}
    run_distributed(sharded_runs, 3, str(tmp_path), timeout=180)
    for kind, tensors in theirs.items():
        back = load_file(tmp_path / f"{kind}_run/checkpoint/export-step-1/model.safetensors")
        assert set(back) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, back[name]), name
