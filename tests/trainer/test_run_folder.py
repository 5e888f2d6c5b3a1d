"""The dump folder: a second run in it is refused, on all its ranks; the configuration is written into it."""

from __future__ import annotations

import errno
import fcntl

from tests.trainer.runs import argv, train_each, training_lines, write_corpus
from titanforge.config import load_config, to_toml
from titanforge.run_folder import FolderLock


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    run = argv(tmp_path / "run", corpus, training__steps=2)
    lock = FolderLock(tmp_path / "run")
    (ranks,) = train_each(2, [run])
    assert [code for code, _ in ranks] == [2, 2]
    assert "job.dump_folder" in ranks[0][1] and "another run" in ranks[0][1]
    assert not list((tmp_path / "run").iterdir())
    lock.close()
    first, second = train_each(1, [run, run])
    assert first[0][0] == second[0][0] == 0
    assert len(training_lines(tmp_path / "run")) == 2


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    FolderLock(tmp_path / "run").close()
    assert "cannot be locked" in caplog.text and str(tmp_path / "run") in caplog.text


def test_the_merged_configuration_is_written_and_repeats_the_run(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    run = argv(tmp_path / "run", corpus, training__steps=2, job__save_config_file="kept/config.toml")
    blocked = argv(tmp_path / "blocked", corpus, training__steps=2, job__save_config_file="../corpus.jsonl/x")
    (first,), (second,) = train_each(1, [run, blocked])
    assert first[0] == 0
    saved = tmp_path / "run" / "kept" / "config.toml"
    again = load_config([f"--job.config_file={saved}"])
    again.job.config_file = load_config(run).job.config_file
    assert to_toml(again) == to_toml(load_config(run))
    assert second[0] == 2
    assert "job.save_config_file" in second[1] and "job.dump_folder" not in second[1]
