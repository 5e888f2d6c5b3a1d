"""Policies that leave replicas alone: the same steps as every_step, decisions, drift, bytes, resume."""

from __future__ import annotations

import functools
import math
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.bench.replicas import ThreadGroup, ThreadLedger, run_replicas
from tests.distributed_harness import run_distributed
from tests.sync.replicas import Run, differences, local, unequal
from titanforge.config.sections import DionOptions, DobbOptions
from titanforge.sync import CollectiveFailed, EveryStep, Replication, Rmmc, Scheduled, StatesEveryStep
from titanforge.sync.policy import WORLD_AXIS
from titanforge.sync.rmmc import relative_change

INF = math.inf
RULES = ("sgd", "muon", "dion", "dobb", "adamw")
SHARDED_OPTIONS = {
    "sgd": {},
    "muon": {},
    "dion": {"dion": DionOptions(rank_fraction=0.34)},  # shards average its momenta all the same
    "dobb": {"dobb": DobbOptions(blocks=2, period=2)},  # a block of each matrix is on each shard
    "rmnp": {},
    "scion": {},
    "adamw": {},
}


def _rules(shards: int) -> dict[str, dict[str, Any]]:
    """Options by rule."""
    return SHARDED_OPTIONS if shards > 1 else {rule: {} for rule in RULES}


def _groups(run: Run) -> Any:
    return run.mesh["dp_replicate"].get_group()


def _train(run: Run, steps: int) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        run.step()
    return run.everything()


def always_sync(rank: int, world_size: int, shards: int, uneven: bool) -> None:
    for rule, options in _rules(shards).items():
        reference = Run(StatesEveryStep(), rule, shards, uneven, **options)
        wanted = _train(reference, 4)
        for policy in (Scheduled(1), Rmmc(-1.0), Rmmc(INF, warmup_steps=4)):
            run = Run(policy, rule, shards, uneven, **options)
            assert unequal(_train(run, 4), wanted) == [], (rule, policy.name)
            assert differences(_groups(run), run.everything()) == []
        if rule in ("sgd", "adamw"):  # the matrix rules turn round-off into steps
            plain = Run(EveryStep(), rule, shards, uneven)
            _train(plain, 4)
            for name, weight in plain.weights().items():
                torch.testing.assert_close(reference.weights()[name], weight, rtol=1e-4, atol=1e-6)


def sharded_as_whole(rank: int, world_size: int) -> None:
    """Two replicas of two shards each, beside four whole replicas: the same tokens, so the same steps."""
    for rule, options in SHARDED_OPTIONS.items():
        sharded, whole = (Run(StatesEveryStep(), rule, shards, **options) for shards in (2, 1))
        for _ in range(4):
            sharded.step()
            whole.step()
        weights = sharded.weights()
        for name, weight in whole.weights().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6, msg=f"{rule}: {name}")


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
    for rule, options in _rules(shards).items():
        for kind in ("gradient", "momentum", "orthonormal"):
            run = Run(Scheduled(3, local=local(kind, 1e-3)), rule, shards, **options)
            reasons = []
            for _ in range(6):
                reasons.append(run.step())
                apart = differences(_groups(run), run.weights())
                assert bool(apart) == (reasons[-1] is None), (rule, kind, reasons, apart)
            assert reasons == [None, None, "scheduled"] * 2
            assert differences(_groups(run), run.everything()) == []
            assert 0 < float(run.policy.metrics()["sync/last_drift"]) < 1
            assert run.policy.metrics()["sync/rate"] == pytest.approx(1 / 3)
            assert shards == 1 or run.ledger.total("dp_replicate", "factors").count == 0
            moments = run.ledger.total("dp_replicate", "second moments").count
            assert bool(moments) == (rule == "dobb"), "Dobb's cross replicas at each refresh, synced or not"


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
    assert run.ledger.total(WORLD_AXIS, "decision").count == 6
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
    policy.attach(model, Replication(dist.group.WORLD), CommLedger(), optimizer)
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
        for item in run.policy.layers:
            square = item.tensor.square().sum()
            dist.all_reduce(square, group=run.mesh["dp_shard"].get_group())
            expected.append(square.sqrt())
        torch.testing.assert_close(run.policy.norms(), torch.stack(expected))
        assert differences(run.mesh["dp_shard"].get_group(), {"norms": run.policy.norms()}) == []
    assert run.ledger.total("replica", "rmmc norms").bytes % (4 * len(expected)) == 0


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

    momenta, matrices = elements(True, False), elements(True, True)  # of Muon
    others, moments = elements(False, True), elements(False, False)  # of AdamW
    first = [run.step()]
    # AdamW waited for the decision and took the mean gradient, so no weight came apart.
    assert run.ledger.total("dp_replicate", "gradients").bytes == 4 * others
    assert run.ledger.total("dp_replicate", "states").bytes == 4 * momenta
    assert run.ledger.total("dp_replicate", "weights").bytes == 0
    reasons = first + [run.step() for _ in range(4)]
    assert reasons == ["warm-up", None, None, None, "max_interval"]
    assert run.ledger.total("dp_replicate", "gradients").bytes == 2 * 4 * others
    assert run.ledger.total("dp_replicate", "states").bytes == 4 * (2 * momenta + moments)
    assert run.ledger.total("dp_replicate", "weights").bytes == 4 * (others + matrices)
    decision, drift = run.ledger.total(WORLD_AXIS, "decision"), run.ledger.total(WORLD_AXIS, "drift")
    assert (decision.bytes, decision.count) == (8 * 5, 5)
    assert (drift.bytes, drift.count) == (8, 1)
    counted = 4 * (3 * others + 2 * momenta + moments + matrices) + 40 + 8
    assert run.ledger.total().bytes == counted


