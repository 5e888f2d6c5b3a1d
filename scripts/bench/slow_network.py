"""Step time of the sync policies with a slow network between replicas, measured on one machine (Linux, root).

    python scripts/bench/slow_network.py -o outputs/slow_network

Each replica is a process in a network namespace of its own. Without a round trip, veth pairs join them at a
bridge, and `tc tbf` limits the rate of every link in both directions. With one, a process passes their
packets on at the rate and half a round trip later (`delayed_links.py`), as kernels need not have `netem`.
Both are measured, none is added to a figure. A line is logged every 10 steps, the default, and counts too.

`WAN` is the last row of CurvaDion's Table 3 (1 Gb/s and 50 ms between data centres) in its proportions: there
a dense sync takes 12 s, a step's computation 3.414 s. The rate is chosen so that the gradients of this
model take as many times the local step that was measured here, and the round trip is as much shorter.
`1 Gb/s` as it is says less, as a CPU computes more slowly for each byte than the GPUs of the paper.
Writes results.jsonl, one line for each network and policy, and results.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.delayed_links import delayed_namespaces  # noqa: E402

STEPS = "step_times.jsonl"
GIGABIT = 1e9
NETWORKS = {
    # Bits a second, seconds of a round trip; None: found from the local step on the first network.
    "10 Gb/s": (10 * GIGABIT, 0.0),
    "1 Gb/s": (GIGABIT, 0.0),
    "1 Gb/s + 50 ms": (GIGABIT, 0.05),
    "WAN": None,
}
# CurvaDion, section 4.4 and Table 3, in seconds: a step without communication, a dense sync, the round trip;
# and its projections at a sync rate of 1%.
PAPER_STEP, PAPER_SYNC, PAPER_ROUND_TRIP = 3.414, 12.0, 0.05
PAPER_SPEEDUP = {"10 Gb/s": 1.202, "WAN": 4.361}
BETWEEN_REPLICAS = ("world", "dp_replicate", "loss")
LOG_FREQ = 10
PREFIX, BRIDGE = "tfnet", "tfbridge"
EVERY_STEP = "every_step"
ARMS = (EVERY_STEP, "scheduled 50", "rmmc, 2% syncs")
"""Those that run by default."""


def policies(warmup: int) -> dict[str, dict[str, Any]]:
    """`[sync]` of all arms, in the order of their turns."""
    states = {"policy": "every_step", "reduce": "states"}
    return {
        EVERY_STEP: {"policy": "every_step"},
        "every_step states": states,
        "every_step states int4": {**states, "exchange_dtype": "int4"},
        "scheduled 10": {"policy": "scheduled", "interval": 10, "warmup_steps": warmup},
        "scheduled 10 int4": {
            "policy": "scheduled", "interval": 10, "warmup_steps": warmup, "exchange_dtype": "int4",
        },
        "scheduled 50": {"policy": "scheduled", "interval": 50, "warmup_steps": warmup},
        # Out of reach of any change, so that the time is that of local steps and max_interval.
        "rmmc, 2% syncs": {
            "policy": "rmmc", "threshold": 1e9, "max_interval": 49, "warmup_steps": warmup,
        },
    }  # fmt: skip


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(count: int, rate: float, round_trip: float) -> Iterator[list[str]]:
    """One network namespace a replica, 10.77.0.<1 + replica>, all joined; removed at the end."""
    names = [f"{PREFIX}{os.getpid()}r{index}" for index in range(count)]
    if round_trip:
        with delayed_namespaces(names, rate, round_trip):
            yield names
        return
    made: list[str] = []
    try:
        _command("ip", "link", "add", BRIDGE, "type", "bridge")
        _command("ip", "link", "set", BRIDGE, "up")
        for index, name in enumerate(names):
            _command("ip", "netns", "add", name)
            made.append(name)
            outer = f"tfv{index}"
            _command("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _command("ip", "link", "set", outer, "master", BRIDGE, "up")
            for words in (
                ("ip", "link", "set", "lo", "up"),
                ("ip", "addr", "add", f"10.77.0.{1 + index}/24", "dev", "eth0"),
                ("ip", "link", "set", "eth0", "up"),
            ):
                _command("ip", "netns", "exec", name, *words)
            burst = max(256 * 1024, int(rate / 8e3))  # of a millisecond, the least that keeps up
            limit = ("root", "tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "latency", "100ms")
            _command("tc", "qdisc", "add", "dev", outer, *limit)
            _command("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *limit)
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)
        for index in range(count):
            subprocess.run(["ip", "link", "del", f"tfv{index}"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


def arguments(folder: Path, options: argparse.Namespace, sync: dict[str, Any]) -> list[str]:
    keys = {
        "job.config_file": ROOT / "train_configs" / "debug_model.toml",
        "job.dump_folder": folder,
        "job.description": folder.name,
        "optimizer.name": "Dion",
        "optimizer.dion.rank_fraction": options.rank_fraction,
        "model.dim": options.dim,
        "model.n_layers": options.layers,
        "training.steps": options.every_steps if sync["policy"] == "every_step" else options.steps,
        "training.seq_len": options.seq_len,
        "training.local_batch_size": 1,
        "metrics.log_freq": LOG_FREQ,
        "parallelism.data_parallel_replicate_degree": options.replicas,
        "parallelism.data_parallel_shard_degree": 1,
        **{f"sync.{key}": value for key, value in sync.items()},
    }
    return [f"--{key}={value}" for key, value in keys.items()]


def worker(runs: list[list[str]]) -> None:
    import torch
    import torch.distributed as dist

    from titanforge.trainer import Trainer
    from train import main as train

    torch.set_num_threads(1)
    train_step = Trainer.train_step

    def timed(self: Trainer) -> None:
        entries = self.ledger.entries
        sent = sum(entry.count for (axis, _), entry in entries().items() if axis in BETWEEN_REPLICAS)
        begin = time.perf_counter()
        train_step(self)
        seconds = time.perf_counter() - begin
        sent = sum(e.count for (axis, _), e in entries().items() if axis in BETWEEN_REPLICAS) - sent
        if self.is_main:
            with open(self.dump_folder / STEPS, "a", encoding="utf-8") as file:
                line = {"step": self.step, "seconds": seconds, "collectives": sent}
                file.write(json.dumps(line) + "\n")

    Trainer.train_step = timed
    dist.init_process_group("gloo")
    for run in runs:
        with contextlib.redirect_stdout(io.StringIO()):
            code = train(run)
        if code:
            raise SystemExit(f"a run ended with {code}: {run}")
    dist.destroy_process_group()


def measure(
    options: argparse.Namespace, network: str, rate: float, round_trip: float
) -> list[dict[str, Any]]:
    chosen = {name: sync for name, sync in policies(options.warmup).items() if name in options.policies}
    base = options.output / network.replace(" ", "_").replace("/", "")
    folders = {name: base / name.replace(" ", "_").replace(",", "").replace("%", "") for name in chosen}
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
    runs = [arguments(folders[name], options, sync) for name, sync in chosen.items()]
    with namespaces(options.replicas, rate, round_trip) as names:
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, "--worker", json.dumps(runs)],
                env=os.environ
                | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(options.replicas),
                    "MASTER_ADDR": "10.77.0.1",
                    "MASTER_PORT": "29577",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank, name in enumerate(names)
        ]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(codes):
        raise SystemExit(f"{network}: a worker ended with {codes}")
    found = [result(network, name, folders[name], options) for name in chosen]
    return [line | {"bits_per_second": rate, "round_trip_seconds": round_trip} for line in found]


def result(network: str, name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    synced = {line["step"] for line in lines if "sync" in line}
    shown = {line["step"] for line in logged}
    steps = [json.loads(line) for line in (folder / STEPS).read_text().splitlines()]
    after = [line for line in steps if line["step"] > options.warmup]
    kinds: dict[str, list[dict[str, Any]]] = {"local": [], "logged": [], "sync": []}
    for line in after:
        sync = name == EVERY_STEP or line["step"] in synced
        kinds["sync" if sync else "logged" if line["step"] in shown else "local"].append(line)
    # At the shares of the run; medians, as a machine that others use has outliers.
    medians = {
        kind: statistics.median(line["seconds"] for line in members) if members else None
        for kind, members in kinds.items()
    }
    mean = sum(len(members) * (medians[kind] or 0.0) for kind, members in kinds.items()) / len(after)
    # Dense bytes from the last line before them to the last line.
    key = f"comm/dp_replicate/{'gradients' if name == EVERY_STEP else 'weights'}_bytes"
    first, last = logged[0], logged[-1]
    syncs = last["step"] - first["step"]
    if name != EVERY_STEP:
        syncs = max(len([step for step in synced if first["step"] < step <= last["step"]]), 1)
    return {
        "network": network,
        "policy": name,
        "replicas": options.replicas,
        "sync_rate": len(kinds["sync"]) / len(after),
        "median_local_step_seconds": medians["local"],
        "median_logged_step_seconds": medians["logged"],
        "median_sync_step_seconds": medians["sync"],
        "step_seconds": mean,
        "dense_bytes_of_a_sync": (last.get(key, 0) - first.get(key, 0)) / syncs,
        "collectives_of_a_local_step": statistics.median(line["collectives"] for line in kinds["local"])
        if kinds["local"]
        else None,
    }


def wan_of(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """Rate and round trip in the paper's proportions to the local step of these measurements."""
    local = min(seconds for line in lines if (seconds := line["median_local_step_seconds"]))
    every = next(line for line in lines if line["policy"] == EVERY_STEP)
    # What a ring sends of a tensor over each link.
    replicas = every["replicas"]
    sent = 8 * every["dense_bytes_of_a_sync"] * 2 * (replicas - 1) / replicas
    scale = local / PAPER_STEP
    return sent / (PAPER_SYNC * scale), PAPER_ROUND_TRIP * scale


