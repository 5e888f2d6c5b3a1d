"""One object that owns a run's timers, token counts, memory peaks and sinks."""

from __future__ import annotations

import contextlib
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

    def log_sample(self, prompt: str, text: str, step: int) -> None: ...

    def close(self) -> None: ...


class Runtime(Protocol):
    """What the logger asks of the process's place in the run."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


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
    """Times every step cheaply; reads the device and writes the sinks at log steps only.

    ``tokens_per_second`` covers all ranks; FLOP/s and MFU are per device. Time inside ``pause()``
    (evaluation, saving) belongs to no step: it is left out of the throughput, and counts for the ETA.

    Args:
        config: the ``JobConfig``.
        config_values: the same as a plain dictionary, for the dashboards.
        runtime: ``rank``, ``world_size`` and ``device`` of this process.
        model: asked for ``flops_per_token(seq_len)`` and its memory.
        optimizer: asked for the memory of its states.
        resume_step: last step done before this process began; 0 for a fresh start.
        tokens_seen: tokens of those steps, over all ranks.
        sinks: where lines go; default: what the configuration says for this rank.
    """

    def __init__(
        self,
        config: Any,
        config_values: dict[str, Any],
        runtime: Runtime,
        model: Any,
        optimizer: Any,
        resume_step: int = 0,
        tokens_seen: int = 0,
        *,
        sinks: list[Sink] | None = None,
    ) -> None:
        self.log_freq: int = config.metrics.log_freq
        self.total_steps: int = config.training.steps
        self.device = runtime.device
        self.world_size = runtime.world_size
        if sinks is None:
            sinks = build_sinks(config, config_values, runtime.rank, runtime.rank == 0, resume_step)
        self.sinks = sinks
        self.flops_per_token = float(model.flops_per_token(config.training.seq_len))
        # CPUs have no peak worth dividing by, and asking would warn in every run on a laptop.
        on_gpu = self.device.type == "cuda"
        self.device_peak_flops = peak_flops(torch.cuda.get_device_name(self.device)) if on_gpu else None
        self.memory = MemoryPools(model, optimizer, self.device) if sinks else None
        self._samples: JsonlSink | None = None
        self._samples_path = Path(config.job.dump_folder) / "samples.jsonl"
        self._resume_step = self._resumed_from = self._last_step = resume_step
        self._last_tokens = tokens_seen
        self._eta = EtaEstimator(self.total_steps)
        self._sync_events: list[tuple[int, dict[str, Any]]] = []
        self._interval_start: float | None = None
        self._paused_seconds = self._data_seconds = 0.0

    def _start_interval(self) -> None:
        self._interval_start = time.perf_counter()
        self._paused_seconds = 0.0
        self._data_seconds = 0.0

    def watch_graph(self, graph: Any) -> None:
        """Steps are replays of a graph that holds its own memory: `graph.peak_bytes`."""
        if self.memory is not None:
            self.memory.graph = graph

    def begin_step(self) -> None:
        """A step begins. The first call starts the clock; later ones cost nothing."""
        if self._interval_start is None:
            self._start_interval()

    @contextlib.contextmanager
    def data_loading(self) -> Iterator[None]:
        """Time spent in here is time that training waited for data."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._data_seconds += time.perf_counter() - begin

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
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

    def due(self, step: int) -> bool:
        """The first, every ``log_freq``-th and the last step."""
        return step == 1 or step % self.log_freq == 0 or step == self.total_steps

    def end_step(
        self,
        step: int,
        *,
        loss: Any,
        grad_norm: Any,
        lr: float,
        tokens_seen: int,
        ledger: Any = None,
        **more: Any,
    ) -> dict[str, Any] | None:
        """Step ``step`` (1-based) is done; where one is due, write a line. Call it on every rank.

        Args:
            loss, grad_norm, more: numbers, or scalar tensors already reduced over ranks. They are read
                here, when a line is due and this rank has sinks: there alone the host waits.
            tokens_seen: tokens of the run so far, over all ranks.
            ledger: the communication ledger; its totals so far (``metrics()``) join the line.

        Returns:
            What was written, or None.
        """
        if not self.due(step) or not self.sinks:
            return None
        self._write_sync_events()
        line = read_scalars({"loss": loss, "grad_norm": grad_norm, "lr": lr, **more})
        # Reading waited for the device to finish the step, so the clock is read after it.
        assert self._interval_start is not None, "begin_step comes first"
        wall = time.perf_counter() - self._interval_start
        seconds = max(wall - self._paused_seconds, 1e-9)
        tokens_per_second = (tokens_seen - self._last_tokens) / seconds
        steps = step - self._last_step
        flops = tokens_per_second * self.flops_per_token / self.world_size
        peak = self.device_peak_flops
        line |= {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self.world_size,
            "tflops_per_second": flops / 1e12,
            "mfu": flops / peak if peak else None,
            "data_loading_share": self._data_seconds / seconds,
            "step_seconds": seconds / max(1, steps),
            **(self.memory.read() if self.memory is not None else {}),
            **(ledger.metrics() | ledger.timings() if ledger is not None else {}),
            "tokens_seen": tokens_seen,
            "eta_seconds": self._eta.update(step, steps, wall),
            "time": time.time(),
        }
        if self._resumed_from:
            line["resumed_from"] = self._resumed_from
            self._resumed_from = 0
        self._last_step, self._last_tokens = step, tokens_seen
        self._write(line, step)
        self._start_interval()
        return line

    def log_validation(self, step: int, *, loss: Any, tokens: Any, **more: Any) -> dict[str, Any] | None:
        """Write one validation line: mean loss over ``tokens`` tokens of all ranks, both already reduced."""
        if not self.sinks:
            return None
        self._write_sync_events()
        line = read_scalars({"validation_loss": loss, "validation_tokens": tokens, **more})
        line["time"] = time.time()
        self._write(line, step)
        return line

    def sync_events(self, step: int, events: list[dict[str, Any]]) -> None:
        """Replicas synchronised at step ``step``. Kept until the next line, and written to ``metrics.jsonl``
        alone: the host waits for no device here, and consoles are not flooded."""
        if self.sinks:
            self._sync_events += [(step, event) for event in events]

    def _write_sync_events(self) -> None:
        events, self._sync_events = self._sync_events, []
        for step, event in events:
            values = read_scalars(event)
            for sink in self.sinks:
                if isinstance(sink, JsonlSink):
                    sink.log(values, step)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Show what the model made of ``prompt``; also kept in ``samples.jsonl``."""
        if not self.sinks:
            return
        if self._samples is None:
            self._samples = JsonlSink(self._samples_path, self._resume_step)
        self._samples.log({"prompt": prompt, "text": text}, step)
        for sink in self.sinks:
            sink.log_sample(prompt, text, step)

    def _write(self, line: dict[str, Any], step: int) -> None:
        for sink in self.sinks:
            sink.log(line, step)

    def close(self) -> None:
        """Finish every sink; the logger then drops what it is given. Calling it again does nothing."""
        self._write_sync_events()
        sinks, self.sinks = self.sinks, []
        if self._samples is not None:
            self._samples.close()
            self._samples = None
        for sink in sinks:
            sink.close()


def build_sinks(
    config: Any, config_values: dict[str, Any], rank: int, is_logging_rank: bool, start_step: int
) -> list[Sink]:
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
                config_values,
                description=config.job.description,
                start_step=start_step,
                rank=0 if is_logging_rank else rank,
            )
        )
    return sinks
