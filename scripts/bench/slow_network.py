"""Step time of the sync policies with a slow network between replicas, measured on one machine (Linux, root).

    python scripts/bench/slow_network.py --replicas 2 --steps 30 -o outputs/slow_network

Each replica is a process in a network namespace of its own; veth pairs join them at a bridge, and `tc tbf`
limits the rate of every link in both directions. What is emulated is the rate. A round trip cannot be added
where the kernel has no `netem`: it is computed then, one for each collective in the ledger and for the
host-side reductions of every step, and stands in a figure of its own, named as added.
Writes results.jsonl, one line for each network and policy.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

NETWORKS = {"10 Gb/s": ("10gbit", 0.0), "1 Gb/s": ("1gbit", 0.0), "1 Gb/s + 50 ms": ("1gbit", 0.05)}
HOST_REDUCTIONS = 1  # of token counts, failures and signals: two in flight at once count as one round trip
PREFIX, BRIDGE = "tfnet", "tfbridge"


def policies(warmup: int) -> dict[str, dict[str, Any]]:
    return {
        "every_step": {"policy": "every_step"},
        "scheduled 50": {"policy": "scheduled", "interval": 50, "warmup_steps": warmup},
        # Out of reach of any change, so that the time is that of local steps and max_interval.
        "rmmc, 2% syncs": {
            "policy": "rmmc", "threshold": 1e9, "max_interval": 49, "warmup_steps": warmup,
        },
    }  # fmt: skip


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(count: int, rate: str) -> Iterator[list[str]]:
    """One network namespace a replica, 10.77.0.<1 + replica>, joined at a bridge; removed at the end."""
    names = [f"{PREFIX}{os.getpid()}r{index}" for index in range(count)]
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
            limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
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
        "optimizer.dion.rank_fraction": 0.125,
        "model.dim": options.dim,
        "model.n_layers": options.layers,
        "training.steps": options.steps,
        "training.seq_len": 64,
        "training.local_batch_size": 1,
        "parallelism.data_parallel_replicate_degree": options.replicas,
        "parallelism.data_parallel_shard_degree": 1,
        **{f"sync.{key}": value for key, value in sync.items()},
    }
    return [f"--{key}={value}" for key, value in keys.items()]


def worker(runs: list[list[str]]) -> None:
    import torch
    import torch.distributed as dist

    from train import main as train

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for run in runs:
        with contextlib.redirect_stdout(io.StringIO()):
            code = train(run)
        if code:
            raise SystemExit(f"a run ended with {code}: {run}")
    dist.destroy_process_group()


def measure(options: argparse.Namespace, network: str) -> list[dict[str, Any]]:
    rate, round_trip = NETWORKS[network]
    chosen = policies(options.warmup)
    base = options.output / network.replace(" ", "_").replace("/", "")
    folders = {name: base / name.replace(" ", "_").replace(",", "").replace("%", "") for name in chosen}
    runs = [arguments(folders[name], options, sync) for name, sync in chosen.items()]
    with namespaces(options.replicas, rate) as names:
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
    return [result(network, round_trip, name, folders[name], options) for name in chosen]


def result(
    network: str, round_trip: float, name: str, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    synced = {line["step"] for line in lines if "sync" in line}
    after = [line for line in steps if line["step"] > options.warmup]
    kinds = {
        "local": [line["step_seconds"] for line in after if line["step"] not in synced],
        "sync": [line["step_seconds"] for line in after if line["step"] in synced],
    }
    if name == "every_step":
        kinds = {"local": [], "sync": kinds["local"]}

    def collectives(line: dict[str, Any]) -> int:
        return sum(
            value
            for key, value in line.items()
            if key.startswith("comm/") and key.endswith("_count") and key != "comm/world/agreement_count"
        )

    per_step = (collectives(steps[-1]) - collectives(steps[options.warmup - 1])) / len(after)
    return {
        "network": network,
        "policy": name,
        "replicas": options.replicas,
        "median_local_step_seconds": statistics.median(kinds["local"]) if kinds["local"] else None,
        "median_sync_step_seconds": statistics.median(kinds["sync"]) if kinds["sync"] else None,
        "collectives_per_step": per_step + HOST_REDUCTIONS,
        "added_round_trip_seconds_per_step": round_trip * (per_step + HOST_REDUCTIONS),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "outputs" / "slow_network")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    results = [line for network in options.networks for line in measure(options, network)]
    with open(options.output / "results.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in results)
    for line in results:
        times = [line["median_local_step_seconds"], line["median_sync_step_seconds"]]
        local, sync = ("-" if time is None else f"{1e3 * time:.0f} ms" for time in times)
        print(
            f"{line['network']:<16} {line['policy']:<16} local {local:>8}  sync {sync:>8}  "
            f"added round trips: {1e3 * line['added_round_trip_seconds_per_step']:.0f} ms a step"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
