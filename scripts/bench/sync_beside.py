"""Cells of `sync_quality.py` beside each other: a process each, its replicas threads in it.

With several cells under way a GPU has one to work for while others prepare their next step, and start-ups and
compilations overlap. Where there are several GPUs, processes are dealt over them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch

from scripts.bench import sync_report
from scripts.bench.beside import Place
from scripts.bench.matrix_arms import own_seconds
from scripts.bench.peak_rates import at_edge, best_rate
from scripts.bench.sync_cells import cells, done, matched, own_options, store, with_seed
from scripts.bench.sync_pace import Pace, Planner
from scripts.bench.sync_threads import get_ready, train_threads

MARGIN = 0.9  # of the time that is left, for what short cells do not show
RESERVE = 8.0  # seconds, for evaluations and the report
PACE_STEPS = 30
Waiting = list[tuple[str, dict[str, Any], argparse.Namespace]]
"""Name, keys of `--cell`, options of each cell, in the order of their turns."""


class Beside:
    """`--beside` places for cells, and what came of those that ended."""

    def __init__(self, size: dict[str, Any], options: argparse.Namespace) -> None:
        self._size, self._end = size, time.monotonic() + options.seconds
        self._places = [Place(_device_of(index)) for index in range(options.beside)]
        self._longest = 0.0
        self.missing: dict[str, str] = {}  # cells without a result, and why
        ready = [place.submit(get_ready, size, options) for place in self._places]
        try:
            wait(ready)
            if told := {future.result() for future in ready} - {""}:
                print(f"steps are launched as they are; {' '.join(told)}", flush=True)
                options.graph = False
        except BaseException:
            self.close()
            raise
        print(f"{options.beside} processes ready, {self.left():.0f} s left", flush=True)

    @property
    def end(self) -> float:
        """When the last cell is to have ended: monotonic."""
        return self._end - RESERVE

    def left(self) -> float:
        return self._end - RESERVE - time.monotonic()

    def go(
        self,
        waiting: Waiting,
        more: Callable[[dict[str, Any]], Waiting] = lambda result: [],
        watch: Callable[[], None] | None = None,
    ) -> list[dict[str, Any]]:
        """All cells, and those that `more` makes of a result, which come before what still waits.

        A cell that is done is not run again, one that goes on at the end of `--seconds` is stopped, and none
        is begun that would not end if it took as long as the longest so far. watch: called once a second.
        """
        results: list[dict[str, Any]] = []
        free, going = list(self._places), dict[Future[Any], tuple[Any, Place, float]]()
        begun: set[tuple[str, int]] = set()

        def ended(found: dict[str, Any] | None) -> None:
            nonlocal waiting
            if found is not None:
                results.append(found)
                waiting = more(found) + waiting

        while True:
            while waiting and free:
                name, keys, options = waiting.pop(0)
                if (name, options.seed) in begun:
                    continue
                begun.add((name, options.seed))
                sync, own = own_options(keys, options)
                found = done(name, sync, own)
                if (found and found["finished"]) or self.left() <= self._longest:
                    leave(own)
                    if not found:
                        self.missing[with_seed(name, own)] = "not begun, --seconds are nearly over"
                    ended(found)
                    continue
                seconds = min(self.left(), options.cell_seconds)
                timed = argparse.Namespace(**vars(own) | {"cell_seconds": seconds})
                place = free.pop(0)
                future = place.submit(train_threads, self._size, sync, timed)
                going[future] = ((name, sync, own), place, time.monotonic())
            if not going:
                never = [with_seed(name, own) for name, _, own in waiting]
                self.missing |= dict.fromkeys(never, "not begun, the processes of others failed")
                return results
            left = max(0.0, self._end - time.monotonic())
            over = wait(going, left if watch is None else min(1.0, left), "FIRST_COMPLETED").done
            if watch is not None:
                watch()
            if not over and time.monotonic() < self._end:
                continue
            if not over:
                cut = [with_seed(name, own) for (name, _, own), *_ in going.values()]
                print(f"not ended in time: {', '.join(cut)}", flush=True)
                never = [with_seed(name, own) for name, _, own in waiting]
                self.missing |= dict.fromkeys(cut, "cut off at the end of --seconds")
                self.missing |= dict.fromkeys(never, "not begun, --seconds are over")
                return results
            for future in over:
                (name, sync, own), place, begin = going.pop(future)
                took = time.monotonic() - begin
                self._longest = max(self._longest, took)
                if error := future.exception():
                    print(f"{name} FAILED: {error!r}\n{error.__cause__ or ''}", flush=True)
                    self.missing[with_seed(name, own)] = f"failed, {type(error).__name__}"
                    leave(own)
                    continue  # and leave its process alone
                free.append(place)
                if own.pace:
                    own.steps = Pace(*own.pace[:2]).settled or own.steps
                store(name, sync, own, future.result(), took)
                ended(done(name, sync, own))

    def close(self) -> None:
        for place in self._places:
            place.close(kill=True)


def leave(options: argparse.Namespace) -> None:
    """Let no cell wait for this one."""
    if options.pace:
        Pace(*options.pace[:2]).leave(options.pace[2])


def _device_of(index: int) -> dict[str, str]:
    """Environment that shows a process one of the GPUs."""
    count = torch.cuda.device_count()
    if count < 2:
        return {}
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(number) for number in range(count)]
    return {"CUDA_VISIBLE_DEVICES": names[index % count]}


def of_seed(options: argparse.Namespace, seed: int) -> Waiting:
    seeded = argparse.Namespace(**vars(options) | {"seed": seed})
    return [(name, keys, seeded) for name, keys in cells(options).items()]


def tune_and_plan(beside: Beside, options: argparse.Namespace) -> None:
    """Set `options.lr` to the best of `--tune`. Unless cells go together, set `options.steps` to as many as
    all cells of the first seed, those of `--match` included, can take in the time that is left."""
    every: dict[str, Any] = {"policy": "every_step"}
    probe = argparse.Namespace(
        **vars(options) | {"look": 0, "steps": options.tune_steps if options.tune else PACE_STEPS}
    )
    probes: Waiting = [
        (f"rate {rate:g}", every, argparse.Namespace(**vars(probe) | {"lr": rate})) for rate in options.tune
    ] or [("probe", every, probe)]
    found = [result for result in beside.go(probes) if result["finished"]]
    if not found:
        raise SystemExit("no rate of --tune, and no probe, came to its last step")
    if options.tune:
        losses = {result["settings"]["lr"]: result["validation_loss"] for result in found}
        options.lr = best_rate(losses)
        if told := at_edge(losses):
            print(f"--tune: {told}", flush=True)
    if options.together:
        print(f"rate {options.lr}, {beside.left():.0f} s left", flush=True)
        return
    spans = {r["cell"]: {"span": r["span"], "trained_steps": len(r["losses"])} for r in found}
    own = max(own_seconds(spans).values())
    count = len(cells(options)) + len([tau for tau in options.thresholds if tau in options.match])
    options.steps = max(PACE_STEPS, min(options.steps, int(MARGIN * beside.left() / (own * count))))
    print(
        f"rate {options.lr}, {options.steps} steps of each of up to {count} cells, "
        f"{own * 1e3:.0f} ms a step, {beside.left():.0f} s left",
        flush=True,
    )


def go_together(
    beside: Beside, options: argparse.Namespace, more: Callable[[dict[str, Any]], Waiting]
) -> None:
    """All cells of the first seed at the same time, at one pace: see `sync_pace`."""
    waiting = of_seed(options, options.seeds[0])
    path = options.output / "pace"
    pace = Pace(path, len(waiting), create=True)
    planner = Planner(pace, beside.end, options.steps, options.decay)
    if options.seconds >= 1e9:
        pace.settle(options.steps)
    for index, (name, keys, own) in enumerate(waiting):
        own = argparse.Namespace(**vars(own) | {"pace": (path, len(waiting), index)})
        waiting[index] = (name, keys, own)
    count, said = len(waiting), time.monotonic()

    def watch() -> None:
        nonlocal said
        settled = pace.settled
        if planner.look() != settled:
            print(f"{pace.settled} steps of each of {count} cells", flush=True)
        if time.monotonic() > said + 20:
            said = time.monotonic()
            print(f"step {pace.slowest}, {beside.left():.0f} s left", flush=True)

    beside.go(waiting, more, watch)


def go_beside(size: dict[str, Any], options: argparse.Namespace) -> int:
    """All cells of all seeds, `--beside` of them at a time, with a report after each: exit code, 0 where all
    came to their last step."""
    options.seed = options.seeds[0]
    beside = Beside(size, options)
    reported: list[dict[str, Any]] = []

    def more(result: dict[str, Any]) -> Waiting:
        reported.append(result)
        sync_report.write(reported, options.output, beside.missing)
        seeded = argparse.Namespace(**vars(options) | {"seed": result["seed"]})
        return [(name, keys, seeded) for name, keys in matched(result, options).items()]

    try:
        if options.tune or (options.seconds < 1e9 and not options.together):
            tune_and_plan(beside, options)
        if options.together:
            go_together(beside, options, more)
        else:
            beside.go([cell for seed in options.seeds for cell in of_seed(options, seed)], more)
    finally:
        beside.close()
    sync_report.write(reported, options.output, beside.missing)
    if reported:
        sync_report.draw(reported, options.output / "results.png")
        print((options.output / "results.md").read_text())
    else:
        print("no cell was run")
    return sync_report.exit_code(options.output)
