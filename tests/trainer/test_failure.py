"""How an error is told: by whom, and in which words."""

from __future__ import annotations

import pytest

from titanforge import failure


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_message_that_names_a_key_is_shown_as_it_is():
    message = "training.steps = -1:\n   must be positive"
    assert failure.one_line(_raised(ValueError(message))) == "training.steps = -1: must be positive"


def test_an_unforeseen_message_comes_with_its_type_and_place():
    told = failure.one_line(_raised(OSError("disk.full")))
    assert told.startswith("OSError: disk.full (test_failure.py:")


@pytest.mark.parametrize(
    ("local_rank", "found_by_all", "told"),
    [
        (0, False, "error: why\n"),
        (0, True, "error: why\n"),
        (1, False, "error: rank 5: why\n"),
        (1, True, ""),
    ],
)
def test_the_first_rank_speaks_for_mistakes_that_all_make(
    monkeypatch, capsys, local_rank, found_by_all, told
):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("RANK", str(4 + local_rank))
    monkeypatch.setattr(failure, "_SECONDS_FOR_THE_FIRST", 0.0)
    failure.tell("why", found_by_all=found_by_all)
    assert capsys.readouterr().err == told
