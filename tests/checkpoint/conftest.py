"""A group of one in the test's own process: real collectives, no process to start."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture
def one_process():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
