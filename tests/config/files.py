"""Job files that a test writes (its fixture `job_file`), and the errors that they raise."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanforge.config import ConfigError, JobConfig, load_config


def load_text(job_file, text: str, *overrides: str) -> JobConfig:
    return load_config(["--job.config_file", job_file(text), *overrides])


def error_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(argv))
    message = str(caught.value)
    assert "\n" not in message, "an error must be one line"
    return message


def file_error(job_file, text: str) -> str:
    return error_of("--job.config_file", job_file(text)).replace(str(Path(job_file(text)).parent) + "/", "")
