"""What matrix optimizers learn in equal tokens: GPT-2 Small's blocks on real text, seven arms, one protocol.

    python scripts/bench/matrix_quality.py                         # planned for 8 minutes of two H200s
    python scripts/bench/matrix_quality.py --device cpu --tiny     # a toy, anywhere

AdamW, Muon, RMNP, Dion with rank fractions 1 and 1/16, Dobb with 1 and 16 blocks: the rows of Table 4 of the
Dobb paper, at its scale "Small" but for far fewer steps of fewer tokens. The protocol is the paper's (its
section 6, appendix E): update scale tau sqrt(max(m, n)) with tau = 0.2, AdamW for embeddings, biases and
norms, weight decay 0.1, warm-up over a tenth of the steps, cosine to 1 % of the peak, no Nesterov momentum,
Householder QR for Dobb, the same seed and so the same sequences in the same order.

Every arm has a peak rate of its own, from as many short runs as all others: `--lrs` for `--probe-steps` each,
then `--further` more, one after the other, beyond the edge at which its best lies, else between its best two.
`--select shared` has one rate for all, chosen with AdamW, as Table 4 has it; the table of all that was tried
compares the arms at each rate, at the length of these runs. With one rate nothing is tried.

All arms run at the same time, each in a process of its own, on one GPU or dealt over `--devices`: nothing is
said about their speed, and nobody waits while another starts. First each compiles in a few steps; then the
rates are tried, and beside them each arm shows its pace; then all take as many steps, the same in all, as
end within `--seconds`, unless `--steps` is given. An arm that has not ended by then is stopped and called so.
On a GPU a step is one CUDA graph (`compile.cuda_graph`, the same bits), but for those that refresh bases.

The text is Python sources, the standard library's and those of the installed packages, as bytes: 85 million
weights in the blocks and a small embedding. An arm that is done is not run again, so the same command goes on
where it stopped. Writes runs/ARM/metrics.jsonl, matrix_quality.json, .md and .png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from scripts.bench import matrix_quality_report
from scripts.bench.matrix_arms import (
    ARMS,
    BASELINE,
    EVALUATIONS,
    PACE_STEPS,
    TABLE_4,
    WARM_STEPS,
    Places,
    Run,
    device_of,
    done_of,
    fits,
    own_seconds,
)
from scripts.bench.peak_rates import best_rate, losses_of_rates, next_rate
from scripts.bench.python_text import write_corpus

ROUND_SHARE = 8  # one further rate of all arms may take an eighth of the time that is left
RESTART = 15.0  # seconds: the last runs' start and the report
# What may differ between two calls that go on with each other's arms. The text is told by what is in it.
_NOT_SETTINGS = ("out", "arms", "eager", "margin", "seconds", "end", "devices", "in_process", "corpus")


def settle(options: argparse.Namespace, places: Places) -> dict[str, Any]:
    """Peak rates and steps of all arms: from plan.json if there is one, else from probes.

    Raises:
        SystemExit: plan.json is of other settings or arms, no probe came to its end, or a GPU has too little
            memory.
    """
    path = options.out / "plan.json"
    begun = json.loads(path.read_text()) if path.exists() else {}
    if "steps" in begun:
        same_settings(options, begun)
        if new := [arm for arm in options.arms if arm not in begun["lrs"]]:
            raise SystemExit(f"{options.out} has no peak rate for {', '.join(new)}: choose another --out")
        return begun
    each = options.select == "each"
    probed = list(options.arms) if each else [BASELINE]
    middle = sorted(options.lrs)[len(options.lrs) // 2]
    probes = []
    if len(options.lrs) > 1:
        for arm in probed:
            for index, lr in enumerate(options.lrs):
                # The one arm's rates beside each other; of many arms, one rate after the other.
                place = arm if index == 0 or each else f"{arm}-{index + 1}"
                probes.append(Run(f"probe-{arm}-{lr:.3g}", arm, lr, options.probe_steps, place, "probe"))
    own = {arm: arm for arm in options.arms}
    own |= {probe.place: probe.arm for probe in probes}
    places.make(list(own))
    settings = same_settings(options, begun)  # meanwhile
    path.write_text(json.dumps({"settings": settings}, indent=1))  # before a run can be taken for another's
    if not options.in_process:
        warm = [Run(f"warm-{p}", arm, middle, WARM_STEPS, p, "warm") for p, arm in own.items()]
        check_memory(warmed(warm, list(own), places, options), list(own), options)
        tell("compiled", options)
    paced = [] if options.steps else [arm for arm in options.arms if arm not in {p.place for p in probes}]
    paces = [Run(f"pace-{arm}", arm, middle, PACE_STEPS, arm, "pace") for arm in paced]
    shown = places.run([*paces, *probes])
    results = [shown[probe.name] for probe in probes if probe.name in shown and shown[probe.name]["finished"]]
    seconds = pace_of_arms(shown)
    devices = {arm: device_of(arm, list(own), options) for arm in options.arms}
    results += search(results, seconds, devices, places, options)
    lrs = rates(results, probed, options)
    places.close([place for place in own if place not in options.arms])
    tell("rates tried", options)
    steps = options.steps or steps_that_fit(
        seconds,
        options.margin * (options.end - time.perf_counter() - RESTART),
        evaluated=EVALUATIONS * options.validation_steps,
        devices=devices,
    )
    plan = {
        "settings": settings,
        "lrs": lrs,
        "steps": steps,
        "seconds_of_a_step": seconds,
        "without_cuda_graph": options.eager,
        "probes": [{key: r[key] for key in ("arm", "lr", "validation_loss", "seconds")} for r in results],
    }
    path.write_text(json.dumps(plan, indent=1))
    return plan


def warmed(
    runs: Sequence[Run], names: Sequence[str], places: Places, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """What the first runs left. On a GPU an arm that failed has another try without a CUDA graph, in a
    process of its own, and none from then on; names: of all places."""
    found = places.run(runs)
    failed = [run for run in runs if run.name not in found]
    if failed and options.device == "cuda" and time.perf_counter() < options.end:
        options.eager += [run.arm for run in failed]
        print(f"without a CUDA graph from now on: {', '.join(options.eager)}", flush=True)
        places.close([run.place for run in failed], kill=True)
        places.make(names)
        found |= places.run(failed)
    return found


def search(
    results: Sequence[dict[str, Any]],
    seconds: Mapping[str, float],
    devices: Mapping[str, int],
    places: Places,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """`--further` probes of each arm of `results`, whose rates follow from what it has tried.

    seconds: of a step of each arm. devices: where each runs.
    """
    found: list[dict[str, Any]] = []
    begun: set[str] = set()
    for _ in range(options.further):
        tried = losses_of_rates([*results, *found])
        probes = [
            Run(f"probe-{arm}-{lr:.3g}", arm, lr, options.probe_steps, arm, "probe")
            for arm, losses in tried.items()
            if (lr := next_rate(losses))
        ]
        probes = [probe for probe in probes if probe.name not in begun]  # one that failed stays failed
        begun |= {probe.name for probe in probes}
        if not probes:
            break
        took = busiest({probe.arm: seconds[probe.arm] for probe in probes}, devices) * options.probe_steps
        if took > (options.end - time.perf_counter()) / ROUND_SHARE:
            print("no further rates are tried: too few of --seconds are left", flush=True)
            break
        more = [one for one in places.run(probes).values() if one["finished"]]
        if not more:
            break
        found += more
    return found


def tell(what: str, options: argparse.Namespace) -> None:
    print(f"{what} after {time.perf_counter() - options.end + options.seconds:.0f} s", flush=True)


def same_settings(options: argparse.Namespace, begun: Mapping[str, Any]) -> dict[str, Any]:
    """What runs of one folder have alike, a digest of the text (written here if need be) included.

    Raises:
        SystemExit: `begun`, what plan.json held, has other settings.
    """
    ready_corpus(options)
    with options.corpus.open("rb") as text:
        digest = hashlib.file_digest(text, "sha256").hexdigest()
    found = {key: value for key, value in vars(options).items() if key not in _NOT_SETTINGS}
    found |= {"text_sha256": digest}
    known = begun.get("settings", found)
    if other := [key for key, value in found.items() if known.get(key) != value]:
        raise SystemExit(
            f"{options.out} holds runs of other settings ({', '.join(other)}): choose another --out, or "
            "remove it"
        )
    return found


def ready_corpus(options: argparse.Namespace) -> None:
    if not options.corpus.exists():
        told = write_corpus(options.corpus, options.corpus_mib << 20)
        print(f"corpus: {told['documents']} files, {told['bytes'] / 2**20:.1f} MiB", flush=True)


def check_memory(
    warm: Mapping[str, Mapping[str, Any]], places: Sequence[str], options: argparse.Namespace
) -> None:
    if options.device != "cuda":
        return
    for device in range(options.devices):
        here = {
            name: result
            for name, result in warm.items()
            if device_of(result["place"], places, options) == device
        }
        print(fits(here, torch.cuda.get_device_properties(device).total_memory), flush=True)


def rates(
    results: Sequence[Mapping[str, Any]], probed: Sequence[str], options: argparse.Namespace
) -> dict[str, float]:
    """Peak rate of each arm that has one: the best of its probes, or of AdamW's.

    Raises:
        SystemExit: no probe of an arm came to its end.
    """
    first: float = options.lrs[0]
    if len(options.lrs) == 1:
        return dict.fromkeys(ARMS, first)
    found: dict[str, float] = {}
    tried = losses_of_rates(results)
    for arm in probed:
        if arm not in tried:
            raise SystemExit(f"no probe of {arm} came to its end: see {options.out}/runs/probe-{arm}-*")
        found[arm] = best_rate(tried[arm])
    if options.select == "shared":
        found = dict.fromkeys(ARMS, found[BASELINE])
    return found


def pace_of_arms(shown: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a device that a step of each arm takes by itself; of several runs of an arm the longest."""
    found: dict[str, float] = {}
    settled = {
        name: {"span": one["span"], "trained_steps": one["spanned_steps"] + 1} for name, one in shown.items()
    }
    for name, seconds in own_seconds(settled).items():
        arm = shown[name]["arm"]
        found[arm] = max(seconds, found.get(arm, 0.0))
    return found


