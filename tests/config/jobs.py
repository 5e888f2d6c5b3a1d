"""Job files and arguments through the checks of a configuration."""

from __future__ import annotations

import pytest

from titanforge.config import ConfigError, load_config, validate_config


def validate(*argv: str, world_size: int = 1, device: str = "cuda") -> list[str]:
    return validate_config(load_config(list(argv)), world_size, device)


def refusal_of(*argv: str, world_size: int = 1, device: str = "cuda") -> str:
    with pytest.raises(ConfigError) as caught:
        validate(*argv, world_size=world_size, device=device)
    message = str(caught.value)
    assert "\n" not in message, "an error must be one line"
    return message
