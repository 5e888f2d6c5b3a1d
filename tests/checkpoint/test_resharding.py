"""What one layout saved, every other layout loads, bit for bit; uneven and empty shards included."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.runs import TinyRun, assert_same, expected
from tests.distributed_harness import run_distributed

WIDTH = 3  # 2 ranks share it unevenly; of 4 ranks the last holds no row of a norm


def _save(folder, sharded, replicate=1, mode="disabled"):
    run = TinyRun(sharded, seed=5, width=WIDTH, replicate=replicate)
    manager = run.manager(folder, async_mode=mode)
    assert manager.save(5, run.state)
    run.mutate()  # an asynchronous save must not see this
    manager.close()


def _load(folder, sharded, saving_ranks):
    run = TinyRun(sharded, seed=6, width=WIDTH)
    loaded = run.manager(folder).load(run.state)
    assert_same(run.full(), expected(5, WIDTH))
    assert loaded["train_state"] == {"step": 5, "tokens_seen": 2**60 + 5}
    assert loaded["optimizer"]["rule"] == "AdamW" and loaded["optimizer"]["lr"] == 5.1
    assert loaded["dataloader"]["streams"] == {0: (1, 2), 7: (3, 4)}
    assert torch.equal(loaded["dataloader"]["order"], torch.arange(3))
    # The returned tensors are the run's own, filled in place.
    slots = run.moments["norm.weight"]
    assert loaded["optimizer"]["state"]["norm.weight"]["exp_avg"] is slots["exp_avg"]
    rank = run.runtime.rank
    if rank < saving_ranks:
        torch.manual_seed(5000 + rank)
        assert torch.equal(loaded["rng"]["cpu"], torch.get_rng_state())
    else:
        assert "rng" not in loaded, "a rank that did not exist has no generator to restore"


def _save_on_four(rank, world_size, folder):
    _save(folder / "fsdp4", True)
    _save(folder / "hsdp2x2", True, replicate=2, mode="async")


def _load_and_save_on_two(rank, world_size, folder):
    _load(folder / "fsdp4", True, saving_ranks=4)
    _load(folder / "hsdp2x2", False, saving_ranks=4)
    _save(folder / "replicas2", False, mode="async")
    _save(folder / "fsdp2", True)


def _load_on_four(rank, world_size, folder):
    _load(folder / "one", True, saving_ranks=1)
    _load(folder / "replicas2", True, saving_ranks=2)


@pytest.mark.slow
def test_any_layout_loads_what_another_saved(tmp_path, one_process):
    run_distributed(_save_on_four, 4, tmp_path)
    run_distributed(_load_and_save_on_two, 2, tmp_path)
    for name, saving_ranks in [("fsdp4", 4), ("hsdp2x2", 4), ("replicas2", 2), ("fsdp2", 2)]:
        _load(tmp_path / name, False, saving_ranks)
    _save(tmp_path / "one", False)
    run_distributed(_load_on_four, 4, tmp_path)