def one_clip_factor(rank: int, world_size: int) -> None:
    """Replicas that found other clip factors still take one step where they share the gradient."""
    run = Run(StatesEveryStep(), "adamw")
    for _ in range(2):
        run.optimizer.set_lr(1.0)
        run.backward()
        run.policy.step(run.optimizer, torch.tensor(1.0), torch.tensor(0.25 + 0.5 * rank))
        run.count += 1
        assert differences(_groups(run), run.everything()) == []
    assert run.ledger.total("dp_replicate", "states").bytes == 0


LOW_RANK = {"rule": "dion", "dion": DionOptions(rank_fraction=0.34)}  # r = 2 of the two 6 x 6 matrices
FACTOR_BYTES = 2 * 4 * 2 * (6 + 6)  # of one sync: two matrices, fp32, r (m + n)


def factors_against_dense(rank: int, world_size: int) -> None:
    for feedback in (True, False):
        options = {"rule": "dion", "dion": DionOptions(0.34, error_feedback=feedback)}
        dense = Run(StatesEveryStep(low_rank=False), **options)
        factors = Run(StatesEveryStep(), **options)
        for count in range(1, 5):
            dense.step()
            factors.step()
            for name, weight in factors.weights().items():
                torch.testing.assert_close(weight, dense.weights()[name], rtol=1e-4, atol=1e-5)
            assert differences(_groups(factors), factors.weights()) == []
            assert factors.ledger.total("dp_replicate", "factors").bytes == count * FACTOR_BYTES
        momenta = {name: value for name, value in factors.everything().items() if name.endswith("weight/m")}
        apart = differences(_groups(factors), momenta)
        assert apart == ["layers.0.weight/m", "layers.1.weight/m"], "no momentum was sent"
        for name in apart:
            total = momenta[name].clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total / world_size, dense.everything()[name], rtol=1e-4, atol=1e-6)
        saved = factors.ledger.total("dp_replicate", "states").bytes
        assert dense.ledger.total("dp_replicate", "states").bytes - saved == 4 * 2 * 4 * 36
        factors.policy.synchronize("checkpoint")
        assert differences(_groups(factors), factors.everything()) == []
        assert factors.ledger.total("dp_replicate", "states").bytes - saved >= 2 * 4 * 36


