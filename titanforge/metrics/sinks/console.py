"""One aligned line a log step on the terminal."""

from __future__ import annotations

import math
import os
import sys
from typing import Any, TextIO

_RESET = "\033[0m"
_COLORS = {
    "step": "\033[31m",
    "loss": "\033[32m",
    "grad": "\033[33m",
    "lr": "\033[37m",
    "tok/s": "\033[36m",
    "TFLOP/s": "\033[36m",
    "MFU": "\033[35m",
    "data": "\033[90m",
    "mem": "\033[34m",
    "ETA": "\033[90m",
}


def format_duration(seconds: float | None) -> str:
    """``93784`` → ``1d02:03:04``; unknown → ``-``."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d{hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def _number(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)


class ConsoleSink:
    """Prints training and validation lines.

    Args:
        total_steps: sets the width of the step column.
        colors: False for plain text. Also plain when ``stream`` is not a terminal or NO_COLOR is set.
        stream: default standard output.
    """

    def __init__(self, total_steps: int, colors: bool = True, stream: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self.stream = stream if stream is not None else sys.stdout
        self.colors = colors and self.stream.isatty() and not os.environ.get("NO_COLOR")

    def _column(self, label: str, text: str, width: int) -> str:
        column = f"{label} {text:>{width}}"
        return f"{_COLORS.get(label, '')}{column}{_RESET}" if self.colors else column

    def log(self, values: dict[str, Any], step: int) -> None:
        width = len(str(self.total_steps))
        columns = [self._column("step", f"{step:>{width}}/{self.total_steps}", 2 * width + 1)]
        if "validation_loss" in values:
            columns.append(self._column("validation loss", _number(values["validation_loss"], ".4f"), 8))
            columns.append(self._column("tokens", _number(values.get("validation_tokens"), ",d"), 0))
        else:
            mfu = values.get("mfu")
            share = values.get("data_loading_share")
            columns += [
                self._column("loss", _number(values.get("loss"), ".4f"), 8),
                self._column("grad", _number(values.get("grad_norm"), ".3g"), 8),
                self._column("lr", _number(values.get("lr"), ".2e"), 8),
                self._column("tok/s", _number(values.get("tokens_per_second"), ",.0f"), 9),
                self._column("TFLOP/s", _number(values.get("tflops_per_second"), ",.2f"), 8),
                self._column("MFU", "-" if mfu is None else f"{100 * mfu:.1f}%", 6),
                self._column("data", "-" if share is None else f"{100 * share:.1f}%", 6),
                self._column("mem", _number(values.get("peak_memory_gib"), ".2f") + "GiB", 9),
                self._column("ETA", format_duration(values.get("eta_seconds")), 8),
            ]
            if values.get("skipped_steps"):
                columns.append(self._column("skipped", _number(values["skipped_steps"], ",.7g"), 0))
        print("  ".join(columns), file=self.stream, flush=True)

    def log_sample(self, prompt: str, text: str, step: int) -> None:
        body = "\n".join(f"  | {line}" for line in (prompt + text).splitlines())
        print(f"sample after step {step}:\n{body}", file=self.stream, flush=True)

    def close(self) -> None:
        self.stream.flush()
