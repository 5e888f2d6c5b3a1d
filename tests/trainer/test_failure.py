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


def test_gloo_says_what_happened_and_no_more():
    lost = (
        "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9. This is typically"
        " caused by a remote worker crashing. Check the logs of the remote worker before reporting an error."
        " GLHF! 🏖️"
    )
    told = failure.one_line(_raised(RuntimeError(lost)))
    assert told.startswith("RuntimeError: Connection closed by peer [127.0.0.1]:9 (test_failure.py:")
    cut = f"the loss over dp failed ({lost[:150]}): a rank is slower than comm.train_timeout_seconds"
    told = failure.one_line(_raised(RuntimeError(cut)))
    assert "failed (Connection closed by peer [127.0.0.1]:9): a rank is slower" in told


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
