"""Run the exactness gates on this machine's devices: what must be equal is compared, and how near is said.

    python scripts/gates.py                                                # one rank
    torchrun --nproc-per-node 8 scripts/gates.py                           # what ranks do too
    torchrun --nproc-per-node 2 scripts/gates.py --device cpu              # gloo, anywhere
    torchrun --nproc-per-node 2 scripts/gates.py --gates T1 T2 F1          # some

The gates are the FORGE paper's (appendix L) and titanforge's own; each layout is built from the trainer's
parts and compared with one rank that sees the whole batch. A gate that this number of ranks cannot run says
why. Ends with 1 if any gate fails. `--out` keeps every figure as gates.json and gates.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from scripts.bench.harness import machine_facts, markdown_table, write_report
from scripts.exactness import experts, half, layouts, one_rank, resharding, stages  # noqa: F401  they enter their gates
from scripts.exactness.registry import GATES, Gate, Reading, World
from titanforge.config.sections import Comm
from titanforge.kernels.forms import select_form
from titanforge.parallelisms import init_distributed, set_determinism


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--gates", nargs="+", choices=GATES, default=list(GATES), metavar="GATE")
    parser.add_argument("--kernel", default="auto", help="form of the fused kernel, as forge.kernel")
    parser.add_argument("--full", action="store_true", help="the paper's sizes on a CPU too")
    parser.add_argument("--out", type=Path, default=Path("outputs/gates"), help="folder of the report")
    parser.add_argument("--timeout", type=int, default=120, help="seconds after which a rank counts as lost")
    parser.add_argument("--list", action="store_true", help="name the gates and end")
    return parser


class LostRanks(Exception):
    """Ranks do not answer any more. outcome: of the gate in which that was seen."""

    def __init__(self, outcome: dict[str, Any]) -> None:
        super().__init__(outcome["error"])
        self.outcome = outcome


def run_gate(gate: Gate, world: World) -> dict[str, Any]:
    """One gate on all ranks: its readings, each the worst of all ranks, or why it was not run."""
    outcome: dict[str, Any] = {"gate": gate.name, "about": gate.about, "readings": []}
    if reason := gate.needs(world):
        return outcome | {"skipped": reason}
    start = time.perf_counter()
    readings: list[Reading] = []
    error = ""
    try:
        readings = list(gate.run(world))
        if not readings:
            error = "it read nothing"
    except Exception:
        error = traceback.format_exc()
    try:
        told = world.runtime.all_gather_object((error, readings))
    except RuntimeError as lost:  # a rank hangs or is gone: nothing after this could be trusted
        raise LostRanks(outcome | {"error": f"{error}\nranks do not answer: {lost}"}) from lost
    errors = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]
    if errors:
        return outcome | {"error": errors[0], "seconds": time.perf_counter() - start}
    for same in zip(*(found for _, found in told), strict=True):
        worst = next((r for r in same if not r.passed), max(same, key=lambda r: r.value))
        outcome["readings"].append({**vars(worst), "passed": worst.passed})
    return outcome | {"seconds": time.perf_counter() - start}


def passed(outcome: dict[str, Any]) -> bool:
    """Whether a gate passed; one that was skipped did."""
    if "skipped" in outcome:
        return True
    return "error" not in outcome and all(reading["passed"] for reading in outcome["readings"])


def table_of(outcomes: list[dict[str, Any]]) -> str:
    rows = []
    for outcome in outcomes:
        name = outcome["gate"]
        if "skipped" in outcome or "error" in outcome:
            what = outcome.get("skipped") or outcome["error"].strip().splitlines()[-1]
            rows.append([name, what, "–", "–", "–", "skipped" if "skipped" in outcome else "ERROR"])
        for r in outcome["readings"]:
            paper = "–" if r["paper"] is None else f"{r['paper']:.2e}"
            verdict = "pass" if r["passed"] else "FAIL"
            rows.append([name, r["what"], f"{r['value']:.2e}", f"{r['tolerance']:.1e}", paper, verdict])
    return markdown_table(["gate", "what", "value", "at most", "paper", ""], rows)


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.list:
        print("\n".join(f"{gate.name:<18}{gate.about}" for gate in GATES.values()))
        return 0
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    runtime = init_distributed(
        Comm(init_timeout_seconds=args.timeout, train_timeout_seconds=args.timeout), device
    )
    # Attention and others may sum in an order that changes from run to run; only equal sums can be compared.
    set_determinism(3, True, True, runtime.device)
    select_form(args.kernel, runtime.device)
    world = World(runtime, args.full)
    facts = machine_facts() | {
        "ranks": world.size,
        "device": world.device.type,
        "forge.kernel": args.kernel,
    }
    outcomes, lost = [], False
    for name in args.gates:
        if lost:
            outcomes.append({"gate": name, "error": "not run: ranks were lost before", "readings": []})
            continue
        if runtime.is_main:
            print(f"{name} ...", flush=True)
        try:
            outcome = run_gate(GATES[name], world)
        except LostRanks as error:
            outcome, lost = error.outcome, True
        outcomes.append(outcome)
        if runtime.is_main:
            for line in table_of([outcome]).splitlines()[2:]:
                print(line, flush=True)
            if "error" in outcome:
                print(outcome["error"], flush=True)
            # After each gate: one that ends the process must not take the others' figures along.
            args.out.mkdir(parents=True, exist_ok=True)
            report = {"machine": facts, "gates": outcomes}
            (args.out / "gates.json").write_text(json.dumps(report, indent=1))
    good = all(map(passed, outcomes))
    if runtime.is_main:
        write_report(args.out, "gates", {"machine": facts, "gates": outcomes}, table_of(outcomes))
        seconds = sum(outcome.get("seconds", 0.0) for outcome in outcomes)
        failed = [outcome["gate"] for outcome in outcomes if not passed(outcome)]
        skipped = [outcome["gate"] for outcome in outcomes if "skipped" in outcome]
        good_ones = len(outcomes) - len(failed) - len(skipped)
        print(
            f"{world.size} ranks, {world.device.type}: {good_ones} gates passed, {len(failed)} failed"
            f"{''.join(f' {name}' for name in failed)}, {len(skipped)} skipped, {seconds:.0f} s"
        )
        print(json.dumps({"passed": good, "failed": failed, "skipped": skipped}), flush=True)
    if lost:  # leaving the groups would wait for them
        sys.stdout.flush()
        os._exit(1)
    torch.use_deterministic_algorithms(False)
    runtime.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
