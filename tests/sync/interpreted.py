"""Run with TRITON_INTERPRET=1: `rmmc` on replicas whose momentum kernel leaves the norms, on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.distributed_harness import run_distributed
from tests.sync.replicas import Run
from titanforge.config.sections import DionOptions
from titanforge.kernels._triton import INTERPRET
from titanforge.sync import Rmmc

STEPS = 7
RUNS: dict[str, tuple[int, dict[str, Any], int]] = {
    # Rule: shards of a replica, options, passes over momenta at a sync. Averaged momenta are read again;
    # those of Dion go by their factors (r = 2 of 6 x 6 matrices) and stay.
    "muon": (1, {}, 1),
    "rmnp": (2, {}, 1),
    "dion": (1, {"dion": DionOptions(rank_fraction=0.34)}, 0),
}


class Passes:
    """Counts passes over tensors for their norms."""

    def __init__(self) -> None:
        self.count, self._norm = 0, torch._foreach_norm

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        return self._norm(*args, **options)


def train(rule: str, passes: Passes, ahead: bool) -> tuple[list[float], list[str | None], dict[str, Any]]:
    """Changes that the decisions went by, what each step was, weights and states after them. ahead: whether
    local steps are launched before it is decided that they are.
    """
    shards, options, at_sync = RUNS[rule]
    run = Run(Rmmc(0.5, max_interval=2, warmup_steps=1), rule, shards, **options)
    policy: Any = run.policy
    policy._ahead = ahead
    names = [item.name for item in policy.layers]
    assert list(policy.squares) == names == ["layers.0.weight", "layers.1.weight"]
    changes, reasons = [], []
    ask = policy.ask

    def ask_once(*args: Any, **options: Any) -> Any:
        expected, before = policy.norms(), passes.count
        local = ask(*args, **options)
        assert passes.count == before, "a pass over momenta whose norms A has left"
        torch.testing.assert_close(policy._previous, expected, rtol=1e-6, atol=0)
        passes.count = 0
        return local

    policy.ask = ask_once
    for step in range(STEPS):
        # A step that is left out keeps its momenta, and so their norms.
        reasons.append(run.step(flag=float(step != 5)))
        assert passes.count == (at_sync if reasons[-1] else 0)
        changes.append(policy.last)
    return changes, reasons, {name: tensor.tolist() for name, tensor in run.everything().items()}


def check(rank: int, world_size: int) -> dict[str, list[str | None]]:
    assert INTERPRET
    passes, found = Passes(), {}
    torch._foreach_norm = passes
    for rule, (shards, *_) in RUNS.items():
        if world_size != 2 * shards:
            continue
        waiting = train(rule, passes, ahead=False)
        assert train(rule, passes, ahead=True) == waiting, f"{rule}: not the same bits on repeat"
        reasons = waiting[1]
        assert None in reasons and len(set(reasons)) > 2, "local steps and syncs of several kinds"
        found[rule] = reasons
    return found


def main() -> int:
    for world_size in (2, 4):
        first, *others = run_distributed(check, world_size, timeout=200)
        assert all(one == first for one in others)
        print(first)
    return 0


if __name__ == "__main__":
    sys.exit(main())
