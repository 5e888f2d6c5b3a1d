"""Policies that leave replicas alone: the same steps as every_step, decisions, drift, bytes, resume."""

from __future__ import annotations

import functools
import math
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed_harness import run_distributed
from tests.sync.replicas import Run, differences, local, unequal
from titanforge.sync import EveryStep, Rmmc, Scheduled, StatesEveryStep
from titanforge.sync.rmmc import relative_change

INF = math.inf
RULES = ("sgd", "muon", "dion", "dobb", "adamw")
SHARDED_RULES = ("sgd", "muon", "adamw")


def _groups(run: Run) -> Any:
    return run.mesh["dp_replicate"].get_group()


def _train(run: Run, steps: int) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        run.step()
    return run.everything()


def always_sync(rank: int, world_size: int, shards: int, uneven: bool) -> None:
    for rule in RULES if shards == 1 else SHARDED_RULES:
        reference = Run(StatesEveryStep(), rule, shards, uneven)
        wanted = _train(reference, 4)
        for policy in (Scheduled(1), Rmmc(-1.0), Rmmc(INF, warmup_steps=4)):
            run = Run(policy, rule, shards, uneven)
            assert unequal(_train(run, 4), wanted) == [], (rule, policy.name)
            assert differences(_groups(run), run.everything()) == []
        if rule == "sgd":  # a mean of Adam's states, for one, is not the state of the mean gradient
            plain = Run(EveryStep(), rule, shards, uneven)
            _train(plain, 4)
            for name, weight in plain.weights().items():
                torch.testing.assert_close(reference.weights()[name], weight, rtol=1e-4, atol=1e-6)


def mean_of_states(rank: int, world_size: int) -> None:
    """Against arithmetic written out here, in the order M <- mu M + G, mean, U, without any policy."""
    run, by_hand = Run(Scheduled(1), "sgd", weight_decay=0.0), Run(Scheduled(1), "sgd", weight_decay=0.0)
    momenta = {name: torch.zeros_like(p) for name, p in by_hand.model.named_parameters()}
    for _ in range(3):
        run.step()
        by_hand.backward()
        for name, param in by_hand.model.named_parameters():
            momentum = (0.9 * momenta[name] + param.grad) / world_size
            dist.all_reduce(momentum)
            momenta[name] = momentum
            param.data -= 2e-2 * momentum
        by_hand.count += 1
    for name, weight in by_hand.weights().items():
        torch.testing.assert_close(run.weights()[name], weight, rtol=1e-6, atol=1e-7)


def local_phases(rank: int, world_size: int, shards: int) -> None:
    for rule in RULES if shards == 1 else SHARDED_RULES:
        for kind in ("gradient", "momentum", "orthonormal"):
            run = Run(Scheduled(3, local=local(kind, 1e-3)), rule, shards)
            reasons = []
            for _ in range(6):
                reasons.append(run.step())
                apart = differences(_groups(run), run.weights())
                assert bool(apart) == (reasons[-1] is None), (rule, kind, reasons, apart)
            assert reasons == [None, None, "scheduled"] * 2
            assert differences(_groups(run), run.everything()) == []
            assert 0 < float(run.policy.metrics()["sync/last_drift"]) < 1
            assert run.policy.metrics()["sync/rate"] == pytest.approx(1 / 3)


def local_steps_by_hand(rank: int, world_size: int) -> None:
    for kind in ("gradient", "momentum"):
        run = Run(Scheduled(100, local=local(kind, 5e-3)), "muon")
        before = run.weights()
        run.backward()
        gradients = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        run.policy.step(run.optimizer, torch.tensor(1.0), torch.tensor(0.5))
        for name in ("layers.0.weight", "layers.1.weight"):  # the matrices
            # After one step the momentum is the gradient; 0.5 is the clip factor.
            torch.testing.assert_close(run.weights()[name], before[name] - 5e-3 * 0.5 * gradients[name])
            torch.testing.assert_close(run.everything()[f"{name}/m"], 0.5 * gradients[name])


def never(rank: int, world_size: int) -> None:
    run = Run(Rmmc(INF, warmup_steps=2, max_interval=3))
    reasons = [run.step() for _ in range(11)]
    every = "max_interval"
    assert reasons == ["warm-up", "warm-up", None, None, None, every, None, None, None, every, None]
    run = Run(Rmmc(INF))
    assert [run.step() for _ in range(6)] == [None] * 6
    assert run.ledger.total("dp_replicate", "states").count == 0
    assert run.ledger.total("dp_replicate", "decision").count == 6
    run.policy.synchronize("evaluation")
    assert [event["sync"] for event in run.policy.take_events()] == ["evaluation"]
    assert differences(_groups(run), run.everything()) == []
    run.policy.synchronize("checkpoint")  # they are coherent already
    assert run.policy.take_events() == []


class _Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(4))
        self.b = torch.nn.Parameter(torch.ones(2, 3))


