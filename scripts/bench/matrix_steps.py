"""Steps of `scripts/bench/matrix.py`: optimizer calls, what capturing costs, refreshes beside backward."""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titanforge.config.sections import Optimizer
from titanforge.models.initialization import initialize_weights
from titanforge.models.registry import build_model
from titanforge.optim import build_optimizer

Left = Callable[[], float]
PERIOD = 9


def gpt2(args: argparse.Namespace, flavor: str = "1.56B") -> nn.Module:
    """GPT-2 XL with random weights, in training mode."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, args.dtype))
    tiny = {"dim": 64, "n_layers": args.layers, "n_heads": 4}
    try:
        with torch.device("meta"):
            model: Any = build_model(
                "gpt2",
                "debugmodel" if args.tiny else flavor,
                vocab_size=512 if args.tiny else None,
                seq_len=64 if args.tiny else 1024,
                overrides=tiny if args.tiny else {},
            )[0]
    finally:
        torch.set_default_dtype(previous)
    model.to_empty(device=args.device)
    initialize_weights(model, 0)
    return model.train()


def options(args: argparse.Namespace, name: str, **dobb: Any) -> Optimizer:
    native = name not in ("AdamW fused",)
    made = Optimizer(
        name=name.split()[0],
        lr=1e-4,
        momentum=0.95,
        implementation="native" if native else "fused",
        state_dtype=args.dtype,
    )
    made.dion.rank_fraction = 1 / 16
    made.dobb.blocks = 16
    for key, value in dobb.items():
        setattr(made.dobb, key, value)
    return made


def warm_bases(optimizer: Any) -> None:
    """Leave the cold start's eigendecompositions, minutes of them, out: the next refresh is a warm one.

    Statistics become the identity, whole: a diagonal written over what had been captured would leave matrices
    that are not positive semidefinite, and C + eps I singular wherever an eigenvalue meets -eps.
    """
    if optimizer.capture is not None:
        for weight in optimizer.capture.weights:  # zeros would count as never captured
            weight.statistic.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)
        optimizer.capture.steps.fill_(PERIOD)
        optimizer.capture.loaded()


def batch(args: argparse.Namespace, tokens: int) -> Tensor:
    length = 64 if args.tiny else 1024
    generator = torch.Generator(args.device).manual_seed(1)
    shape = (max(1, tokens // length), length)
    return torch.randint(0, 500 if args.tiny else 50000, shape, device=args.device, generator=generator)


class Marks:
    """Milliseconds between pairs of events (on CPU: of the clock), read at the end."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if not self.on_gpu:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def times(self) -> list[float]:
        if not self.on_gpu:
            return [(b - a) * 1e3 for a, b in itertools.pairwise(self.marks)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(self.marks)]


class Peer:
    """Another library's optimizer for the matrices of the blocks, and AdamW as it has it for the rest."""

    capture = None

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    def begin_step(self, num_micro_batches: int) -> None:
        """Nothing."""

    def step(self) -> None:
        for part in self.parts:
            part.step()


def torch_muon(matrices: list[Tensor], others: list[Tensor]) -> Peer:
    """torch.optim.Muon, and torch's fused AdamW."""
    muon: Any = torch.optim.Muon  # pyright: ignore[reportAttributeAccessIssue]
    adamw = torch.optim.AdamW(others, lr=1e-4, fused=True)
    return Peer([muon(matrices, lr=1e-4, weight_decay=0.1), adamw])


def microsoft(matrices: list[Tensor], others: list[Tensor], name: str, **more: Any) -> Peer:
    """An optimizer of microsoft/dion (its `dion` package), which has both kinds of weights as groups."""
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    if name == "Muon":
        more["use_triton"] = matrices[0].is_cuda
    made = getattr(importlib.import_module("dion"), name)(groups, lr=1e-4, mu=0.95, weight_decay=0.1, **more)
    return Peer([made])


PEERS: dict[str, Callable[[list[Tensor], list[Tensor]], Peer]] = {
    "torch.optim.Muon": torch_muon,
    "microsoft/dion Muon": partial(microsoft, name="Muon"),
    "microsoft/dion Dion": partial(microsoft, name="Dion", rank_fraction=1 / 16),
}
METHODS = ("AdamW fused", "AdamW", "Dobb", "Muon", "RMNP", "Dion", *PEERS)
SECONDS = {"Dion": 55, "Muon": 40} | dict.fromkeys(PEERS, 40)
"""What a method wants left before it begins; others 12."""


def optimizer_calls(args: argparse.Namespace, left: Left) -> list[dict[str, Any]]:
    """`step()` alone, gradients in memory, averaged over a period of nine steps of which one refreshes."""
    methods = args.methods or METHODS
    rows: list[dict[str, Any]] = []
    model = gpt2(args)
    tokens = batch(args, 1024)
    for name in methods:
        if args.device == "cuda" and left() < SECONDS.get(name, 12):
            rows.append({"method": name, "note": "not run: out of time"})
            continue
        try:
            rows.append({"method": name, **_call_times(args, model, tokens, name)})
        except Exception as error:
            rows.append({"method": name, "note": f"{type(error).__name__}: {error}"[:300]})
        model.zero_grad(set_to_none=True)
        gc.collect()
        print(rows[-1], flush=True)
    base = next((row.get("amortised ms") for row in rows if row["method"] == "AdamW fused"), None)
    for row in rows:
        if base and row.get("amortised ms"):
            row["x AdamW fused"] = row["amortised ms"] / base
    return rows


