"""Replicas between two syncs: what they send, a signal, a NaN and the end of the data on one of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.distributed_harness import run_distributed
from tests.trainer.runs import argv, assert_same_checkpoint, lines, write_corpus
from titanforge.config import load_config
from titanforge.data.errors import DataError
from titanforge.interruption import Interrupted, NonFiniteLoss
from titanforge.parallelisms.distributed import PeerFailure
from titanforge.sync.averaging import local_part
from titanforge.trainer import Trainer

BETWEEN_REPLICAS = ("world", "dp_replicate", "loss")
BAD = 4


def _arguments(folder: Path, corpus: Path, policy: str, **overrides: Any) -> list[str]:
    settings: dict[str, Any] = {
        "training__steps": 20,
        "training__local_batch_size": 2,
        "training__seq_len": 32,
        "parallelism__data_parallel_replicate_degree": 2,
        "optimizer__name": "dion",
        "optimizer__dion__rank_fraction": 0.25,
        "metrics__log_freq": 1000,
        "sync__policy": policy,
        "sync__warmup_steps": 1,
        "checkpoint__enable": True,
        "checkpoint__interval": 1000,
    }
    settings |= {"sync__interval": 9} if policy == "scheduled" else {"sync__threshold": 1e9}
    if policy == "rmmc":
        settings["sync__max_interval"] = 8
    return argv(folder, corpus, **(settings | overrides))


def _sent(trainer: Trainer) -> dict[tuple[str, str], int]:
    """Collectives between replicas so far."""
    entries = trainer.ledger.entries().items()
    return {key: entry.count for key, entry in entries if key[0] in BETWEEN_REPLICAS and entry.count}


def _bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = [*trainer.model.named_parameters(), *trainer.model.named_buffers()]
    return {name: local_part(tensor.detach()).clone() for name, tensor in tensors if "last_load" not in name}


def _train(arguments: list[str], before: Callable[[Trainer, int], None] = lambda trainer, step: None) -> Any:
    """before: is called before each step. Returns what was sent in each step and how the run ended."""
    trainer = Trainer(load_config(arguments), "cpu")
    sent: list[dict[tuple[str, str], int]] = []
    weights = [_bits(trainer)]
    train_step, ended = trainer.train_step, None

    def step() -> None:
        before(trainer, trainer.step + 1)
        first = _sent(trainer)
        try:
            train_step()
        finally:
            now = _sent(trainer)
            sent.append({key: now[key] - first.get(key, 0) for key in now if now[key] != first.get(key, 0)})
            weights.append(_bits(trainer))

    trainer.train_step = step
    try:
        trainer.train()
    except (Interrupted, NonFiniteLoss, DataError, PeerFailure) as error:
        ended = error
    weights.append(_bits(trainer))
    count = int(trainer.optimizer.step_count)
    trainer.close()
    return {
        "sent": sent, "steps": trainer.step, "weights": weights, "applied": count,
        "ended": type(ended).__name__, "message": str(ended), "tokens": trainer.tokens_seen,
    }  # fmt: skip


def _counts(rank: int, world_size: int, runs: list[list[str]]) -> list[Any]:
    return [_train(run) for run in runs]


def test_a_local_step_sends_nothing_and_rmmc_one_small_tensor(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=200)
    names = ["scheduled", "rmmc", "scheduled hsdp", "rmmc hsdp"]
    runs = {name: _arguments(tmp_path / name, corpus, name.split()[0]) for name in names[:2]}
    hsdp = {"parallelism__data_parallel_shard_degree": 2, "optimizer__name": "muon"}
    hsdp |= {"optimizer__dion__rank_fraction": None, "training__local_batch_size": 1}
    for name in names[2:]:
        runs[name] = _arguments(tmp_path / name, corpus, name.split()[0], **hsdp)
    moe = {"model__name": "qwen3", "model__flavor": "debugmodel_moe", "model__n_experts": 4}
    moe |= {"model__n_experts_per_token": 2, "model__moe_balancing": "bias", "sync__interval": 5}
    runs["experts"] = _arguments(tmp_path / "experts", corpus, "scheduled", **moe)
    runs["logged"] = _arguments(tmp_path / "logged", corpus, "scheduled", metrics__log_freq=1)
    pairs = [*names[:2], "logged", "experts"]
    by_rank = run_distributed(_counts, 2, [runs[name] for name in pairs])
    found = dict(zip(pairs, by_rank[0]))
    found |= dict(zip(names[2:], run_distributed(_counts, 4, [runs[name] for name in names[2:]])[1]))
    for name in names:
        run = found[name]
        # 1: warm-up, and the first line. 2: nothing is known yet of how long a step takes. 10, 19: syncs.
        # 20: the last line.
        syncs = [1, 10, 19]
        for step, sent in enumerate(run["sent"], start=1):
            if step in syncs:
                assert ("dp_replicate", "states") in sent or ("dp_replicate", "factors") in sent
                continue
            expected = {("world", "decision"): 1} if name.startswith("rmmc") else {}
            expected |= {("world", "agreement"): 2} if step == 2 else {}
            expected |= {("dp_replicate", "loss"): 1} if step == 20 else {}
            assert sent == expected, (name, step)
    # A router is balanced by what its own replica sent, and averaged at a sync as weights are.
    experts, elsewhere = (ranks[-1]["weights"] for ranks in by_rank)
    assert found["experts"]["sent"][8] == {}
    bias = "layers.0.feed_forward.router.expert_bias"
    assert not torch.equal(experts[9][bias], elsewhere[9][bias])
    assert not _unequal(experts[-1], elsewhere[-1]) and bool(experts[-1][bias].any())
    # Looking at each step changes none of them.
    assert found["logged"]["tokens"] == found["scheduled"]["tokens"] > 0
    assert not _unequal(found["logged"]["weights"][-1], found["scheduled"]["weights"][-1])
    logged, seldom = (
        [line for line in lines(tmp_path / name) if "loss" in line] for name in ("logged", "scheduled")
    )
    assert [line["loss"] for line in seldom] == [logged[0]["loss"], logged[-1]["loss"]]
    assert [line["grad_norm"] for line in seldom] == [logged[0]["grad_norm"], logged[-1]["grad_norm"]]


def _delay(step_seconds: float, once: float) -> Callable[[Trainer, int], None]:
    def before(trainer: Trainer, coming: int) -> None:
        if trainer.runtime.rank == 1:
            time.sleep(step_seconds + once * (coming == 3))

    return before


def _slowed(rank: int, world_size: int, runs: dict[str, list[str]], seconds: dict[str, tuple]) -> Any:
    found = {}
    for name, arguments in runs.items():
        begin = time.monotonic()
        found[name] = _train(arguments, _delay(*seconds.get(name, (0, 0)))), time.monotonic() - begin
    return found


def test_a_slow_replica_costs_time_and_changes_nothing(tmp_path):
    """Though under `scheduled` it falls back by more than the timeout between syncs: hosts agree before."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=200)
    timeout, steps = 4, 18
    seconds = {"scheduled slow": (0.35, 0.0), "rmmc slow": (0.0, 1.5)}  # at each step, and once
    between_syncs = {"scheduled": {"sync__interval": steps - 1}, "rmmc": {"sync__max_interval": 5}}
    runs = {
        name: _arguments(
            tmp_path / name, corpus, name.split()[0], **between_syncs[name.split()[0]],
            training__steps=steps, comm__train_timeout_seconds=timeout,
        )
        for name in ("scheduled", "rmmc", *seconds)
    }  # fmt: skip
    assert (steps - 2) * seconds["scheduled slow"][0] > timeout
    for ranks in run_distributed(_slowed, 2, runs, seconds):
        for name, (each, once) in seconds.items():
            (slow, took), (plain, _) = ranks[name], ranks[name.split()[0]]
            assert slow["ended"] == plain["ended"] == "NoneType" and slow["steps"] == steps
            assert took > steps * each + once, "each replica waits for the other"
            assert slow["tokens"] == plain["tokens"]
            for step, (ours, theirs) in enumerate(zip(slow["weights"], plain["weights"], strict=True)):
                assert not _unequal(ours, theirs), (name, step)