def factors_of_one_gradient(rank: int, world_size: int) -> None:
    """Halves of one number are exact: replicas that read the same agree with dense ones bit for bit."""
    runs = [Run(policy, **LOW_RANK) for policy in (StatesEveryStep(low_rank=False), StatesEveryStep())]
    for run in runs:
        run.batch = functools.partial(Run.batch, run, 0)
        run.batch = lambda replica, first=run.batch: first()  # type: ignore[method-assign]
        _train(run, 4)
    dense, factors = runs
    assert unequal(factors.everything(), dense.everything()) == []
    assert factors.ledger.total("dp_replicate", "factors").bytes == 4 * FACTOR_BYTES


def factors_after_local_steps(rank: int, world_size: int) -> None:
    run = Run(Scheduled(3), **LOW_RANK)
    reasons = []
    for _ in range(6):
        reasons.append(run.step())
        everything = run.everything()
        agreed = {name: value for name, value in everything.items() if not name.endswith(".weight/m")}
        apart = differences(_groups(run), agreed)
        assert bool(apart) == (reasons[-1] is None), (reasons, apart)
    assert reasons == [None, None, "scheduled"] * 2
    # What only U writes is shared before the sketches are made of it: they would have no mean.
    assert run.ledger.total("dp_replicate", "factors").bytes == 2 * FACTOR_BYTES


def resumed(rank: int, world_size: int, rule: str, ahead: bool = False, **options: Any) -> None:
    def new() -> Run:
        return _ahead(Run(Rmmc(2.0, max_interval=5, warmup_steps=1), rule, **options), ahead)

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


def launched_ahead(rank: int, world_size: int, shards: int) -> None:
    """A local step that is launched before the decision, beside one that waits for it: the same bits."""
    low_rank = {"dion": DionOptions(0.34, error_feedback=False)}
    cases = list(_rules(shards).items())
    cases += [("rmnp", {}), ("dion", low_rank)] if shards == 1 else []
    for rule, options in cases:
        for kind in ("gradient", "momentum", "orthonormal") if shards == 1 else ("orthonormal",):
            runs = [
                _ahead(Run(_often(kind), rule, shards, True, **options), ahead) for ahead in (True, False)
            ]
            told = []
            for step in range(10):
                # One replica leaves a step out, by itself where the step is not known to be a sync; the
                # sync that was due is made up for in the next one, known beforehand.
                alone = step in (1, 6) and not runs[0].policy.syncs_next
                flag = float(not alone or runs[0].replica != 1)
                told.append([run.step(flag, lr_factor=1 / (1 + step)) for run in runs])
                ours, theirs = runs
                assert unequal(ours.everything(), theirs.everything()) == [], (rule, kind, told)
                assert int(ours.optimizer.step_count) == int(theirs.optimizer.step_count)
                assert torch.equal(ours.optimizer.nonfinite_tiles, theirs.optimizer.nonfinite_tiles)
                assert ours.policy.state_dict() == theirs.policy.state_dict()
                assert (ours.policy.alarm, ours.policy.syncs_next) == (
                    theirs.policy.alarm, theirs.policy.syncs_next,
                )  # fmt: skip
            assert all(ours == theirs for ours, theirs in told), (rule, kind, told)
            reasons = {reason for reason, _ in told}
            assert {None, "rmmc", "warm-up"} <= reasons, (rule, kind, reasons)
            assert 0 < len(ours.policy.launched) < 10
            assert set(ours.policy.launched) == {rule != "dobb"}
            assert set(theirs.policy.launched) == {False}
            if shards == 1:
                assert ours.ledger.metrics() == theirs.ledger.metrics()


def launched_where_syncs_are_few(rank: int, world_size: int) -> None:
    """Launched ahead while fewer than one in eight of the recent decisions were for a sync."""
    run = _ahead(Run(_often("orthonormal"), "muon"), 1 / 8)
    recent, expected = 0.0, []
    for _ in range(24):
        asked = len(run.policy.launched)
        reason = run.step()
        if len(run.policy.launched) > asked:
            expected.append(recent < 1 / 8)
            recent += ((reason is not None) - recent) / 8
    assert run.policy.launched == expected
    assert {True, False} == set(expected)
    # What is loaded begins without this run's history, as a new process would.
    while recent < 1 / 8:
        asked = len(run.policy.launched)
        reason = run.step()
        if len(run.policy.launched) > asked:
            recent += ((reason is not None) - recent) / 8
    run.policy.load_state_dict(run.policy.state_dict())
    asked = len(run.policy.launched)
    while len(run.policy.launched) == asked:
        run.step()
    assert run.policy.launched[asked]


