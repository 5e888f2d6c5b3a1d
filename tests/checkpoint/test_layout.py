"""Folders, markers, renaming and deleting, without any tensor."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from titanforge.checkpoint import layout


def _checkpoint(folder, text="content"):
    folder.mkdir(parents=True)
    (folder / "data").write_text(text)
    layout.write_marker(folder, {"data": layout.fingerprint(folder / "data")}, step=1)
    return folder


def test_a_complete_folder_has_no_reason_against_it(tmp_path):
    folder = _checkpoint(tmp_path / "step-1")
    assert layout.why_incomplete(folder) is None
    assert layout.why_corrupt(folder, ["data"]) is None


def _truncate(folder):
    os.truncate(folder / "data", 3)


def _delete(folder):
    (folder / "data").unlink()


def _no_marker(folder):
    (folder / layout.MARKER).unlink()


def _half_a_marker(folder):
    os.truncate(folder / layout.MARKER, 20)


def _edit_marker(**changes):
    def edit(folder):
        content = json.loads((folder / layout.MARKER).read_text())
        (folder / layout.MARKER).write_text(json.dumps({**content, **changes}))

    return edit


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncate, "data has 3 bytes, 7 were written"),
        (_delete, "data is missing"),
        (_no_marker, "has no complete.json"),
        (_half_a_marker, "complete.json cannot be read"),
        (_edit_marker(format="other"), "not a titanforge marker"),
        (_edit_marker(version=99), "version 99"),
        (_edit_marker(files=[1]), "lists no files"),
        (_edit_marker(files={"../x": {"bytes": 1, "crc32": "0"}}), "outside its folder"),
        (_edit_marker(files={"..": {"bytes": 1, "crc32": "0"}}), "outside its folder"),
    ],
)
def test_damage_is_named(tmp_path, damage, reason):
    folder = _checkpoint(tmp_path / "step-1")
    damage(folder)
    assert reason in layout.why_incomplete(folder)


def test_altered_content_of_the_same_size_is_named(tmp_path):
    folder = _checkpoint(tmp_path / "step-1")
    (folder / "data").write_text("CONTENT")
    assert layout.why_incomplete(folder) is None
    assert "data has checksum" in layout.why_corrupt(folder, ["data"])


def test_only_step_folders_are_steps(tmp_path):
    for name in ("step-3", "step-20", "step-x", "step-4.tmp", "my-step-5", "export-step-6"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-9").write_text("a file")
    assert layout.list_steps(tmp_path) == [3, 20]
    assert layout.list_exports(tmp_path) == [6]
    assert layout.list_steps(tmp_path / "absent") == []


def test_publish_replaces_an_older_folder_of_the_same_step(tmp_path):
    final = _checkpoint(tmp_path / "step-1", "old")
    layout.publish(_checkpoint(tmp_path / "step-1.tmp", "new"), final)
    assert (final / "data").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_tidy_finishes_or_clears_what_a_killed_process_left(tmp_path):
    _checkpoint(tmp_path / "step-1.tmp", "complete, not yet renamed")
    _checkpoint(tmp_path / "step-1.replaced.tmp", "its predecessor")
    (tmp_path / "step-2.tmp").mkdir()  # stopped while writing
    _checkpoint(tmp_path / "step-3.replaced.tmp", "killed between two renames")
    _checkpoint(tmp_path / "step-4.deleted.tmp", "killed while deleting")
    (tmp_path / "notes.tmp").mkdir()  # not ours
    assert len(layout.tidy(tmp_path)) == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.tmp", "step-1", "step-3"]
    assert (tmp_path / "step-1" / "data").read_text() == "complete, not yet renamed"
    assert (tmp_path / "step-3" / "data").read_text() == "killed between two renames"


def test_purge_keeps_the_newest_whole_ones_and_touches_nothing_else(tmp_path):
    for step in (1, 2, 3, 4):
        _checkpoint(tmp_path / f"step-{step}")
    _truncate(tmp_path / "step-4")
    (tmp_path / "step-9").mkdir()  # foreign
    assert layout.purge(tmp_path, 2) == [1]
    assert layout.list_steps(tmp_path) == [2, 3, 4, 9]
    assert layout.purge(tmp_path, 0) == []


def test_purge_does_not_let_steps_left_behind_push_out_the_new_ones(tmp_path):
    for step in (1, 2, 3, 8, 9):
        _checkpoint(tmp_path / f"step-{step}")
    assert layout.purge(tmp_path, 2, saved=3) == [1]
    assert layout.list_steps(tmp_path) == [2, 3, 8, 9]


def test_a_failed_deletion_warns_and_the_next_goes_on(tmp_path, monkeypatch, caplog):
    for step in (1, 2, 3):
        _checkpoint(tmp_path / f"step-{step}")
    delete = shutil.rmtree

    def refuse_step_1(path, **options):
        if "step-1" in str(path):
            raise OSError("stale file handle")
        delete(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse_step_1)
    assert layout.purge(tmp_path, 1) == [2]
    assert "stale file handle" in caplog.text
    assert layout.list_steps(tmp_path) == [3]
