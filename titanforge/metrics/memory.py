"""Peak memory of a rank, measured and split into pools: weights, states, gradients, activations."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

GIB = 1024**3


def process_peak_bytes() -> int:
    """Largest resident size that this process ever had, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # ru_maxrss is in KiB on Linux, in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def local_bytes(tensors: Iterable[torch.Tensor], device_type: str) -> int:
    """Bytes of the tensors' local parts on this kind of device; a tensor seen twice counts once."""
    seen: set[int] = set()
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type != device_type or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        total += local.numel() * local.element_size()
    return total


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


class MemoryPools:
    """Measures one rank's peak memory between two reads.

    The peak is the CUDA allocator's ``max_memory_allocated``, reset at each read; on CPU it is the
    largest resident size of the process so far, which cannot be reset. Weights (parameters and
    buffers), states and gradients are counted from their local shards on the training device;
    ``activations`` is the rest of the peak: saved activations, gathered weights, workspaces. On CPU
    the rest also excludes what the process (Python, libraries) held at construction.

    Build it after the model and the optimizer; read it while the gradients still exist (before the next
    ``zero_grad``). Reading costs no synchronisation with the device.

    Args:
        model: the (sharded) model.
        optimizer: anything with a ``state_dict()`` that has the states under ``"state"``; or None.
        device: where training runs; default: the device of the first parameter.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any = None, device: torch.device | str | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = torch.device(device) if device is not None else next(model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        # Of a captured step: the allocator counts what its graph keeps as free (`peak_bytes` knows).
        self.graph: Any = None
        self._retries = 0
        self._outside = 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            self._retries = torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)
        else:
            self._outside = max(0, process_peak_bytes() - self.weight_bytes() - self.state_bytes())

    def weight_bytes(self) -> int:
        """Bytes of this rank's parameters and buffers."""
        return local_bytes([*self.model.parameters(), *self.model.buffers()], self.device.type)

    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer states."""
        if self.optimizer is None:
            return 0
        return local_bytes(_tensors_in(self.optimizer.state_dict().get("state", {})), self.device.type)

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that exist now; what was consumed while backward ran is not among them."""
        gradients = (parameter.grad for parameter in self.model.parameters())
        return local_bytes([g for g in gradients if g is not None], self.device.type)

    def read(self) -> dict[str, float | int]:
        """The pools of the time since the last read, in GiB, and the counters; starts the next interval."""
        weights, states = self.weight_bytes(), self.state_bytes()
        gradients = self.gradient_bytes()
        values: dict[str, float | int] = {}
        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated(self.device)
            if self.graph is not None:
                peak = max(peak, self.graph.peak_bytes)
            retries = torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)
            values["memory/reserved_gib"] = torch.cuda.max_memory_reserved(self.device) / GIB
            values["memory/alloc_retries"] = retries
            if retries > self._retries:
                logger.warning(
                    "%d allocation retries since the last log line: memory is nearly full, and each one "
                    "stalls the device; lower training.local_batch_size or recompute more "
                    "(activation_checkpoint.mode)",
                    retries - self._retries,
                )
            self._retries = retries
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            peak = process_peak_bytes()
        rest = peak - self._outside - weights - states - gradients
        return {
            "peak_memory_gib": peak / GIB,
            "memory/weights_gib": weights / GIB,
            "memory/states_gib": states / GIB,
            "memory/gradients_gib": gradients / GIB,
            "memory/activations_gib": max(0, rest) / GIB,
            **values,
        }
