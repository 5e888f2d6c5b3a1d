"""TensorBoard events."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoardSink:
    """Scalars under their metric names.

    Args:
        folder: where the event file goes.
        start_step: step resumed from. Points after it, left by a killed run in the same folder, are
            hidden by TensorBoard (``purge_step``); 0: nothing to hide.
    """

    def __init__(self, folder: str | Path, start_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder), purge_step=start_step + 1 if start_step else None)

    def log(self, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            # A wall-clock stamp stands on every event already.
            if name != "time" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def log_sample(self, prompt: str, text: str, step: int) -> None:
        # Indented by four spaces, Markdown shows it as it is.
        body = "\n".join("    " + line for line in (prompt + text).splitlines())
        self._writer.add_text(f"sample/{prompt[:40]}", body, global_step=step)

    def close(self) -> None:
        self._writer.close()