def _raise_signal(rank: int, step: int) -> Callable[[Trainer, int], None]:
    def before(trainer: Trainer, coming: int) -> None:
        if trainer.runtime.rank == rank and coming == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return before


def _stops(rank: int, world_size: int, runs: dict[str, list[str]]) -> dict[str, Any]:
    results = {name: _train(run, _raise_signal(1, 5)) for name, run in runs.items() if "stop" in name}
    for name, run in runs.items():
        if "stop" not in name:
            assert _train(run)["ended"] == "NoneType", name
    return results


def test_a_signal_to_one_replica_stops_all_at_one_step_and_the_save_goes_on(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=200)
    runs: dict[str, list[str]] = {}
    # `scheduled` agrees before its next sync, `rmmc` tells of it in the step's decision.
    for policy, step in (("scheduled", 9), ("rmmc", 5)):
        runs[f"{policy} stop"] = _arguments(tmp_path / policy, corpus, policy)
        runs[f"{policy} resume"] = _arguments(tmp_path / policy, corpus, policy, training__steps=2 * step)
        # A save at that step is the same sync point.
        runs[f"{policy} whole"] = _arguments(
            tmp_path / f"{policy} whole", corpus, policy, training__steps=2 * step, checkpoint__interval=step,
            lr_scheduler__total_steps=20,
        )  # fmt: skip
        runs[f"{policy} resume"].append("--lr_scheduler.total_steps=20")
    # No sync in sight: within a quarter of the time that a signal leaves.
    runs["far stop"] = _arguments(
        tmp_path / "far", corpus, "scheduled", training__steps=100_000, sync__interval=100_000,
        lr_scheduler__total_steps=20, job__stop_timeout_seconds=4,
    )  # fmt: skip
    begin = time.monotonic()
    results = run_distributed(_stops, 2, runs)
    assert time.monotonic() - begin < 90
    for one, other in zip(*(result.items() for result in results)):
        name, run = one
        assert run["ended"] == other[1]["ended"] == "Interrupted", name
        assert run["steps"] == other[1]["steps"], name
        assert "SIGTERM" in run["message"] and run["message"] == other[1]["message"], name
    assert results[0]["scheduled stop"]["steps"] == 9
    assert results[0]["rmmc stop"]["steps"] == 5
    assert (tmp_path / "far/checkpoint" / f"step-{results[0]['far stop']['steps']}").exists()
    for policy, step in (("scheduled", 9), ("rmmc", 5)):
        saved = f"checkpoint/step-{2 * step}"
        assert_same_checkpoint(tmp_path / policy / saved, tmp_path / f"{policy} whole" / saved)


