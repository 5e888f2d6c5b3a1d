"""When to save, what to load, what to keep; one real process."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

from tests.checkpoint.runs import TinyRun, assert_same, expected
from titanforge.checkpoint import CheckpointError, dcp_format, layout

pytestmark = pytest.mark.usefixtures("one_process")


def _saved(folder, *steps, **options):
    for step in steps:
        run = TinyRun(False, seed=step)
        manager = run.manager(folder, **options)
        assert manager.save(step, run.state)
        manager.close()
    return folder / "checkpoint"


def _load(folder, width=12, **options):
    run = TinyRun(False, seed=99, width=width)
    manager = run.manager(folder, **options)
    return run, manager, manager.load(run.state)


def test_nothing_saved_means_start_from_scratch(tmp_path):
    assert _load(tmp_path)[2] is None
    assert _load(tmp_path, enable=False)[2] is None


def test_due():
    manager = TinyRun(False, 0).manager("unused", interval=4, enable_first_step_checkpoint=True)
    assert [s for s in range(1, 10) if manager.due(s, first_step=1)] == [1, 4, 8]
    assert manager.due(9, last=True)
    off = TinyRun(False, 0).manager("unused", interval=1, load_only=True)
    assert not off.due(1, last=True) and not off.save(1, {})


def test_the_newest_is_loaded_with_its_config_beside(tmp_path):
    folder = _saved(tmp_path, 3, 20)
    run, manager, loaded = _load(tmp_path)
    assert loaded["train_state"]["step"] == 20 and manager.loaded_from == folder / "step-20"
    assert_same(run.full(), expected(20))
    assert 'description = "tiny"' in (folder / "step-20" / "config.toml").read_text()
    assert not list(folder.glob("*.tmp"))


def test_the_same_step_is_written_once(tmp_path):
    run = TinyRun(False, seed=1)
    manager = run.manager(tmp_path)
    assert manager.save(1, run.state) and not manager.save(1, run.state)


def test_load_step(tmp_path):
    folder = _saved(tmp_path, 3, 20)
    assert _load(tmp_path, load_step=3)[2]["train_state"]["step"] == 3
    with pytest.raises(FileNotFoundError, match=r"load_step = 4: .* holds steps 3, 20"):
        _load(tmp_path, load_step=4)
    os.truncate(folder / "step-3" / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"load_step = 3: .*truncated"):
        _load(tmp_path, load_step=3)


def _flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: os.truncate(f / "__0_0.distcp", 100), "__0_0.distcp has 100 bytes"),
        (lambda f: _flip_a_byte(f / "__0_0.distcp"), "__0_0.distcp has checksum"),
        (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda f: (f / "complete.json").unlink(), "has no complete.json"),
        (lambda f: _flip_a_byte(f / "state.json"), "state.json has checksum"),
        (lambda f: (f / ".metadata").unlink(), ".metadata is missing"),
    ],
)
def test_a_broken_one_is_named_and_the_previous_good_one_loaded(tmp_path, caplog, damage, reason):
    folder = _saved(tmp_path, 1, 2)
    (folder / "step-7").mkdir()  # foreign: of another program
    (folder / "step-7" / "weights.bin").write_bytes(b"x")
    damage(folder / "step-2")
    run, manager, loaded = _load(tmp_path)
    assert loaded["train_state"]["step"] == 1
    assert_same(run.full(), expected(1))
    assert [name for name, _ in manager.skipped] == ["step-7", "step-2"]
    assert reason in manager.skipped[1][1] and reason in caplog.text


def test_only_broken_ones_is_an_error_not_a_fresh_start(tmp_path):
    folder = _saved(tmp_path, 1)
    (folder / "step-1" / "complete.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-1: has no complete.json.*checkpoint\.folder"):
        _load(tmp_path)


def test_keep_latest(tmp_path):
    folder = _saved(tmp_path, 1, 2, 3, 4, keep_latest_k=2)
    assert layout.list_steps(folder) == [3, 4]
    assert layout.list_steps(_saved(tmp_path / "all", 1, 2, 3, keep_latest_k=0)) == [1, 2, 3]
    with pytest.raises(ValueError, match="keep_latest_k = 1"):
        TinyRun(False, 0).manager(tmp_path, keep_latest_k=1)


def test_another_model_is_reported_not_skipped(tmp_path):
    _saved(tmp_path, 1)
    with pytest.raises(ValueError, match=r"another model.*model\.tok_embeddings\.weight is \(33, 12\)"):
        _load(tmp_path, width=8)
    run = TinyRun(False, seed=2)
    run.moments["norm.weight"]["exp_avg_sq"] = torch.zeros(12)
    with pytest.raises(ValueError, match=r"exp_avg_sq is not in the checkpoint"):
        run.manager(tmp_path).load(run.state)
    del run.moments["norm.weight"]
    with pytest.raises(ValueError, match=r"optimizer\.state\.norm\.weight\.exp_avg is not in this run"):
        run.manager(tmp_path).load(run.state)


def test_a_changed_dtype_is_said(tmp_path, caplog):
    _saved(tmp_path, 1)
    run = TinyRun(False, seed=2)
    run.model.to(torch.bfloat16)
    run.manager(tmp_path).load(run.state)
    assert "are converted" in caplog.text and "float32 to torch.bfloat16" in caplog.text
    assert torch.equal(run.model.norm.weight, expected(1)["model.norm.weight"].bfloat16())


def test_parts_can_be_left_out(tmp_path):
    _saved(tmp_path, 1)
    run, _, loaded = _load(tmp_path, exclude_from_loading=["optimizer", "dataloader"])
    assert sorted(loaded) == ["model", "rng", "train_state"]
    wanted = expected(99) | {k: v for k, v in expected(1).items() if k.startswith("model.")}
    assert_same(run.full(), wanted)
    with pytest.raises(ValueError, match="exclude_from_loading"):
        run.manager(tmp_path, exclude_from_loading=["optimiser"])


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_an_async_save_holds_the_values_of_its_step(tmp_path, monkeypatch, mode):
    write = dcp_format.MarkedWriter.write_data

    training_went_on = threading.Event()

    def held(self, plan, planner):
        assert training_went_on.wait(60), "the save did not return before its file was written"
        return write(self, plan, planner)

    monkeypatch.setattr(dcp_format.MarkedWriter, "write_data", held)
    run = TinyRun(False, seed=4)
    manager = run.manager(tmp_path, async_mode=mode, keep_latest_k=2)
    for step in (4, 5, 6):  # the host buffers are used again
        before = run.full()
        training_went_on.clear()
        manager.save(step, run.state)
        run.mutate()
        training_went_on.set()
        manager.maybe_wait()
        reader = TinyRun(False, seed=8)
        reader.manager(tmp_path).load(reader.state)
        assert_same(reader.full(), before)
    manager.close()
    manager.close()
    assert layout.list_steps(tmp_path / "checkpoint") == [5, 6]


def test_a_stop_during_an_async_save_waits_for_it(tmp_path):
    run = TinyRun(False, seed=4)
    manager = run.manager(tmp_path, async_mode="async")
    manager.save(4, run.state)
    manager.close()
    assert _load(tmp_path)[2]["train_state"]["step"] == 4


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_failed_save_is_an_error_and_leaves_the_older_one(tmp_path, monkeypatch, mode):
    _saved(tmp_path, 1)

    def full_disk(self, plan, planner):
        raise OSError("No space left on device")

    run = TinyRun(False, seed=2)
    manager = run.manager(tmp_path, async_mode=mode)
    monkeypatch.setattr(dcp_format.MarkedWriter, "write_data", full_disk)
    with pytest.raises(CheckpointError, match=r"saving step 2 .*No space left on device"):
        manager.save(2, run.state)
        manager.save(3, run.state)  # an asynchronous failure surfaces here
    monkeypatch.undo()
    assert layout.list_steps(tmp_path / "checkpoint") == [1]
    manager.close()
    assert _load(tmp_path)[2]["train_state"]["step"] == 1


def test_initial_load_from_a_checkpoint(tmp_path):
    other = _saved(tmp_path / "other", 2, 7)
    for path, step in ((other, 7), (other / "step-2", 2)):
        run, manager, loaded = _load(tmp_path / "new", initial_load_path=str(path))
        assert sorted(loaded) == ["model"]
        wanted = expected(99) | {k: v for k, v in expected(step).items() if k.startswith("model.")}
        assert_same(run.full(), wanted)
    _, manager, loaded = _load(tmp_path / "new", initial_load_path=str(other), initial_load_model_only=False)
    assert loaded["train_state"]["step"] == 7 and manager.loaded_from == other / "step-7"
    # A run that has its own checkpoints resumes from them.
    _saved(tmp_path / "new", 3)
    assert _load(tmp_path / "new", initial_load_path=str(other))[2]["train_state"]["step"] == 3


def test_wrong_initial_paths_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="initial_load_path"):
        _load(tmp_path, initial_load_path=str(tmp_path / "absent"))
    (tmp_path / "foreign").mkdir()
    torch.save({}, tmp_path / "foreign" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"read from .safetensors alone"):
        _load(tmp_path, initial_load_path=str(tmp_path / "foreign"))


def test_a_layer_that_is_not_a_module_of_ours_round_trips(tmp_path):
    """Zero-dimensional, empty and integer tensors."""
    module = nn.Module()
    module.register_buffer("count", torch.tensor(3))
    module.register_buffer("none", torch.empty(0, 4))
    run = TinyRun(False, seed=1)
    manager = run.manager(tmp_path)
    manager.save(1, {"model": module.state_dict()})
    module.count.zero_()
    manager.load({"model": module.state_dict()})
    assert module.count == 3
