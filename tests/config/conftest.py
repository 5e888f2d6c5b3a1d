from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def job_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "job.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write