class _Often(Rmmc):
    """launched: of each step that was not known to be a sync, whether it was launched ahead."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.launched: list[bool] = []

    def _finish_ahead(self, *args: Any) -> bool:
        assert not self._sync_is_certain(self._steps)
        self.launched.append(super()._finish_ahead(*args))
        return self.launched[-1]


def _often(kind: Any) -> _Often:
    return _Often(0.35, local=local(kind, 2e-3), warmup_steps=1, max_interval=3)


def _ahead(run: Run, ahead: float) -> Run:
    run.policy._ahead = ahead  # type: ignore[attr-defined]
    return run


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


def whole_steps_wait(rank: int, world_size: int) -> None:
    """AdamW beside a rule whose momentum decides when to talk, against every_step."""
    by_momentum, plain = Run(Rmmc(1e-9), "rmnp"), Run(EveryStep(), "rmnp")
    for _ in range(4):
        assert by_momentum.step() == "rmmc"
        plain.step()
    for name, weight in plain.weights().items():
        torch.testing.assert_close(by_momentum.weights()[name], weight, rtol=1e-3, atol=1e-5)


def as_threads(rank: int, world_size: int) -> None:
    """What `scripts/bench/sync_quality.py` does on one device, beside the processes that it stands for."""
    for policy, rule in ((EveryStep, "adamw"), (lambda: Scheduled(3, warmup_steps=1), "muon")):
        real = Run(policy(), rule)
        wanted = _train(real, 5)
        runs = [Run(policy(), rule, attach=False) for _ in range(world_size)]

        def train(group: ThreadGroup, runs: list[Run] = runs) -> dict[str, torch.Tensor]:
            run = runs[group.rank()]
            run.replica, run.ledger = group.rank(), ThreadLedger()
            run.policy.attach(run.model, Replication(group), run.ledger, run.optimizer)  # type: ignore[arg-type]
            return _train(run, 5)

        results = run_replicas(world_size, train)
        assert unequal(results[rank], wanted) == [], rule
        assert runs[rank].ledger.metrics() == real.ledger.metrics()


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
    "shards of replicas take the steps of whole ones": (4, sharded_as_whole, ()),
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
    "resume from a save amid local steps, Dion of low rank": (2, functools.partial(resumed, **LOW_RANK), ()),
    "resume where local steps are launched ahead": (
        2,
        functools.partial(resumed, ahead=True, **LOW_RANK),
        (),
    ),
    "local steps launched before the decision": (2, launched_ahead, (1,)),
    "and only where few steps are syncs": (2, launched_where_syncs_are_few, ()),
    "the same for shards of replicas, launched before": (4, launched_ahead, (2,)),
    "Dion's factors in place of its momenta: the dense update": (2, factors_against_dense, ()),
    "factors of four replicas": (4, factors_against_dense, ()),
    "the same, bit for bit where sums are exact": (2, factors_of_one_gradient, ()),
    "factors after local steps": (2, factors_after_local_steps, ()),
    "a step that is not applied changes nothing": (2, skipped, ()),
    "one step for one gradient, whatever the clip factors": (2, one_clip_factor, ()),
    "AdamW beside a rule that waits steps on the mean gradient": (2, whole_steps_wait, ()),
    "replicas as threads take the same steps": (2, as_threads, ()),
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
    run = Run(Rmmc(0.5), "sgd")
    run.step()
    if rank == 1:
        return ""
    # The peer has left: its group is destroyed at once.
    try:
        for _ in range(3):
            run.step()
    except CollectiveFailed as error:
        return str(error)
    return "nothing was raised"


def test_a_lost_replica_is_told_within_the_timeout():
    message, _ = run_distributed(one_gone, 2, timeout=90)
    assert "the all-reduce of decision over world failed" in message
    assert "a rank along world is gone or slower than comm.train_timeout_seconds" in message
