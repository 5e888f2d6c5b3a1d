"""What one layout saved, every other layout loads, bit for bit; uneven and empty shards included."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.runs import TinyRun, assert_same, expected
from tests.distributed_harness import run_distributed

# Widths that 2 and 4 ranks do not divide; 3 leaves the fourth rank without a row of the norms.
UNEVEN = 3


def _save(rank, world_size, folder, sharded, replicate, mode):
    run = TinyRun(sharded, seed=5, width=UNEVEN, replicate=replicate)
    manager = run.manager(folder, async_mode=mode)
    assert manager.save(5, run.state)
    run.mutate()
    manager.close()
    return torch.get_rng_state()


def _load(rank, world_size, folder, sharded):
    run = TinyRun(sharded, seed=6, width=UNEVEN)
    manager = run.manager(folder)
    loaded = manager.load(run.state)
    assert_same(run.full(), expected(5, UNEVEN))
    assert loaded["train_state"] == {"step": 5, "tokens_seen": 2**60 + 5}
    assert loaded["optimizer"]["rule"] == "AdamW" and loaded["optimizer"]["lr"] == 5.1
    assert loaded["dataloader"]["streams"] == {0: (1, 2), 7: (3, 4)}
    assert torch.equal(loaded["dataloader"]["order"], torch.arange(3))
    # The returned tensors are the run's own, filled in place.
    slots = run.moments["norm.weight"]
    assert loaded["optimizer"]["state"]["norm.weight"]["exp_avg"] is slots["exp_avg"]
    return loaded.get("rng", {}).get("cpu")


@pytest.mark.parametrize(
    ("world_size", "sharded", "replicate", "mode"),
    [(4, True, 1, "disabled"), (4, True, 2, "async"), (2, False, 1, "async"), (1, False, 1, "disabled")],
    ids=["fsdp4", "hsdp2x2-async", "replicas2-async", "one"],
)
def test_any_layout_loads_what_another_saved(tmp_path, world_size, sharded, replicate, mode):
    saved_rng = run_distributed(_save, world_size, tmp_path, sharded, replicate, mode)
    for readers, reader_sharded in [(2, True), (1, False)]:
        found_rng = run_distributed(_load, readers, tmp_path, reader_sharded)
        for rank, state in enumerate(found_rng):
            if rank < world_size:
                assert torch.equal(state, saved_rng[rank])
            else:
                assert state is None, "a rank that did not exist has no generator to restore"


def test_more_ranks_than_rows(tmp_path):
    run_distributed(_save, 1, tmp_path, False, 1, "disabled")
    run_distributed(_load, 4, tmp_path, True)
