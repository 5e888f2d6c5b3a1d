from __future__ import annotations

import gc
import weakref

import pytest

from titanforge.garbage import GarbageCollector


class Node:
    def __init__(self) -> None:
        self.me = self


def test_collects_on_schedule_and_never_in_between() -> None:
    collector = GarbageCollector(gc_freq=3)
    try:
        assert not gc.isenabled()
        node = Node()
        alive = weakref.ref(node)
        del node
        junk = [[] for _ in range(5000)]  # would trigger automatic collection
        assert not collector.run(1) and not collector.run(2)
        assert alive() is not None
        assert collector.run(3)
        assert alive() is None
        del junk
    finally:
        collector.close()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_bad_frequency_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"training\.gc_freq = 0"):
        GarbageCollector(0)