def busiest(seconds: Mapping[str, float], devices: Mapping[str, int]) -> float:
    """Seconds that a step of each arm takes on the device that has the most to do."""
    return max(
        sum(seconds.get(arm, 0.0) for arm in devices if devices[arm] == device)
        for device in set(devices.values())
    )


def steps_that_fit(
    seconds: Mapping[str, float], left: float, *, evaluated: int, devices: Mapping[str, int]
) -> int:
    """Steps of each arm, if those of one device share it, and all are to end within `left` seconds.

    seconds: of a step of each arm. left: what is planned with. evaluated: batches in all evaluations of an
    arm, a third of a step each.

    Raises:
        SystemExit: there is time for fewer steps than evaluations.
    """
    together = busiest(seconds, devices)
    if not together:
        raise SystemExit("no arm showed its pace: see the log.txt of runs/pace-* and runs/probe-*")
    steps = int(left / together - evaluated / 3)
    steps -= steps % EVALUATIONS
    if steps < EVALUATIONS:
        raise SystemExit(
            f"{left:.0f} of --seconds are left to plan with, and a step of all arms takes {together:.2f} s: "
            "give it more --seconds, or take fewer --arms or a smaller --batch"
        )
    return steps


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, default=Path("outputs/matrix_quality"))
    found.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    found.add_argument("--devices", type=int, help="GPUs that the arms are dealt over; default: all")
    found.add_argument("--tiny", action="store_true", help="a toy, to prove the script anywhere")
    found.add_argument("--arms", nargs="+", choices=ARMS, default=list(TABLE_4))
    found.add_argument("--eager", nargs="*", choices=ARMS, default=[], help="arms without a CUDA graph")
    found.add_argument("--lrs", type=float, nargs="+", default=[4.42e-4, 8.84e-4, 1.77e-3, 3.54e-3])
    found.add_argument("--select", choices=["each", "shared"], default="each", help="whose peak rate")
    found.add_argument("--probe-steps", type=int, default=100, help="of a rate that is tried")
    found.add_argument("--further", type=int, default=2, help="rates that each tries beside --lrs")
    found.add_argument("--steps", type=int, help="default: as many as fit into --seconds")
    found.add_argument("--seconds", type=float, default=470.0, help="for everything")
    found.add_argument(
        "--margin",
        type=float,
        default=0.9,
        help="share of the time left to plan with; lower where others may use the GPU or the CPU too",
    )
    found.add_argument("--batch", type=int, default=16, help="sequences of a step")
    found.add_argument("--seq-len", type=int, default=1024)
    found.add_argument("--validation-steps", type=int, default=32, help="batches; a quarter for a rate")
    found.add_argument("--seed", type=int, default=5000)
    found.add_argument("--tokenizer", default="byte", help="as data.tokenizer")
    found.add_argument("--corpus", type=Path, help="JSON Lines, written if not there; default: in --out")
    found.add_argument("--corpus-mib", type=int, default=64, help="text to gather")
    return found


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    begin = time.perf_counter()
    if options.tiny:
        options.batch, options.seq_len, options.validation_steps, options.corpus_mib = 2, 32, 2, 1
        options.lrs, options.probe_steps = [1e-2, 2e-2], 3
        # Enough for a test in this process; processes beside each other plan theirs as on a GPU.
        options.steps = options.steps or (None if options.devices else 12)
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    if options.device == "cuda" and (options.devices or 1) > gpus:
        raise SystemExit(
            f"{gpus} GPUs: --devices {options.devices or 1} needs more (--device cpu --tiny: none)"
        )
    options.end = begin + options.seconds
    options.in_process = options.tiny and options.devices is None
    options.devices = options.devices or max(gpus, 1)
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    options.corpus = (options.corpus or options.out / "corpus.jsonl").absolute()
    if not options.in_process:  # as the processes inherit it: they share the machine's cores
        share = max(1, (os.cpu_count() or 1) // len(options.arms))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    places = Places(options)
    try:
        plan = settle(options, places)
        ready_corpus(options)
        left = [arm for arm in options.arms if not done_of(options.out / "runs" / arm)]
        places.make(left)
        print(
            f"{plan['steps']} steps of {options.batch * options.seq_len} tokens, rates {plan['lrs']}, begun "
            f"after {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        places.run([Run(arm, arm, plan["lrs"][arm], plan["steps"], arm, "arm") for arm in options.arms])
    finally:
        places.close(kill=True)
    results = {arm: done for arm in ARMS if (done := done_of(options.out / "runs" / arm))}
    if results:
        matrix_quality_report.write(options.out, results, plan, time.perf_counter() - begin)
    return 0 if all(arm in results and results[arm]["finished"] for arm in options.arms) else 1


if __name__ == "__main__":
    sys.exit(main())
