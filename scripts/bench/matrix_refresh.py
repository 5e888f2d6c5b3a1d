"""The part `refresh_step` of `scripts/bench/matrix.py`: Dobb's call, with a refresh and without.

Three views of one call. Events around it and around the refresh within it: the device's clock, beside the
host's time and the allocations that reached the driver. The profiler: kernels of the refresh, of the update,
and all others; what is left of the call is time in which the device waits. A dispatch mode: torch's operators
of the refresh and the bytes of their operands, without kernels of ours; all that there is to see on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.bench.matrix_steps import PERIOD, Left, Marks, batch, gpt2, options, warm_bases
from titanforge.optim import build_optimizer

REFRESH = ("advance", "correct", "gram", "invert", "orthonormal", "product", "scale", "split", "take_sums")
UPDATE = ("narrow_step", "wide_step", "sign_coefficients", "rebuild_update", "flat")
MAKES_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_local_scalar_dense")


class Operands(TorchDispatchMode):
    """Operators that are not views, by name: how many, and bytes of the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        returned = [one.alias_info for one in func._schema.returns]
        name = func._schema.name.removeprefix("aten::")
        view = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
        if view or name in MAKES_NOTHING:
            return found
        self.calls[name] += 1
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        written = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        held = {id(one) for one in read}
        # What is changed in place is read and written; what is overwritten is written.
        again = () if name in ("copy_", "_foreach_copy_", "fill_", "zero_", "cat") else written
        self.bytes[name] += sum(map(_touched, read))
        self.bytes[name] += sum(_touched(one) for one in written if id(one) not in held)
        self.bytes[name] += sum(_touched(one) for one in again if id(one) in held)
        return found


def _touched(tensor: Tensor) -> int:
    """Bytes of the elements that have a place of their own: an expanded tensor is read once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride()):
        size *= length if stride else min(length, 1)
    return size


class Call:
    """Dobb with gradients in memory; each call of it is a step, of which every ninth refreshes."""

    def __init__(self, args: argparse.Namespace, model: Any, overlap: bool) -> None:
        self.args, self.model, self.tokens = args, model, batch(args, 1024)
        chosen = options(args, "Dobb", overlap_refresh=overlap)
        self.optimizer: Any = build_optimizer(model, chosen, args.dtype)
        warm_bases(self.optimizer)
        self._refresh = self.optimizer.capture.refresh
        self.optimizer.capture.refresh = self._timed_refresh
        self._marks, self._host = Marks("cpu"), 0.0
        self._seen: Operands | None = None

    def prepare(self) -> None:
        """What comes before the call: the forward whose inputs are captured, with overlap the refresh."""
        self.optimizer.begin_step(1)
        with torch.no_grad():
            self.model(self.tokens, None, None, self.tokens)
        self.optimizer.before_backward(0)
        if self.args.device == "cuda":
            torch.cuda.synchronize()

    def timed(self) -> dict[str, float]:
        """Milliseconds of the call and of the refresh within it, by the device's and the host's clock."""
        self.prepare()
        mallocs = _mallocs(self.args.device)
        self._marks = Marks(self.args.device)
        self._marks.mark()
        begun = time.perf_counter()
        self.optimizer.step()
        host = time.perf_counter() - begun
        self._marks.mark()
        before, refresh, after = self._marks.times()
        return {
            "call ms": before + refresh + after, "refresh ms": refresh, "host ms": host * 1e3,
            "host in refresh ms": self._host, "cudaMalloc": _mallocs(self.args.device) - mallocs,
        }  # fmt: skip

    def _timed_refresh(self, applies: Tensor, grad_scale: Tensor | None) -> None:
        self._marks.mark()
        begun = time.perf_counter()
        with self._seen or nullcontext():
            self._refresh(applies, grad_scale)
        self._host = (time.perf_counter() - begun) * 1e3
        self._marks.mark()

    def counted(self) -> dict[str, float]:
        """Torch's operators of the refresh within the call."""
        self.prepare()
        seen = self._seen = Operands()
        self.optimizer.step()
        self._seen = None
        top = ", ".join(f"{name} {size / 1e9:.2g}" for name, size in seen.bytes.most_common(6))
        print(f"GB by operator: {top}", flush=True)
        moved = sum(seen.bytes.values())
        return {
            "operators of the refresh": sum(seen.calls.values()),
            "operands GB": moved / 1e9,
            "at 4.25 TB/s ms": moved / 4.25e9,
        }

    def profiled(self) -> dict[str, float]:
        """Milliseconds of kernels by what they are for, and how many there were; empty on a CPU."""
        self.prepare()
        if self.args.device != "cuda":
            self.optimizer.step()
            return {}
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.optimizer.step()
            torch.cuda.synchronize()
        found = {"launches": 0, "refresh kernels ms": 0.0, "update kernels ms": 0.0, "other kernels ms": 0.0}
        for event in sorted(profiled.key_averages(), key=lambda one: -one.self_device_time_total):
            if not event.self_device_time_total:
                continue
            kind = "other"
            for of, names in (("refresh", REFRESH), ("update", UPDATE)):
                if event.key in [f"{name}_kernel" for name in names]:
                    kind = of
            found["launches"] += event.count
            found[f"{kind} kernels ms"] += event.self_device_time_total / 1e3
            if event.self_device_time_total > 30:
                took = event.self_device_time_total / 1e3
                print(f"  {took:8.3f} ms {event.count:5d} x {kind:8s} {event.key[:90]}", flush=True)
        return found


def _mallocs(device: str) -> int:
    return torch.cuda.memory_stats().get("num_device_alloc", 0) if device == "cuda" else 0


def refresh_step(args: argparse.Namespace, left: Left) -> list[dict[str, Any]]:
    """The call of steps with a refresh and of others, and what each is made of."""
    model, rows = gpt2(args), []
    generator = torch.Generator(args.device).manual_seed(2)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, device=args.device, generator=generator)
        parameter.grad = (drawn * 1e-3).to(parameter.dtype)
    for overlap in (False, True):
        if args.device == "cuda" and left() < 12:
            rows.append({"beside backward": overlap, "note": "not run: out of time"})
            continue
        call = Call(args, model, overlap)
        found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for step in range((2 if args.tiny else 4) * PERIOD):
            took = call.timed()
            if step >= PERIOD:  # the first of each kind compiles, and asks for memory
                found[step % PERIOD == 0].append(took)
        parts: dict[bool, dict[str, float]] = {True: {}, False: {}}
        for step in range(2 * PERIOD):  # a period for each, as both look at the first step and the second
            if step % PERIOD < 2:
                refreshes = step % PERIOD == 0
                print(f"beside backward {overlap}, refresh {refreshes}", flush=True)
                parts[refreshes] |= call.counted() if step < PERIOD else call.profiled()
            else:
                call.timed()
        for refreshes in (True, False):
            row: dict[str, Any] = {"beside backward": overlap, "step": "refresh" if refreshes else "other"}
            steps = found[refreshes]
            row |= {key: statistics.median(one[key] for one in steps) for key in steps[0]} | parts[refreshes]
            if "launches" in row:
                kernels = sum(row[f"{kind} kernels ms"] for kind in ("refresh", "update", "other"))
                row["device waits ms"] = row["call ms"] - kernels
            rows.append(row)
        del call
    return rows