def hand_computed(rank: int, world_size: int) -> list[tuple[float, bool]]:
    """Momentum factor 0.5; a gradient filled with g has momentum m of norm |m| sqrt(n)."""
    from titanforge.config.sections import Optimizer
    from titanforge.optim import build_optimizer
    from titanforge.sync import CommLedger

    model = _Toy()
    optimizer = build_optimizer(
        model, Optimizer(name="sgd", momentum=0.5, lr=0.1, weight_decay=0.0), "float32"
    )
    policy = Rmmc(0.3, local=local("gradient"))
    policy.attach(model, dist.group.WORLD, CommLedger(), optimizer=optimizer, world_group=dist.group.WORLD)
    # Per step: gradient of a, of b, on rank 0 and 1.
    gradients = [(1, 2, 1, 2), (0.5, 1, 0.5, 1), (0.7, 1, 0.5, 1), (0.5, 0.8, 1.1, 1.2), (0.5, 1, 0.5, 1)]
    decisions = []
    for step in gradients:
        model.a.grad = torch.full((4,), float(step[2 * rank]))
        model.b.grad = torch.full((2, 3), float(step[2 * rank + 1]))
        policy.begin_step(1, [10, 10])
        policy.step(optimizer, torch.tensor(1.0), torch.tensor(1.0))
        decisions.append((policy.last, bool(policy.take_events())))
    return decisions


def test_decisions_are_those_computed_by_hand():
    ours, theirs = run_distributed(hand_computed, 2)
    assert ours == theirs
    values, syncs = zip(*ours)
    # 1: no norm before: infinite. m_a = 1, m_b = 2 on both.                                       sync
    # 2: a: |0.5 + 0.5 - 1| = 0; b: |1 + 1 - 2| = 0.
    # 3: rank 0: a: 0.5 + 0.7 = 1.2, 0.2; b: 1 + 1 = 2, 0. rank 1: a: 1, 0; b: 0.                   0.2
    # 4: rank 0: a: 0.6 + 0.5 = 1.1, |1.1 - 1.2| / 1.2; b: 1.8, 0.1.
    #    rank 1: a: 0.5 + 1.1 = 1.6, 0.6; b: 2.2, 0.1.                                              0.6 sync
    #    means: a: 1.35, b: 2.
    # 5: a: 0.675 + 0.5 = 1.175, 0.175 / 1.35; b: 2, 0.
    assert values == pytest.approx((INF, 0.0, 0.2, 0.6, 0.175 / 1.35), abs=1e-6)
    assert syncs == (True, False, False, True, False)


def test_equation_1():
    norms = torch.tensor([1.5, 0.5, 2.0, 0.0, 0.0, math.nan])
    previous = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    assert relative_change(norms, previous).tolist() == [0.5, 0.5, INF, 0.0, 1.0, INF]


def norms_over_shards(rank: int, world_size: int) -> None:
    run = Run(Rmmc(0.5), "sgd", shards=2)
    for _ in range(3):
        run.step()
        expected = []
        for item in run.policy._layers():
            square = item.tensor.square().sum()
            dist.all_reduce(square, group=run.mesh["dp_shard"].get_group())
            expected.append(square.sqrt())
        torch.testing.assert_close(run.policy.norms(), torch.stack(expected))
        assert differences(run.mesh["dp_shard"].get_group(), {"norms": run.policy.norms()}) == []
    assert run.ledger.total("dp_shard", "rmmc norms").bytes % (4 * len(expected)) == 0


def same_decisions(rank: int, world_size: int, shards: int) -> None:
    run = Run(Rmmc(0.25, max_interval=4), "sgd", shards, uneven=True)
    decisions = [run.step() for _ in range(16)]
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, decisions)
    assert all(each == decisions for each in everywhere)
    assert len(set(decisions)) > 1, "some steps sync and some do not, or nothing is shown"


def bytes_on_the_wire(rank: int, world_size: int) -> None:
    run = Run(Rmmc(INF, warmup_steps=1, max_interval=3), "muon")
    tensors = run.optimizer.replicated_tensors()

    def elements(splits: bool, weights: bool) -> int:
        return sum(
            t.tensor.numel() for t in tensors if t.splits == splits and (t.slot == "weight") == weights
        )

    states = elements(True, False) + elements(False, False)
    first = [run.step()]
    # The weights of rules that wait have never come apart, so they are not sent.
    assert run.ledger.total("dp_replicate", "states").bytes == 4 * states
    assert run.ledger.total("dp_replicate", "weights").bytes == 4 * elements(False, True)
    reasons = first + [run.step() for _ in range(4)]
    assert reasons == ["warm-up", None, None, None, "max_interval"]
    assert run.ledger.total("dp_replicate", "states").bytes == 2 * 4 * states
    weights = 2 * elements(False, True) + elements(True, True)
    assert run.ledger.total("dp_replicate", "weights").bytes == 4 * weights
    decision, drift = run.ledger.total("dp_replicate", "decision"), run.ledger.total("dp_replicate", "drift")
    assert (decision.bytes, decision.count) == (4 * 5, 5)
    assert (drift.bytes, drift.count) == (8 * 2, 2)
    assert run.ledger.total().bytes == 8 * states + 4 * weights + 20 + 16


