"""metrics.jsonl: one JSON object a line, written whole, cut back on resume, and read back for plots."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def to_json_line(values: dict[str, Any]) -> str:
    """One line of strict JSON: NaN and infinities, which it lacks, become null, named under ``nonfinite``."""
    nonfinite = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    if nonfinite:
        values = {k: None if k in nonfinite else v for k, v in values.items()} | {"nonfinite": nonfinite}
    return json.dumps(values, allow_nan=False, ensure_ascii=False) + "\n"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Every line of a metrics file, in order.

    A last line without its end is what a kill in mid-write leaves; it is left out silently. Other
    unreadable lines are left out with a warning that names the first.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file has lines, and none of them is a metrics line.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    records, broken = [], []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["step"] = int(record["step"])
            records.append(record)
        except (ValueError, KeyError, TypeError):
            broken.append(number)
    if broken and not records:
        raise ValueError(f"{path}: not a metrics file: no line is a JSON object with a step")
    if broken and (broken[0] < len(lines) or text.endswith("\n")):
        logger.warning(
            "%s: left out %d unreadable line(s), the first is line %d", path, len(broken), broken[0]
        )
    return records


class JsonlSink:
    """Appends to ``path``. A run resumed from step s first drops what the killed run wrote after s.

    A disk that is full costs lines, not the run.

    Args:
        path: the file; its folder is made.
        start_step: step of the checkpoint that training goes on from; 0 for a fresh start, which
            moves an existing file aside (``metrics.1.jsonl``, …) instead of mixing two runs.
    """

    def __init__(self, path: str | Path, start_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            if start_step == 0:
                self._move_aside()
            else:
                self._drop_after(start_step)
        # O_APPEND and one write a line: a kill leaves whole lines, or one torn last line that resume drops.
        self._torn = self._failing = False
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def log(self, values: dict[str, Any], step: int) -> None:
        # The end that a write on a full disk left off belongs to no line.
        data = (b"\n" if self._torn else b"") + to_json_line({"step": step} | values).encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
                self._torn = bool(data)
        except OSError as error:
            if not self._failing:
                logger.error(
                    "%s: the line of step %d cannot be written (%s). Training goes on; lines are lost until "
                    "there is room in job.dump_folder.",
                    self.path,
                    step,
                    error.strerror,
                )
            self._failing = True
        else:
            self._failing = False

    def log_sample(self, prompt: str, text: str, step: int) -> None:
        """Nothing: this file holds numbers; samples have a file of their own."""

    def close(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def _move_aside(self) -> None:
        if self.path.stat().st_size == 0:
            return
        number = 1
        while (target := self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")).exists():
            number += 1
        os.replace(self.path, target)
        logger.info("the former %s is now %s", self.path.name, target.name)

    def _drop_after(self, step: int) -> None:
        try:
            kept = [record for record in read_metrics(self.path) if record["step"] <= step]
        except ValueError:
            # Not ours, or one torn line: nothing to continue, and nothing to destroy either.
            self._move_aside()
            return
        scratch = self.path.with_name(self.path.name + ".tmp")
        with open(scratch, "w", encoding="utf-8") as file:
            file.writelines(to_json_line(record) for record in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, self.path)