def _call_times(args: argparse.Namespace, model: nn.Module, tokens: Tensor, name: str) -> dict[str, Any]:
    if name in PEERS:
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for weight, parameter in model.named_parameters():
            parts[parameter.dim() != 2 or not weight.startswith("layers.")].append(parameter)
        optimizer: Any = PEERS[name](*parts)
    else:
        optimizer = build_optimizer(model, options(args, name, overlap_refresh=False), args.dtype)
    generator = torch.Generator(args.device).manual_seed(2)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, device=args.device, generator=generator)
        parameter.grad = (drawn * 1e-3).to(parameter.dtype)
    if name != "AdamW fused" and name not in PEERS:
        warm_bases(optimizer)
    steps, calls, host = PERIOD, [], []
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def one() -> tuple[float, float]:
        optimizer.begin_step(1)
        if optimizer_has_capture(optimizer):
            with torch.no_grad():
                model(tokens, None, None, tokens)  # the hooks see real inputs; not timed
        if hasattr(optimizer, "before_backward"):
            optimizer.before_backward(0)
        if args.device == "cuda":
            torch.cuda.synchronize()
        marks = Marks(args.device)
        marks.mark()
        begun = time.perf_counter()
        optimizer.step()
        took = (time.perf_counter() - begun) * 1e3
        marks.mark()
        return marks.times()[0], took

    first, _ = one()  # compiles
    if first > 4000:
        first, _ = one()
    if first > 4000:
        steps = 2
    else:
        for _ in range(PERIOD - 1 if name == "Dobb" else 1):
            one()
    for _ in range(steps):
        device_ms, host_ms = one()
        calls.append(device_ms)
        host.append(host_ms)
    result: dict[str, Any] = {
        "amortised ms": statistics.fmean(calls),
        "median ms": statistics.median(calls),
        "longest ms": max(calls),
        "host ms": statistics.median(host),
        "calls": steps,
    }
    if args.device == "cuda":
        result["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def optimizer_has_capture(optimizer: Any) -> bool:
    return getattr(optimizer, "capture", None) is not None


def capture(args: argparse.Namespace, left: Left) -> list[dict[str, Any]]:
    """Forward and backward of steps that capture, and of those that do not."""
    model = gpt2(args)
    optimizer: Any = build_optimizer(model, options(args, "Dobb", overlap_refresh=False), args.dtype)
    tokens = batch(args, args.tokens)
    warm_bases(optimizer)
    times: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(2 if args.tiny else 8):
        if args.device == "cuda" and left() < 15:
            break
        for capturing in (True, False) if repeat % 2 else (False, True):
            optimizer.capture.steps.fill_(PERIOD if capturing else PERIOD + 1)
            optimizer.capture.loaded()
            model.zero_grad(set_to_none=True)
            optimizer.begin_step(1)
            marks = Marks(args.device)
            marks.mark()
            loss = model(tokens, None, None, tokens) / tokens.numel()
            optimizer.before_backward(0)
            loss.backward()
            marks.mark()
            if repeat:
                times[capturing] += marks.times()
    with_capture, without = (statistics.median(times[key]) for key in (True, False))
    return [
        {
            "tokens": tokens.numel(),
            "forward-backward ms": without,
            "with capture ms": with_capture,
            "overhead over T = 9, %": (with_capture - without) / without / PERIOD * 100,
            "spread of plain ms": max(times[False]) - min(times[False]),
            "steps": len(times[False]),
        }
    ]


def side_stream(args: argparse.Namespace, left: Left) -> list[dict[str, Any]]:
    """Whole refresh steps and the optimizer call in them, with the refresh beside backward and after it."""
    rows = []
    for flavor, blocks in (("1.56B", 16), ("124M", 1)):
        model = gpt2(args, flavor)
        tokens = batch(args, args.tokens)
        for overlap in (False, True):
            if args.device == "cuda" and left() < 8:
                rows.append({"model": flavor, "note": "not run: out of time"})
                continue
            chosen = options(args, "Dobb", overlap_refresh=overlap, blocks=blocks)
            optimizer: Any = build_optimizer(model, chosen, args.dtype)
            whole, calls, repeats = [], [], 2 if args.tiny else 6
            for repeat in range(repeats):
                warm_bases(optimizer)
                model.zero_grad(set_to_none=True)
                if args.device == "cuda":
                    torch.cuda.synchronize()
                marks = Marks(args.device)
                marks.mark()
                optimizer.begin_step(1)
                loss = model(tokens, None, None, tokens) / tokens.numel()
                optimizer.before_backward(0)
                loss.backward()
                marks.mark()
                optimizer.step()
                marks.mark()
                if repeat:
                    before, call = marks.times()
                    whole.append(before + call)
                    calls.append(call)
            rows.append(
                {
                    "model": "toy" if args.tiny else flavor, "B": blocks, "beside backward": overlap,
                    "refresh step ms": statistics.median(whole),
                    "optimizer call ms": statistics.median(calls),
                    "failed blocks": int(optimizer.capture.failed_blocks),
                    "of blocks": repeats * sum(len(one.basis) for one in optimizer.capture.weights),
                }
            )  # fmt: skip
            del optimizer
        del model
        gc.collect()
        if args.tiny:
            break
    return rows