def resumed(rank: int, world_size: int, rule: str) -> None:
    def new() -> Run:
        return Run(Rmmc(2.0, max_interval=5, warmup_steps=1), rule)

    whole = new()
    for _ in range(4):
        whole.step()
    assert whole.policy.local_steps > 0, "the save must fall into a local phase"
    whole.policy.synchronize("checkpoint")
    assert [event["sync"] for event in whole.policy.take_events()] == ["checkpoint"]
    saved = (
        {name: value.clone() for name, value in whole.model.state_dict().items()},
        whole.policy.state_dict(),
    )
    states = _copied(whole.optimizer.state_dict())
    decisions = [whole.step() for _ in range(8)]

    other = new()
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(states)
    other.policy.load_state_dict(saved[1])
    other.count = 4
    assert [other.step() for _ in range(8)] == decisions
    assert unequal(other.everything(), whole.everything()) == []


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def skipped(rank: int, world_size: int) -> None:
    for rule in RULES:
        for kind in ("gradient", "momentum", "orthonormal"):
            run = Run(Scheduled(100, local=local(kind)), rule)
            run.step()
            before = run.everything()
            for param in run.model.parameters():
                param.grad = torch.full_like(param, math.nan)
            run.policy.step(run.optimizer, torch.tensor(0.0), torch.tensor(0.0))
            assert unequal(run.everything(), before) == [], (rule, kind)
            assert int(run.optimizer.step_count) == 1


def without_averaged_weights(rank: int, world_size: int) -> None:
    run = Run(Scheduled(2, average_parameters=False), "muon")
    for _ in range(4):
        run.step()
    states = {name: value for name, value in run.everything().items() if not name.endswith("/weight")}
    assert differences(_groups(run), states) == []
    assert differences(_groups(run), run.weights())
    run.policy.synchronize("checkpoint")
    assert differences(_groups(run), run.everything()) == []


CHECKS = {
    # Name: processes, what each runs, arguments. Those of one number of processes share a group of them.
    "H = 1 and tau < 0 are every_step on states, bit for bit": (2, always_sync, (1, False)),
    "the same where replicas count different tokens": (2, always_sync, (1, True)),
    "the same inside HSDP": (4, always_sync, (2, True)),
    "momentum is averaged before the update": (4, mean_of_states, ()),
    "replicas come apart and are together after each sync": (2, local_phases, (1,)),
    "the same for four": (4, local_phases, (1,)),
    "the same for shards of replicas": (4, local_phases, (2,)),
    "local steps follow gradient or momentum": (2, local_steps_by_hand, ()),
    "tau = inf syncs by warm-up and max_interval alone": (2, never, ()),
    "norms are of whole layers under FSDP": (4, norms_over_shards, ()),
    "all replicas decide alike": (4, same_decisions, (1,)),
    "all shards of all replicas decide alike": (4, same_decisions, (2,)),
    "ledger bytes are the arithmetic": (2, bytes_on_the_wire, ()),
    "resume from a save amid local steps, Muon": (2, resumed, ("muon",)),
    "resume from a save amid local steps, SGD": (2, resumed, ("sgd",)),
    "resume from a save amid local steps, Dion": (2, resumed, ("dion",)),
    "a step that is not applied changes nothing": (2, skipped, ()),
    "weights may stay apart until a checkpoint": (2, without_averaged_weights, ()),
}


def _run_checks(rank: int, world_size: int) -> dict[str, str]:
    results = {}
    for name, (processes, check, arguments) in CHECKS.items():
        if processes == world_size:
            try:
                check(rank, world_size, *arguments)
                results[name] = ""
            except AssertionError:
                results[name] = traceback.format_exc()
    return results


@functools.cache
def _results(processes: int) -> list[dict[str, str]]:
    return run_distributed(_run_checks, processes, timeout=240)


@pytest.mark.parametrize("name", CHECKS)
def test_replicas(name):
    for rank, results in enumerate(_results(CHECKS[name][0])):
        assert not results[name], f"rank {rank}: {results[name]}"


def one_gone(rank: int, world_size: int) -> str:
    from titanforge.sync import ReplicaLost

    run = Run(Rmmc(0.5), "sgd")
    run.step()
    if rank == 1:
        return ""
    # The peer has left: its group is destroyed at once.
    try:
        for _ in range(3):
            run.step()
    except ReplicaLost as error:
        return str(error)
    return "nothing was raised"


def test_a_lost_replica_is_told_within_the_timeout():
    message, _ = run_distributed(one_gone, 2, timeout=90)
    assert "gone or slower than comm.train_timeout_seconds" in message
    assert "parallelism.data_parallel_replicate_degree" in message
