"""Two runs in one dump folder: the second one is refused, on all its ranks, and the first goes on."""

from __future__ import annotations

from tests.trainer.runs import argv, train_each, training_lines, write_corpus
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