def _poison(trainer: Trainer, step: int) -> None:
    if trainer.runtime.rank != 1 or step != BAD:
        return

    def nan(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return output * float("nan")

    handle = trainer.model.get_submodule("layers.1").register_forward_hook(nan)


def _with_nan(rank: int, world_size: int, runs: dict[str, list[str]]) -> dict[str, Any]:
    return {name: _train(run, _poison) for name, run in runs.items()}


def test_a_nan_on_one_replica_is_left_out_there_and_all_hear_of_it(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=200)
    skip = {"training__nonfinite_loss": "skip", "training__steps": 12}
    runs = {
        f"{policy} {mode}": _arguments(tmp_path / f"{policy} {mode}", corpus, policy, **more)
        for policy in ("scheduled", "rmmc")
        for mode, more in (("skip", skip), ("stop", {"training__steps": 12}))
    }
    # Wanted in the step of the NaN already, made up for in the next one.
    runs["owed"] = _arguments(
        tmp_path / "owed", corpus, "rmmc", **skip, sync__threshold=1e-6, optimizer__name="adamw",
        optimizer__dion__rank_fraction=None, sync__max_interval=None,
    )  # fmt: skip
    runs["dobb"] = _arguments(
        tmp_path / "dobb", corpus, "scheduled", **skip, optimizer__name="dobb", optimizer__dobb__period=3,
        optimizer__dion__rank_fraction=None, optimizer__dobb__blocks=2,
    )  # fmt: skip
    one, other = run_distributed(_with_nan, 2, runs)
    for name, run in one.items():
        theirs = other[name]
        assert run["steps"] == theirs["steps"] and run["message"] == theirs["message"], name
        moved = [_moved(result["weights"], BAD) for result in (run, theirs)]
        assert moved == [True, False], f"{name}: the other replica takes its step"
        if name.endswith("stop"):
            assert run["ended"] == "NonFiniteLoss" and f"step {BAD}" in run["message"], name
            # By rmmc's decision at once; of the others' when they have to agree anyway: at the last line.
            assert run["steps"] == (BAD if "rmmc" in name else 12), name
            continue
        assert run["ended"] == "NoneType", (name, run["message"])
        assert run["applied"] == theirs["applied"] == 12, f"{name}: counted alike after a sync"
        assert not _unequal(run["weights"][-1], theirs["weights"][-1]), name
        last = [line for line in lines(tmp_path / name) if "loss" in line][-1]
        assert last["skipped_steps"] == 0.5, f"{name}: one of two replicas left one out"
        assert all(bool(w.isfinite().all()) for w in theirs["weights"][-1].values()), name
    syncs = [line["step"] for line in lines(tmp_path / "owed") if line.get("sync") == "rmmc"]
    assert BAD not in syncs and {BAD - 1, BAD + 1} <= set(syncs)


def _unequal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def _moved(weights: list[dict[str, torch.Tensor]], step: int) -> bool:
    return bool(_unequal(weights[step - 1], weights[step]))


def _end_data(rank: int, step: int) -> Callable[[Trainer, int], None]:
    def before(trainer: Trainer, coming: int) -> None:
        if trainer.runtime.rank == rank and coming == step:
            trainer.loader._error = DataError("line 7 of a file is broken")

    return before


def _without_data(rank: int, world_size: int, runs: dict[str, list[str]], resumed: list[str]) -> Any:
    results = {name: _train(run, _end_data(1, 5)) for name, run in runs.items()}
    return results, _train(resumed)


def test_a_replica_without_data_keeps_step_until_all_know_and_save(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=200)
    runs = {policy: _arguments(tmp_path / policy, corpus, policy) for policy in ("scheduled", "rmmc")}
    runs["dobb"] = _arguments(
        tmp_path / "dobb", corpus, "scheduled", optimizer__name="dobb", optimizer__dobb__period=3,
        optimizer__dion__rank_fraction=None, optimizer__dobb__blocks=2,
    )  # fmt: skip
    runs["save"] = _arguments(tmp_path / "save", corpus, "scheduled", checkpoint__interval=7)
    resumed = _arguments(tmp_path / "scheduled", corpus, "scheduled", training__steps=12)
    (one, gone_on), (other, _) = run_distributed(_without_data, 2, runs, resumed)
    for name, step in (("scheduled", 9), ("rmmc", 5), ("dobb", 9), ("save", 7)):
        assert other[name]["ended"] == "DataError" and one[name]["ended"] == "PeerFailure", name
        assert one[name]["message"] == (
            "rank 1 failed while loading data: DataError: line 7 of a file is broken"
        )
        assert one[name]["steps"] == other[name]["steps"] == step, name
        assert (tmp_path / name / f"checkpoint/step-{step}").exists(), name
        assert _moved(one[name]["weights"], 5) and not _moved(other[name]["weights"], 5), name
    assert gone_on["ended"] == "NoneType" and gone_on["steps"] == 12


def _split_replicas(rank: int, world_size: int, nan: list[str], data: list[str], stop: list[str]) -> Any:
    return _train(nan, _poison), _train(data, _end_data(1, 5)), _train(stop, _raise_signal(3, 5))


def test_ranks_of_one_replica_do_alike(tmp_path):
    """Ranks 0 and 1 are shards of one replica, 2 and 3 of the other."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=200)
    hsdp = {"parallelism__data_parallel_shard_degree": 2, "optimizer__name": "muon"}
    hsdp |= {"optimizer__dion__rank_fraction": None, "training__local_batch_size": 1}
    skip = {"training__nonfinite_loss": "skip", "training__steps": 10}
    runs = [
        _arguments(tmp_path / "nan", corpus, "rmmc", **hsdp, **skip),
        _arguments(tmp_path / "data", corpus, "scheduled", **hsdp),
        _arguments(tmp_path / "stop", corpus, "scheduled", **hsdp),
    ]
    by_rank = run_distributed(_split_replicas, 4, *runs)
    nan, data, stop = zip(*by_rank)
    assert [_moved(run["weights"], BAD) for run in nan] == [False, False, True, True]
    assert [run["applied"] for run in nan] == [10] * 4
    assert [line["skipped_steps"] for line in lines(tmp_path / "nan") if "loss" in line] == [0, 0.5]
    assert [_moved(run["weights"], 5) for run in data] == [False, False, True, True]
    assert [run["steps"] for run in data] == [9] * 4
    assert [run["ended"] for run in data] == ["PeerFailure", "DataError", "PeerFailure", "PeerFailure"]
    assert {run["message"] for run in stop} == {stop[0]["message"]}
    assert [(run["ended"], run["steps"]) for run in stop] == [("Interrupted", 9)] * 4
