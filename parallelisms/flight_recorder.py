"""PyTorch's flight recorder: the last collectives of each rank, written to files when a run fails.

`torchfrtrace`, which comes with PyTorch, reads a folder of NCCL's and tells which rank did not join which
collective. It does not read gloo's (torch 2.13): those are pickled dicts, whose `entries` name each one.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Protocol

import torch._C._distributed_c10d as c10d


class TraceSettings(Protocol):
    """What is read of the `[comm]` section."""

    trace_buf_size: int
    save_traces_folder: str
    save_traces_file_prefix: str


class FlightRecorder:
    """Of one process; make it before its first process group.

    comm.trace_buf_size: entries kept for each backend; 0: none, and nothing is written. What the user
    exported (TORCH_FR_BUFFER_SIZE and so on) stays.
    dump_folder: what `comm.save_traces_folder` is relative to.
    """

    def __init__(self, comm: TraceSettings, dump_folder: str, device_type: str) -> None:
        self._enabled = comm.trace_buf_size > 0
        self._folder = Path(dump_folder, comm.save_traces_folder)
        self._prefix, self._device_type = comm.save_traces_file_prefix, device_type
        if not self._enabled:
            return
        environment = {"TORCH_FR_BUFFER_SIZE": str(comm.trace_buf_size)}
        if device_type == "cuda":  # NCCL's watchdog writes by itself, into a folder that exists
            self._folder.mkdir(parents=True, exist_ok=True)
            environment |= {
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
                "TORCH_FR_DUMP_TEMP_FILE": str(self._folder / self._prefix),
            }
        for name, value in environment.items():
            if not any(alias in os.environ for alias in (name, _OLD_NAMES.get(name, name))):
                os.environ[name] = value

    def dump(self, rank: int) -> list[Path]:
        """Write what was recorded; the files. NCCL's records go to `<prefix><rank>`; on GPUs those of gloo,
        which carries the agreements between hosts, to `gloo_<prefix><rank>`."""
        if not self._enabled:
            return []
        files = []
        on_gpus = self._device_type == "cuda"
        for function, name in (
            ("_dump_nccl_trace", f"{self._prefix}{rank}" if on_gpus else ""),
            ("_dump_fr_trace", f"{'gloo_' * on_gpus}{self._prefix}{rank}"),
        ):
            if name and hasattr(c10d, function):
                record = getattr(c10d, function)()
                if pickle.loads(record).get("entries"):
                    self._folder.mkdir(parents=True, exist_ok=True)
                    files.append(self._folder / name)
                    files[-1].write_bytes(record)
        return files


_OLD_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
