"""A checkpoint folder from a stranger runs no code, whatever it holds."""

from __future__ import annotations

import dataclasses
import os
import pickle
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.checkpoint.runs import TinyRun, assert_same, expected
from titanforge.checkpoint import CheckpointError, layout
from titanforge.checkpoint.dcp_format import read_table


class _CreatesAFile:
    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _remark(folder):
    """The attacker writes a perfect marker too."""
    files = {p.name: layout.fingerprint(p) for p in folder.iterdir() if p.name != layout.MARKER}
    layout.write_marker(folder, files, step=1)


def _hostile_table(folder, trap):
    (folder / ".metadata").write_bytes(pickle.dumps(_CreatesAFile(trap)))


def _hostile_inside_table(folder, trap):
    table = read_table(folder)
    table.planner_data = _CreatesAFile(trap)
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def _hostile_bytes_item(folder, trap):
    """DCP would unpickle a byte item with weights_only=False."""
    table = read_table(folder)
    name = next(iter(table.state_dict_metadata))
    table.state_dict_metadata[name] = BytesStorageMetadata()
    index = next(i for i in table.storage_data if i.fqn == name)
    place = table.storage_data.pop(index)
    torch.save(_CreatesAFile(trap), folder / "evil.distcp")
    size = (folder / "evil.distcp").stat().st_size
    table.storage_data[index] = dataclasses.replace(place, relative_path="evil.distcp", offset=0, length=size)
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def _hostile_tensor(folder, trap):
    """A tensor's bytes are a pickle of something else."""
    table = read_table(folder)
    index = next(iter(table.storage_data))
    torch.save(_CreatesAFile(trap), folder / "evil.distcp")
    size = (folder / "evil.distcp").stat().st_size
    place = table.storage_data[index]
    table.storage_data[index] = dataclasses.replace(place, relative_path="evil.distcp", offset=0, length=size)
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def _file_outside(folder, trap):
    table = read_table(folder)
    index = next(iter(table.storage_data))
    place = table.storage_data[index]
    table.storage_data[index] = dataclasses.replace(place, relative_path="../secret")
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def _garbage(folder, trap):
    (folder / ".metadata").write_bytes(b"\x80\x04garbage")


@pytest.fixture
def good_and_bad(tmp_path, one_process):
    """step-1 is good, step-2 is to be tampered with."""
    for step in (1, 2):
        run = TinyRun(False, seed=step)
        run.manager(tmp_path / "run").save(step, run.state)
    return tmp_path / "run" / "checkpoint"


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (_hostile_table, "posix.mkdir"),
        (_hostile_inside_table, "posix.mkdir"),
        (_hostile_bytes_item, "a pickled object"),
        (_file_outside, "the marker does not list"),
        (_garbage, "not a checkpoint's table of contents"),
    ],
)
def test_a_hostile_table_is_named_and_skipped(good_and_bad, tmp_path, tamper, reason):
    trap = tmp_path / "trap"
    tamper(good_and_bad / "step-2", trap)
    _remark(good_and_bad / "step-2")
    run = TinyRun(False, seed=9)
    manager = run.manager(tmp_path / "run")
    assert manager.load(run.state)["train_state"]["step"] == 1
    assert not trap.exists()
    [(name, why)] = manager.skipped
    assert name == "step-2" and reason in why
    assert_same(run.full(), expected(1))


def test_a_hostile_tensor_is_refused(good_and_bad, tmp_path):
    trap = tmp_path / "trap"
    _hostile_tensor(good_and_bad / "step-2", trap)
    _remark(good_and_bad / "step-2")
    run = TinyRun(False, seed=9)
    with pytest.raises(CheckpointError, match=r"reading .*step-2 failed .*rank 0: Weights only load failed"):
        run.manager(tmp_path / "run").load(run.state)
    assert not trap.exists()


def test_the_traps_work(tmp_path):
    """The same pickles do create the folder where they are loaded without a guard."""
    pickle.loads(pickle.dumps(_CreatesAFile(tmp_path / "a")))
    torch.save(_CreatesAFile(tmp_path / "b"), tmp_path / "file")
    assert zipfile.is_zipfile(tmp_path / "file")
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()
