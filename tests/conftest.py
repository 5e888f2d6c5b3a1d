"""What holds for every test, and how they are dealt to several workers (`pytest -n 2`)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

# A fixture of these trains or compares on processes of its own, once for all their tests.
TOGETHER = {
    "tests/scripts/test_gates.py",
    "tests/sync/test_every_step.py",
    "tests/sync/test_local_steps.py",
    "tests/trainer/test_pipeline.py",
    "tests/trainer/test_split_models.py",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Test by test to whichever worker is free, but the files above whole, and first."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in TOGETHER else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a worker the long tests, those that train, come early: the last to end must not be one of them."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith("tests/trainer/"))


@pytest.fixture(autouse=True)
def signals_left_alone() -> Iterator[None]:
    """A trainer that is not closed would keep pytest from ending when it is told to."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)
    assert after == before, "the test left handlers of signals behind: close its trainers"