def markdown(results: list[dict[str, Any]]) -> str:
    base = {line["network"]: line for line in results if line["policy"] == EVERY_STEP}
    text = (
        "| network | rate | round trip | policy | sync rate | local step | collectives | logged step "
        "| sync step | mean step | speedup | CurvaDion's projection |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    for line in results:
        speedup = base[line["network"]]["step_seconds"] / line["step_seconds"]
        seconds = [
            line["median_local_step_seconds"], line["median_logged_step_seconds"],
            line["median_sync_step_seconds"], line["step_seconds"],
        ]  # fmt: skip
        local, logged, sync, step = ("-" if one is None else f"{1e3 * one:.0f} ms" for one in seconds)
        told = PAPER_SPEEDUP.get(line["network"]) if line["policy"].startswith("rmmc") else None
        sent = line["collectives_of_a_local_step"]
        text += (
            f"| {line['network']} | {line['bits_per_second'] / GIGABIT:.3g} Gb/s "
            f"| {1e3 * line['round_trip_seconds']:.3g} ms | {line['policy']} "
            f"| {line['sync_rate']:.1%} | {local} | {'-' if sent is None else f'{sent:g}'} | {logged} "
            f"| {sync} | {step} | {speedup:.2f}x | {'' if told is None else f'{told:.2f}x'} |\n"
        )
    return text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "outputs" / "slow_network")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--every-steps", type=int, default=25, help="of every_step, whose steps are alike")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--rank-fraction", type=float, default=1 / 16)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument(
        "--policies", nargs="+", default=list(ARMS), choices=list(policies(0)),
        help=f"{EVERY_STEP} must be among them, and for WAN one with local steps",
    )  # fmt: skip
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    if EVERY_STEP not in options.policies:
        raise SystemExit(f"--policies: {EVERY_STEP} must be among them, the others are compared with it")
    results: list[dict[str, Any]] = []
    for network in options.networks:
        rate, round_trip = NETWORKS[network] or wan_of(
            results or measure(options, "10 Gb/s", 10 * GIGABIT, 0)
        )
        results += measure(options, network, rate, round_trip)
        with open(options.output / "results.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in results)
        (options.output / "results.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
