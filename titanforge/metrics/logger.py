"""One object that owns a run's timers, token counts, memory peaks and sinks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from titanforge.metrics.eta import EtaEstimator
from titanforge.metrics.flops import peak_flops
from titanforge.metrics.memory import MemoryPools
from titanforge.metrics.sinks.console import ConsoleSink
from titanforge.metrics.sinks.jsonl import JsonlSink
from titanforge.metrics.sinks.tensorboard import TensorBoardSink
from titanforge.metrics.sinks.wandb import WandbSink


class Sink(Protocol):
    """Where log lines go. ``values`` holds plain numbers, or None for what is unknown."""

    def log(self, values: dict[str, Any], step: int) -> None: ...

    def close(self) -> None: ...


def read_scalars(values: dict[str, Any]) -> dict[str, Any]:
    """Tensors to Python numbers: one transfer, hence one wait, for each device that holds some.

    Raises:
        ValueError: a tensor has more than one element, or is a DTensor (reading it would be a collective).
    """
    by_device: dict[torch.device, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if isinstance(value, DTensor) or value.numel() != 1:
                raise ValueError(
                    f"metric {name!r}: expected a reduced scalar, "
                    f"got {type(value).__name__} of shape {tuple(value.shape)}"
                )
            by_device.setdefault(value.device, []).append(name)
    read = dict(values)
    for names in by_device.values():
        # float64 holds every fp32 value and every count below 2**53.
        stacked = torch.stack([values[name].detach().reshape(()).to(torch.float64) for name in names])
        for name, number in zip(names, stacked.tolist(), strict=True):
            is_count = not values[name].dtype.is_floating_point
            read[name] = int(number) if is_count else number
    return read


class MetricsLogger:
    """Counts and times every step cheaply; reads the device and writes the sinks at log steps only.

    ``tokens_per_second`` covers all ranks; FLOP/s and MFU are per device. Time inside ``paused()``
    (evaluation, saving) belongs to no step: it is left out of the throughput, and counts for the ETA.

    Args:
        sinks: where lines go; none on ranks that do not log.
        log_freq, total_steps: steps between lines, last step.
        data_parallel_degree: ranks that read different tokens (each counts as many as this one).
        num_devices: all ranks; with ``data_parallel_degree`` it turns tokens into FLOP/s per device.
        flops_per_token: training FLOPs of one token.
        device_peak_flops: from ``peak_flops``; None: MFU is null.
        memory: pools to read at each line, or None.
        device: the training device.
        start_step: last step done before this process.
        tokens_seen: tokens of those steps, all ranks.
    """

    def __init__(
        self,
        sinks: list[Sink],
        *,
        log_freq: int,
        total_steps: int,
        data_parallel_degree: int = 1,
        num_devices: int = 1,
        flops_per_token: float = 0.0,
        device_peak_flops: float | None = None,
        memory: MemoryPools | None = None,
        device: torch.device | str = "cpu",
        start_step: int = 0,
        tokens_seen: int = 0,
    ) -> None:
        self.sinks = sinks
        self.log_freq = log_freq
        self.total_steps = total_steps
        self.data_parallel_degree = data_parallel_degree
        self.num_devices = num_devices
        self.flops_per_token = flops_per_token
        self.device_peak_flops = device_peak_flops
        self.memory = memory
        self.device = torch.device(device)
        self.tokens_seen = tokens_seen
        self._resumed_from = start_step
        self._last_step = start_step
        self._eta = EtaEstimator(total_steps)
        self.start()

    @classmethod
    def build(
        cls,
        config: Any,
        *,
        rank: int,
        world_size: int,
        data_parallel_degree: int,
        flops_per_token: float,
        device: torch.device | str,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        start_step: int = 0,
        tokens_seen: int = 0,
        logging_rank: int = 0,
    ) -> MetricsLogger:
        """The logger of a run, with the sinks that the ``JobConfig`` asks for on this rank."""
        device = torch.device(device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        is_logging_rank = rank == logging_rank
        return cls(
            build_sinks(config, rank, is_logging_rank, start_step),
            log_freq=config.metrics.log_freq,
            total_steps=config.training.steps,
            data_parallel_degree=data_parallel_degree,
            num_devices=world_size,
            flops_per_token=flops_per_token,
            # CPUs have no useful peak, and asking would warn about every laptop run.
            device_peak_flops=None if device.type == "cpu" else peak_flops(name),
            memory=MemoryPools(model, optimizer, device) if model is not None else None,
            device=device,
            start_step=start_step,
            tokens_seen=tokens_seen,
        )

    def start(self) -> None:
        """(Re)start the interval: call right before the first step."""
        self._interval_start = time.perf_counter()
        self._paused_seconds = 0.0
        self._data_seconds = 0.0
        self._interval_tokens = 0

    @contextlib.contextmanager
    def data_loading(self) -> Iterator[None]:
        """Time spent in here is time that training waited for data."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._data_seconds += time.perf_counter() - begin

    def count_tokens(self, local_tokens: int) -> None:
        """This rank took ``local_tokens`` input positions: host arithmetic only. Call once a micro-batch."""
        tokens = local_tokens * self.data_parallel_degree
        self._interval_tokens += tokens
        self.tokens_seen += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluation, saving, sampling: not part of any step's throughput."""
        # Steps queued on the device would otherwise run on the pause's time, and the pause's work on theirs.
        self._synchronize()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._paused_seconds += time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def observe_gradients(self) -> None:
        """Let the memory pools see the gradients (metadata only): call between backward and the update."""
        if self.memory is not None and self.sinks:
            self.memory.observe_gradients()

    def should_log(self, step: int) -> bool:
        """The first, every ``log_freq``-th and the last step."""
        return step == 1 or step % self.log_freq == 0 or step == self.total_steps

    def log(self, step: int, values: dict[str, Any]) -> dict[str, Any] | None:
        """Write one line for ``step`` (1-based); call it on every rank, where ``should_log`` says so.

        Args:
            values: ``loss``, ``grad_norm``, ``lr`` and whatever else; numbers, or scalar tensors already
                reduced over ranks, which are read here.

        Returns:
            What was written; None on a rank without sinks, which does not wait for its device.
        """
        if not self.sinks:
            self._last_step = step
            self.start()
            return None
        # Reading waits for the device to finish the step, so the clock is read after it.
        line = read_scalars(values)
        wall = time.perf_counter() - self._interval_start
        seconds = max(wall - self._paused_seconds, 1e-9)
        tokens_per_second = self._interval_tokens / seconds
        flops = tokens_per_second * self.flops_per_token / self.num_devices
        peak = self.device_peak_flops
        line |= {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self.num_devices,
            "tflops_per_second": flops / 1e12,
            "mfu": flops / peak if peak else None,
            "data_loading_share": self._data_seconds / seconds,
            "step_seconds": seconds / max(1, step - self._last_step),
            **(self.memory.read() if self.memory is not None else {"peak_memory_gib": None}),
            "tokens_seen": self.tokens_seen,
            "eta_seconds": self._eta.update(step, step - self._last_step, wall),
            "time": time.time(),
        }
        if self._resumed_from:
            line["resumed_from"] = self._resumed_from
            self._resumed_from = 0
        self._last_step = step
        self._write(line, step)
        self.start()
        return line

    def log_validation(self, step: int, loss: Any, tokens: Any, **more: Any) -> dict[str, Any] | None:
        """Write one validation line: mean loss over ``tokens`` tokens of all ranks, both already reduced."""
        if not self.sinks:
            return None
        line = read_scalars({"validation_loss": loss, "validation_tokens": tokens, **more}) | {
            "time": time.time()
        }
        self._write(line, step)
        return line

    def _write(self, line: dict[str, Any], step: int) -> None:
        for sink in self.sinks:
            sink.log(line, step)

    def close(self) -> None:
        """Finish every sink; the logger then drops what it is given."""
        sinks, self.sinks = self.sinks, []
        for sink in sinks:
            sink.close()


def build_sinks(config: Any, rank: int, is_logging_rank: bool, start_step: int) -> list[Sink]:
    """The sinks of one rank.

    The logging rank has console, ``metrics.jsonl`` and what is switched on. Others have none, or with
    ``metrics.save_for_all_ranks`` everything but the console, under names with ``_rank<r>``.
    """
    metrics = config.metrics
    folder = Path(config.job.dump_folder)
    if not (is_logging_rank or metrics.save_for_all_ranks):
        return []
    suffix = "" if is_logging_rank else f"_rank{rank}"
    sinks: list[Sink] = []
    if is_logging_rank:
        sinks.append(ConsoleSink(config.training.steps, colors=not metrics.disable_color_printing))
    sinks.append(JsonlSink(folder / f"metrics{suffix}.jsonl", start_step))
    if metrics.enable_tensorboard:
        sinks.append(TensorBoardSink(folder / f"{metrics.save_tb_folder}{suffix}", start_step))
    if metrics.enable_wandb:
        sinks.append(
            WandbSink(
                metrics.wandb_project,
                folder,
                dataclasses.asdict(config),
                description=config.job.description,
                start_step=start_step,
                rank=0 if is_logging_rank else rank,
            )
        )
    return sinks
